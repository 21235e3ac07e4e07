"""Appliers that hang longer than their session: others take over, and nothing is applied twice."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.refdata.scenarios.role_processes import RoleProcesses, load, role_processes
from tests.services.kafka import Kafka
from tests.support.wait import becomes

FROZEN = {"apply.1": "taken", "apply.2": "noted", "apply.3": "written", "apply.4": "applied"}
AWAKE = "apply.5"


@pytest.fixture
async def harness(
    tmp_path: Path, database_url: str, bus_kind: str, request: pytest.FixtureRequest
) -> AsyncIterator[RoleProcesses]:
    broker: Kafka | None = request.getfixturevalue("broker") if bus_kind == "kafka" else None
    if broker is not None:
        broker.needs_real("makes no topics when it is asked to")
    async with role_processes(tmp_path, database_url, broker, None) as harness:
        await harness.start("command-api", "relay")
        yield harness


async def freeze(harness: RoleProcesses, orders: dict[str, str]) -> None:
    """Send work until each process has stopped at its point."""
    for name, point in orders.items():
        harness.order(name, point, how=signal.SIGSTOP)

    async def are_frozen() -> bool:
        if all(harness.is_frozen(name) for name in orders):
            return True
        await harness.send(load())
        if "kafka-adapter" in harness.running:
            await harness.publish_foreign(8)
        return False

    await becomes(are_frozen, "they do not freeze")


@pytest.mark.full
async def test_a_frozen_applier_wakes_up_and_applies_nothing_twice(harness: RoleProcesses) -> None:
    """R11: stopped after the take, inside the transaction, before its end and after it; the others continue."""
    await harness.start(*FROZEN, AWAKE)
    await freeze(harness, FROZEN)
    await harness.settled()
    await harness.check()
    for name in FROZEN:
        harness.wake(name)
    await harness.send(load())
    await harness.settled()
    await harness.check()
    await harness.stop(AWAKE)
    await harness.send(load())
    await harness.settled()
    await harness.check()


@pytest.mark.full
async def test_a_stopped_relay_and_a_stopped_adapter_block_no_other(harness: RoleProcesses) -> None:
    """R10, R15: stopped between their two steps, others do both; when they resume, nothing is applied twice."""
    frozen = {"relay.1": "announced", "kafka-adapter.1": "opened"}
    await harness.start("apply", "kafka-adapter", *frozen)
    await freeze(harness, frozen)
    await harness.settled()
    await harness.check()
    for name in frozen:
        harness.wake(name)
    await harness.stop("relay")
    await harness.stop("kafka-adapter")
    await harness.send(load())
    await harness.publish_foreign(2)
    await harness.settled()
    await harness.check()


@pytest.mark.full
@pytest.mark.parametrize("bus_kind", ["postgres"])
async def test_an_applier_that_stops_while_it_settles_blocks_no_other(harness: RoleProcesses) -> None:
    """R11: after the lease its messages belong to another worker, also if it stopped in the bus's transaction."""
    await harness.start("apply.1", "apply.2")
    await freeze(harness, {"apply.1": "freeing"})
    await harness.settled(within=10)
    harness.wake("apply.1")
    await harness.stop("apply.2")
    await harness.send(load())
    await harness.settled()
    await harness.check()
