"""kill -9 at every step of every role: nothing is lost, nothing is applied twice."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from tests.refdata.scenarios.crash_points import ADAPTING, CHANGING, REFUSING, RELAYING, REPLACING, SENDING, SWEEPING
from tests.refdata.scenarios.role_processes import ROLES, RoleProcesses, load, make_delta, role_processes
from tests.services.kafka import Kafka
from tests.services.redis import RedisServer, redis_binary
from tests.support.require import require
from tests.support.soak import Campaign, examples


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer(redis_binary() or require("redis", "there is no redis-server here"))
    yield server
    server.stop()


@pytest.fixture
async def harness(
    tmp_path: Path, database_url: str, bus_kind: str, request: pytest.FixtureRequest
) -> AsyncIterator[RoleProcesses]:
    """Yield roles on PostgreSQL alone, as embedded, or on Kafka and Redis, as in production."""
    is_kafka = bus_kind == "kafka"
    broker: Kafka | None = request.getfixturevalue("broker") if is_kafka else None
    redis: RedisServer | None = request.getfixturevalue("redis_server") if is_kafka else None
    if broker is not None:
        broker.needs_real("makes no topics when it is asked to")
    async with role_processes(tmp_path, database_url, broker, redis, is_static=True) as harness:
        yield harness


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(("changed", "committed", "replaced"), id="some"),
        pytest.param((*CHANGING, *REPLACING, *REFUSING), id="all", marks=pytest.mark.full),
    ],
)
async def test_an_applier_may_die_anywhere(harness: RoleProcesses, points: Sequence[str]) -> None:
    """R11, R13: killed after the take, in the transaction, at its end and after it; for snapshots and rejections."""
    await harness.start("command-api", "apply", "relay")
    for point in points:
        harness.order("apply", point, 2 if point in CHANGING else 1)
        async with asyncio.TaskGroup() as group:
            group.create_task(harness.died_and_came_back("apply"))
            group.create_task(harness.send(load()))
        await harness.grow_old()  # so that the sweeper looks for them, too
        await harness.settled()
        await harness.check()


@pytest.mark.full
async def test_the_command_api_may_die_anywhere(harness: RoleProcesses) -> None:
    """R8: killed before and after storing the update and publishing; a repeated command commits once, others end."""
    await harness.start("command-api", "apply", "relay")
    ends = {"opening": None, "opened": "NOT_DELIVERED", "published": "COMMITTED"}
    for point in SENDING:
        harness.order("command-api", point, 3)
        async with asyncio.TaskGroup() as group:
            group.create_task(harness.died_and_came_back("command-api"))
            group.create_task(harness.send(load()))
        harness.order("command-api", point)
        assert not await harness.send_once(make_delta("acme"), ends[point])
        await harness.died_and_came_back("command-api")
        await harness.grow_old()
        await harness.settled()
        await harness.check()


@pytest.mark.full
async def test_the_sweeper_may_die_anywhere(harness: RoleProcesses) -> None:
    """R8: killed before and after publishing; a command that is not repeated ends, a command on the bus commits."""
    await harness.start("command-api", "apply", "relay")
    for point in SWEEPING:
        harness.order("command-api", "opened")
        assert not await harness.send_once(make_delta("acme"), "NOT_DELIVERED")
        await harness.died_and_came_back("command-api")
        harness.order("apply", point)
        await harness.grow_old()
        await harness.died_and_came_back("apply")
        await harness.send(load())
        await harness.grow_old()
        await harness.settled()
        await harness.check()


@pytest.mark.full
async def test_the_adapter_may_die_anywhere(harness: RoleProcesses) -> None:
    """R10: killed after the take, before and after storing the update and publishing, before and after settling."""
    await harness.start("kafka-adapter", "apply", "relay")
    for point in ADAPTING:
        harness.order("kafka-adapter", point, 2)
        async with asyncio.TaskGroup() as group:
            group.create_task(harness.died_and_came_back("kafka-adapter"))
            group.create_task(harness.publish_foreign(8))
        await harness.settled()
        await harness.check()


@pytest.mark.full
async def test_what_a_dead_adapter_holds_is_not_given_up(harness: RoleProcesses) -> None:
    """R8, R10: a message of an external topic has no other id, so the sweeper must not fail it."""
    await harness.start("kafka-adapter", "apply", "relay")
    harness.order("kafka-adapter", "opened")
    await harness.publish_foreign(2)
    await harness.died("kafka-adapter")
    await harness.grow_old()
    await harness.nothing_pends()
    await harness.start("kafka-adapter")
    await harness.settled()
    await harness.check()


@pytest.mark.full
async def test_the_relay_may_die_anywhere(harness: RoleProcesses) -> None:
    """R15: killed before and after the announcement and its mark; every commit is announced."""
    await harness.start("command-api", "apply", "relay")
    for point in RELAYING:
        harness.order("relay", point, 2)
        async with asyncio.TaskGroup() as group:
            group.create_task(harness.died_and_came_back("relay"))
            group.create_task(harness.send(load()))
        await harness.settled()
        await harness.check()


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_anybody_may_die_anywhere(harness: RoleProcesses, campaign: Campaign) -> None:
    """R8, R10, R11, R13, R15: in each round a random role is killed at a random step."""
    points = {
        "command-api": SENDING,
        "apply": (*CHANGING, *REPLACING, *REFUSING),
        "kafka-adapter": ADAPTING,
        "relay": RELAYING,
    }
    campaign.counts_items = True
    await harness.start(*ROLES)
    for number in range(examples(2, soak=100)):
        role = random.choice(list(points))
        point = random.choice(points[role])
        nth = 1 if point in REPLACING else random.randint(1, 2)  # there is one snapshot a round
        harness.order(role, point, nth)
        async with asyncio.TaskGroup() as group:
            group.create_task(harness.died_and_came_back(role))
            group.create_task(harness.send(load()))
            group.create_task(harness.publish_foreign(8))
        await harness.settled()
        try:
            await harness.check()
        except AssertionError as error:
            error.add_note(f"round {number}: {role} died at {point}, passage {nth}")
            raise
        campaign.end_round(faults=1)
