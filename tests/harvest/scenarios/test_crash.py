"""kill -9 at every step of every kind of work, and at any time: no record is lost, no message counts twice."""

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.harvest.contract import CONSOLIDATIONS, PLANS, WORK_ITEMS, HarvestRunState
from penstock.harvest.simulator.faults import Faults, Rates
from penstock.harvest.simulator.server import LocalOptions
from penstock.settings import Settings
from tests.harvest.harness import TOPICS, HarvestHarness, RequestLog, harvest_harness, record_requests
from tests.harvest.scenarios.worker_process import HarvestWorkerProcess
from tests.services.kafka import Kafka, kafka
from tests.support.soak import Campaign, examples
from tests.support.types import Json
from tests.support.wait import becomes

# The steps of each kind of work that a short campaign kills.
SPREAD = {PLANS: (1, 4, 22, 28), WORK_ITEMS: (1, 3, 8, 13, 17, 40), CONSOLIDATIONS: (1, 4, 9, 17, 19, 22, 24)}
PAGE, PAGES = 30, 2
BROKER_TIMEOUT = 10.0  # seconds, for the report of a failed test
FAULTS = Faults(
    rate_429=0.01, retry_after=0, rate_500=0.05, rate_timeout=0.01, rate_short=0.1, rate_garbage=0.02, rate_cut=0.02
)
CHURN = Rates(updates=10, inserts=3, deletes=3)


@pytest.fixture(scope="session")
def broker() -> Iterator[Kafka]:
    with kafka() as broker:
        yield broker


@pytest.fixture(params=["postgres", "kafka"])
def bus(request: pytest.FixtureRequest) -> Kafka | None:
    """Return a broker, or None for the bus in PostgreSQL."""
    if request.param == "postgres":
        return None
    broker: Kafka = request.getfixturevalue("broker")
    broker.needs_real("makes no topics when it is asked to")
    return broker


@pytest.fixture
async def harness(bus: Kafka | None, database_url: str, tmp_path: Path) -> AsyncIterator[HarvestHarness]:
    async with harvest_harness(database_url, tmp_path, kafka=bus, harvest={"workers": 2}) as harness:
        yield harness


@pytest.fixture
async def large_feed(bus: Kafka | None, database_url: str, tmp_path: Path) -> AsyncIterator[HarvestHarness]:
    """Open a larger feed, whose source changes continuously."""
    async with harvest_harness(
        database_url,
        tmp_path,
        LocalOptions(records=3_000),
        kafka=bus,
        harvest={"workers": 2},
        partitions={"count": 10, "min_records": 100, "tolerance": 0.1},
        limits={"passes": 8, "max_delete_ratio": 0.9},
    ) as harness:
        yield harness


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@pytest.mark.parametrize("topic", [pytest.param(PLANS, marks=pytest.mark.full), WORK_ITEMS, CONSOLIDATIONS])
async def test_worker_may_die_at_any_step(
    harness: HarvestHarness, bus: Kafka | None, topic: str, tmp_path: Path, campaign: Campaign
) -> None:
    """H4, H5, H8: a worker is killed before its n-th step; the next one continues, and each message counts once."""
    campaign.counts_items = True
    for nth in range(1, 10_000) if examples(0, soak=1) else SPREAD[topic][:: 1 if bus is None else 3]:
        harness.source.change_records(updates=10, inserts=3, deletes=2)
        run_id = await harness.start(full=True)
        worker = HarvestWorkerProcess(harness.settings, tmp_path / "log", topic, nth)
        if not await wait_for_death(harness, run_id, worker):
            break
        try:
            await continue_run(harness, run_id)
        except AssertionError as error:
            error.add_note(f"died at step {nth} of {topic}")
            raise
        campaign.end_round(faults=1)
    assert nth > 3


async def wait_for_death(harness: HarvestHarness, run_id: UUID, worker: HarvestWorkerProcess) -> bool:
    """Wait until the worker dies or the run is completed and settled; return whether it died."""

    async def has_ended() -> bool:
        return not worker.is_alive or (
            await harness.read_state(run_id) == HarvestRunState.COMPLETED and not await harness.backlog()
        )

    await becomes(has_ended, "the worker dies, or ends the run", explain=harness.describe_state)
    if worker.is_alive:
        worker.kill()
        return False
    worker.join_killed()
    return True


async def continue_run(harness: HarvestHarness, run_id: UUID) -> None:
    async with harness.run_workers():
        await harness.wait_for_end(run_id)
        await harness.check_quiet()
    await harness.check_run(run_id)
    await harness.check_records()
    assert await harness.count_seen(run_id) == len(harness.source.read_truth())
    turns = sum(count_turns(part["counted"]) for part in await harness.list_partitions(run_id))
    assert (await harness.count_published(run_id))[WORK_ITEMS] == turns


