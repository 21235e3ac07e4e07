"""kill -9 at every step of every kind of work, and at any moment: nothing is lost, nothing counts twice."""

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

# Where a spread of steps of each kind of work is killed when there is no time for all.
SPREAD = {PLANS: (1, 4, 22, 28), WORK_ITEMS: (1, 3, 8, 13, 17, 40), CONSOLIDATIONS: (1, 4, 9, 17, 19, 22, 24)}
PAGE, PAGES = 30, 2
PATIENCE = 10.0  # seconds, with a broker that is asked about a failure
FAULTS = Faults(
    rate_429=0.01, retry_after=0, rate_500=0.05, rate_timeout=0.01, rate_short=0.1, rate_garbage=0.02, rate_cut=0.02
)
CHURN = Rates(updates=10, inserts=3, deletes=3)


@pytest.fixture(scope="session")
def broker() -> Iterator[Kafka]:
    with kafka() as found:
        yield found


@pytest.fixture(params=["postgres", "kafka"])
def bus(request: pytest.FixtureRequest) -> Kafka | None:
    """PostgreSQL's, or a broker."""
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
    """A larger feed, whose source never holds still."""
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
async def test_a_worker_may_die_at_any_step(
    harness: HarvestHarness, bus: Kafka | None, topic: str, tmp_path: Path, campaign: Campaign
) -> None:
    """H4, H5, H8: killed before the n-th statement, request or blob; the next worker goes on, each message is one."""
    campaign.counts_items = True
    for nth in range(1, 10_000) if examples(0, soak=1) else SPREAD[topic][:: 1 if bus is None else 3]:
        harness.source.change(updates=10, inserts=3, deletes=2)
        run_id = await harness.start(full=True)
        if not await died_at(harness, run_id, HarvestWorkerProcess(harness.settings, tmp_path / "log", topic, nth)):
            break
        try:
            await went_on(harness, run_id)
        except AssertionError as error:
            error.add_note(f"died at step {nth} of {topic}")
            raise
        campaign.end_round(faults=1)
    assert nth > 3


async def died_at(harness: HarvestHarness, run_id: UUID, worker: HarvestWorkerProcess) -> bool:
    """Whether it died, before the run was completed and all was settled."""

    async def is_over() -> bool:
        return not worker.is_alive or (
            await harness.read_state(run_id) == HarvestRunState.COMPLETED and not await harness.backlog()
        )

    await becomes(is_over, "the worker dies, or ends the run", explain=harness.describe_state)
    if worker.is_alive:
        worker.kill()
        return False
    worker.join_killed()
    return True


async def went_on(harness: HarvestHarness, run_id: UUID) -> None:
    async with harness.run_workers():
        await harness.wait_for_end(run_id)
        await harness.check_quiet()
    await harness.check_run(run_id)
    await harness.check_records()
    assert await harness.count_seen(run_id) == len(harness.source.truth())
    turns = sum(turns_of(part["counted"]) for part in await harness.list_partitions(run_id))
    assert (await harness.count_published(run_id))[WORK_ITEMS] == turns