def count_turns(count: int) -> int:
    """Return the number of work items for one pass over an unchanging partition."""
    turns, offset = 0, 0
    while True:
        turns += 1
        for _ in range(min(-(-(count - offset) // PAGE) + 1, PAGES)):
            size = min(PAGE, count - offset)
            if size == 0:
                return turns
            offset += size
            if size < PAGE:
                break


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_workers_may_die_at_any_moment(
    large_feed: HarvestHarness, bus: Kafka | None, tmp_path: Path, campaign: Campaign
) -> None:
    """H4, H5, H9, H16: of two processes one is killed at a random time, while the source changes."""
    campaign.counts_items = True
    try:
        await run_campaign(large_feed, tmp_path / "log", examples(4 if bus is None else 1, soak=100), campaign)
    except AssertionError as error:
        error.add_note(await describe_unfinished(large_feed))
        raise


async def run_campaign(large_feed: HarvestHarness, log: Path, rounds: int, campaign: Campaign) -> None:
    requests = record_requests(large_feed.source)
    workers = [HarvestWorkerProcess(large_feed.settings, log) for _ in range(2)]
    for number in range(rounds):
        large_feed.source.set_faults(FAULTS)
        large_feed.source.set_churn(CHURN)
        requests.pages.clear()
        run_id = await large_feed.start(full=number % 3 == 0)
        for _ in range(random.randint(1, 2)):
            await wait_for_random_time(large_feed, requests, run_id)
            workers.pop(0).kill()
            workers.append(HarvestWorkerProcess(large_feed.settings, log))
            campaign.faults += 1
        await large_feed.wait_for_end(run_id)
        large_feed.source.set_churn()
        run = await large_feed.check_run(run_id)
        changed = large_feed.source.find_ids_changed_since(run["upper_bound"])
        try:
            await large_feed.check_records(but=changed, gone=await find_deleted(large_feed))
        except AssertionError as error:
            error.add_note(await explain_missing(large_feed, requests, run, changed))
            raise
        campaign.end_round()
    large_feed.source.set_faults()
    await large_feed.wait_for_end(await large_feed.start(full=True))
    await large_feed.check_records()
    await large_feed.check_quiet()
    for worker in workers:
        worker.kill()


async def wait_for_random_time(harness: HarvestHarness, requests: RequestLog, run_id: UUID) -> None:
    """Wait for a random request of a run, for its consolidation, or for its end."""
    count, passed = len(requests.requests) + random.randint(1, 150), asyncio.Event()
    requests.act = lambda _path, _number: passed.set() if len(requests.requests) >= count else None

    async def is_late() -> bool:
        state = await harness.read_state(run_id)
        return passed.is_set() or state in (HarvestRunState.CONSOLIDATING, HarvestRunState.COMPLETED)

    await becomes(is_late, "a time to kill", explain=harness.describe_state)


async def explain_missing(harness: HarvestHarness, requests: RequestLog, run: Json, changed: Collection[str]) -> str:
    """Return the run, its partitions, and for each record that differs what the source has and which pages had it.

    A record that no page of the run contained was not delivered by the source. A page that was cut off, or whose delay
    is None or longer than the client waits, did not arrive as a whole.
    """
    truth, raw, canonical = harness.source.read_truth(), await harness.read_raw(), await harness.read_canonical()
    different = {key for key in truth if raw.get(key) != truth[key] or key not in canonical} - set(changed)
    lines = [f"run: {run}", *(f"partition: {part}" for part in await harness.list_partitions(run["run_id"]))]
    for key in sorted(different):
        lines += [f"record: {truth[key]}", f"stored: {raw.get(key)}", requests.explain(key)]
    return "\n".join(lines)


async def find_deleted(harness: HarvestHarness) -> set[str]:
    """Return the served records that the source has deleted."""
    return set(await harness.read_canonical()) - set(harness.source.read_truth())


async def describe_unfinished(harness: HarvestHarness) -> str:
    """Return unfinished partitions, unsent messages and the lag of the broker's groups, for the report of a failure."""
    queries = {
        "partitions": "SELECT * FROM partition_progress LEFT JOIN worker_runs USING (run_id, partition_id)"
        " WHERE NOT completed",
        "not sent": "SELECT id, topic, key, value, created_at FROM bus_outbox WHERE NOT published",
    }
    lines = [f"{name}: {dict(row)}" for name, query in queries.items() for row in await harness.db.fetch(query)]
    section = harness.settings.bus.kafka
    groups = {topic: f"{section.group_prefix}.{topic}" for topic in TOPICS} if section else {}
    for topic, group in groups.items():
        lines += await asyncio.to_thread(describe_lag, harness.settings, topic, group)
    return "\n".join(lines)


def describe_lag(settings: Settings, topic: str, group: str) -> list[str]:
    """Return each partition of *topic* that *group* has not settled completely, and the assignments of its members."""
    assert settings.bus.kafka is not None
    reader = Consumer({"bootstrap.servers": settings.bus.kafka.bootstrap, "group.id": group})
    try:
        numbers = sorted(reader.list_topics(topic, timeout=BROKER_TIMEOUT).topics[topic].partitions)
        committed = reader.committed([TopicPartition(topic, number) for number in numbers], timeout=BROKER_TIMEOUT)
        ends = {part.partition: reader.get_watermark_offsets(part, timeout=BROKER_TIMEOUT)[1] for part in committed}
    finally:
        reader.close()
    admin = AdminClient({"bootstrap.servers": settings.bus.kafka.bootstrap})
    state = admin.describe_consumer_groups([group], request_timeout=BROKER_TIMEOUT)[group].result(BROKER_TIMEOUT)
    members = {
        member.member_id: [part.partition for part in member.assignment.topic_partitions] for member in state.members
    }
    return [
        f"{group} is {state.state.name}: {members}",
        *(
            f"{topic} {part.partition}: committed {part.offset} of {ends[part.partition]}, {part.metadata}"
            for part in committed
            if max(part.offset, 0) < ends[part.partition]
        ),
    ]