def turns_of(count: int) -> int:
    """How many work items it takes to walk a partition that holds still, each of them once."""
    turns, offset = 0, 0
    while True:
        turns += 1
        for _ in range(min(-(-(count - offset) // PAGE) + 1, PAGES)):
            got = min(PAGE, count - offset)
            if got == 0:
                return turns
            offset += got
            if got < PAGE:
                break


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_workers_may_die_at_any_moment(
    large_feed: HarvestHarness, bus: Kafka | None, tmp_path: Path, campaign: Campaign
) -> None:
    """H4, H5, H9, H16: two processes, one killed at some request or while it consolidates, the source moving."""
    campaign.counts_items = True
    try:
        await some_die(large_feed, tmp_path / "log", examples(4 if bus is None else 1, soak=100), campaign)
    except AssertionError as error:
        error.add_note(await on_the_way(large_feed))
        raise


async def some_die(large_feed: HarvestHarness, log: Path, rounds: int, campaign: Campaign) -> None:
    asked = record_requests(large_feed.source)
    workers = [HarvestWorkerProcess(large_feed.settings, log) for _ in range(2)]
    for number in range(rounds):
        large_feed.source.set_faults(FAULTS)
        large_feed.source.set_churn(CHURN)
        asked.pages.clear()
        run_id = await large_feed.start(full=number % 3 == 0)
        for _ in range(random.randint(1, 2)):
            await some_moment(large_feed, asked, run_id)
            workers.pop(0).kill()
            workers.append(HarvestWorkerProcess(large_feed.settings, log))
            campaign.faults += 1
        await large_feed.wait_for_end(run_id)
        large_feed.source.set_churn()
        run = await large_feed.check_run(run_id)
        changed = large_feed.source.changed_ids_since(run["upper_bound"])
        try:
            await large_feed.check_records(but=changed, gone=await outdated(large_feed))
        except AssertionError as error:
            error.add_note(await explain_missing(large_feed, asked, run, changed))
            raise
        campaign.end_round()
    large_feed.source.set_faults()
    await large_feed.wait_for_end(await large_feed.start(full=True))
    await large_feed.check_records()
    await large_feed.check_quiet()
    for worker in workers:
        worker.kill()


async def some_moment(harness: HarvestHarness, asked: RequestLog, run_id: UUID) -> None:
    """Wait for some request of a run, for its consolidation, or for its end."""
    count, passed = len(asked.requests) + random.randint(1, 150), asyncio.Event()
    asked.act = lambda _path, _number: passed.set() if len(asked.requests) >= count else None

    async def is_late() -> bool:
        state = await harness.read_state(run_id)
        return passed.is_set() or state in (HarvestRunState.CONSOLIDATING, HarvestRunState.COMPLETED)

    await becomes(is_late, "a moment to kill", explain=harness.describe_state)


async def explain_missing(harness: HarvestHarness, asked: RequestLog, run: Json, changed: Collection[str]) -> str:
    """Return the run, its partitions, and for each record that differs what the source has and which pages had it.

    A record that no page of the run contained was not delivered by the source. A page that was cut off, or whose delay
    is None or longer than the client waits, did not arrive as a whole.
    """
    truth, raw, canonical = harness.source.truth(), await harness.read_raw(), await harness.read_canonical()
    different = {key for key in truth if raw.get(key) != truth[key] or key not in canonical} - set(changed)
    found = [f"run: {run}", *(f"partition: {part}" for part in await harness.list_partitions(run["run_id"]))]
    for key in sorted(different):
        found += [f"record: {truth[key]}", f"kept: {raw.get(key)}", asked.explain(key)]
    return "\n".join(found)


async def outdated(harness: HarvestHarness) -> set[str]:
    """What the source has no more; no run can know when it went."""
    return set(await harness.read_canonical()) - set(harness.source.truth())


async def on_the_way(harness: HarvestHarness) -> str:
    """What is not done, what is not sent, and how far a broker's group is, for whoever reads a failure."""
    queries = {
        "partitions": "SELECT * FROM partition_progress LEFT JOIN worker_runs USING (run_id, partition_id)"
        " WHERE NOT completed",
        "not sent": "SELECT id, topic, key, value, created_at FROM bus_outbox WHERE NOT published",
    }
    found = [f"{name}: {dict(row)}" for name, query in queries.items() for row in await harness.db.fetch(query)]
    section = harness.settings.bus.kafka
    groups = {topic: f"{section.group_prefix}.{topic}" for topic in TOPICS} if section else {}
    for topic, group in groups.items():
        found += await asyncio.to_thread(behind, harness.settings, topic, group)
    return "\n".join(found)


def behind(settings: Settings, topic: str, group: str) -> list[str]:
    """Each partition of *topic* that *group* has not settled to its end, and which members hold what."""
    assert settings.bus.kafka is not None
    reader = Consumer({"bootstrap.servers": settings.bus.kafka.bootstrap, "group.id": group})
    try:
        numbers = sorted(reader.list_topics(topic, timeout=PATIENCE).topics[topic].partitions)
        places = reader.committed([TopicPartition(topic, number) for number in numbers], timeout=PATIENCE)
        ends = {place.partition: reader.get_watermark_offsets(place, timeout=PATIENCE)[1] for place in places}
    finally:
        reader.close()
    admin = AdminClient({"bootstrap.servers": settings.bus.kafka.bootstrap})
    known = admin.describe_consumer_groups([group], request_timeout=PATIENCE)[group].result(PATIENCE)
    members = {
        member.member_id: [place.partition for place in member.assignment.topic_partitions] for member in known.members
    }
    return [
        f"{group} is {known.state.name}: {members}",
        *(
            f"{topic} {place.partition}: committed {place.offset} of {ends[place.partition]}, {place.metadata}"
            for place in places
            if max(place.offset, 0) < ends[place.partition]
        ),
    ]
