"""Harness of harvest: a feed over the local source, the role in this process, and checks at the end of a run."""

import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl
from uuid import UUID

import asyncpg

from penstock.app.bridges import renew_dictionaries
from penstock.app.parts import open_harvest
from penstock.app.platform import open_platform
from penstock.harvest import contract
from penstock.harvest.consolidate import watermark
from penstock.harvest.consolidate.worker import Consolidator
from penstock.harvest.contract import PLANS, WORK_ITEMS, HarvestRunState
from penstock.harvest.feed.feeds import FeedRegistry
from penstock.harvest.fetch.worker import Fetcher
from penstock.harvest.maintenance import RunRescuer
from penstock.harvest.metrics import HarvestMetrics
from penstock.harvest.model import RUN
from penstock.harvest.plan.planner import Planner
from penstock.harvest.runtime import HarvestPlatform, run_harvest
from penstock.harvest.simulator.dataset import DatasetChange
from penstock.harvest.simulator.routes import SimulatedRequest, SimulatedResponse
from penstock.harvest.simulator.server import LocalOptions, LocalSource, local_source
from penstock.kernel.bus import BusDelivery, BusMessage, DeadLetter
from penstock.kernel.db.database import Database
from penstock.kernel.errors import NotFound
from penstock.kernel.tasks.outcome import Done, Outcome
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.kernel.work.worker import Worker, handle_each
from penstock.settings import Settings
from tests.services.kafka import Kafka
from tests.support.settings import settings_document
from tests.support.types import Json
from tests.support.wait import becomes

FEED = "stones"
OVERLAP = timedelta(milliseconds=100)
TOPICS = (contract.PLANS, contract.WORK_ITEMS, contract.WORK_DONE, contract.CONSOLIDATIONS)
WITHIN = 60.0
_SESSION = {"session.timeout.ms": "2000"}  # a broker knows of a dead worker no sooner; ours allows less than others

# Whatever is published in a transaction is counted in that transaction, on either bus.
_COUNT_MESSAGES = """
CREATE TABLE IF NOT EXISTS published (n bigint GENERATED ALWAYS AS IDENTITY, topic text NOT NULL, value bytea NOT NULL);
CREATE OR REPLACE FUNCTION note_published() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO published (topic, value) VALUES (NEW.topic, NEW.value); RETURN NULL; END $$;
CREATE OR REPLACE TRIGGER note_published AFTER INSERT ON bus_message FOR EACH ROW EXECUTE FUNCTION note_published();
CREATE OR REPLACE TRIGGER note_published AFTER INSERT ON bus_outbox FOR EACH ROW EXECUTE FUNCTION note_published();
"""


def new_group() -> str:
    """Topics are shared by all who use a broker: with a group of its own a test loses no message to another."""
    return f"test.{os.urandom(4).hex()}"


def harvest_settings(
    database_url: str,
    source_url: str,
    folder: Path,
    *,
    kafka: Kafka | None = None,
    harvest: Mapping[str, Any] | None = None,
    call: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
    refdata: Mapping[str, Any] | None = None,
    **feed: Any,
) -> Settings:
    """Settings of one small feed, in small partitions and turns, whose failures are soon over."""
    calls = {"timeout": 0.5, "break_after": 1_000, **(call or {})}
    section = {
        "source": {
            "kind": "rest",
            "url": source_url,
            "path": "/records",
            "count_path": "/records/count",
            "call": calls,
            **(source or {}),
        },
        "key": "id",
        "updated_at": "updatedAt",
        "page_size": 30,
        "pages_per_turn": 2,
        "overlap": OVERLAP.total_seconds(),  # clocks of two processes are not quite one
        "partitions": {"count": 4, "min_records": 50},
        "fields": {
            "lab": {"path": "diamond.certificate.lab", "required": True},
            "shape": {"path": "diamond.certificate.shape"},
            "carat": {"path": "diamond.certificate.carats", "type": "decimal"},
            "labgrown": {"path": "diamond.certificate.labgrown", "type": "boolean"},
            "availability": {"path": "diamond.availability"},
        },
        "cost": {"path": "price", "decimals": 2},
        "pricing": {
            "rules": [
                {"name": "lab grown", "when": {"labgrown": {"any_of": [True]}}, "markup_percent": 35},
                {"name": "large", "when": {"carat": {"from": 2}}, "markup_percent": "12.5"},
                {"name": "all others", "markup_percent": 20, "add": 25},
            ]
        },
        **feed,
    }
    harvest_section = {"lease": 1, "retry_after": 0.2, "feeds": {FEED: section}, **(harvest or {})}
    bus = {"group_prefix": new_group(), "options": _SESSION}
    document = settings_document(database_url, kafka, bus, harvest=harvest_section, refdata=refdata or {})
    return Settings.model_validate({"data_dir": str(folder), **document})


@dataclass(frozen=True, slots=True)
class CanonicalRecord:
    """A canonical record as it must be, or is."""

    fields: Mapping[str, Any]
    cost: Decimal | None
    price: Decimal | None
    rule: str | None


def expected_record(record: Json) -> CanonicalRecord:
    """What the feed's rules make of a record of the source, by other means than the product's."""
    certificate = record["diamond"]["certificate"]
    carat = Decimal(str(certificate["carats"]))
    fields = {
        "lab": certificate["lab"],
        "shape": certificate["shape"],
        "carat": carat,
        "labgrown": certificate["labgrown"],
        "availability": record["diamond"]["availability"],
    }
    if record["price"] is None:
        return CanonicalRecord(fields, None, None, None)
    cost = Decimal(record["price"]) / 100
    if certificate["labgrown"]:
        rule, exact = "lab grown", cost * Decimal("1.35")
    elif carat >= 2:
        rule, exact = "large", cost * Decimal("1.125")
    else:
        rule, exact = "all others", cost * Decimal("1.2") + 25
    return CanonicalRecord(fields, cost, exact.quantize(Decimal("0.01"), ROUND_HALF_UP), rule)


PAGE, COUNT = "/records", "/records/count"


@dataclass
class RequestLog:
    """What the source was asked: path and parameters of each request. *act* is called before each is answered."""

    act: Callable[[str, int], None] | None = None  # with the path, and the number of such requests
    refuses: str = ""  # this path fails
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    pages: list[tuple[dict[str, str], SimulatedResponse]] = field(
        default_factory=list
    )  # with parameters; a test may clear it

    def explain(self, key: str) -> str:
        """Return which of the kept pages contained the record *key*, and which of these were sent late or cut off."""
        found = [
            params | {"delay": answer.delay, "is_cut": answer.is_cut}
            for params, answer in self.pages
            if f'"{key}"'.encode() in answer.body
        ]
        return f"{key}: in {len(found)} of {len(self.pages)} pages: {found}"

    def of(self, path: str) -> list[dict[str, str]]:
        return [params for asked, params in self.requests if asked == path]


def record_requests(source: LocalSource) -> RequestLog:
    """Note every request from now on; the test may change the source between two of them."""
    asked, make_answer = RequestLog(), source._routes.answer

    def noted(request: SimulatedRequest) -> SimulatedResponse:
        path, params = request.path, dict(parse_qsl(request.query.decode()))
        if path in (PAGE, COUNT):
            asked.requests.append((path, params))
            if asked.act is not None:
                asked.act(path, len(asked.of(path)))
        answer = SimulatedResponse(status=500) if path == asked.refuses else make_answer(request)
        if path == PAGE:
            asked.pages.append((params, answer))
        return answer

    source._routes.answer = noted  # type: ignore[method-assign]
    return asked


class HarvestHarness:
    """A feed over a local source. Nothing works on it outside of `working`."""

    def __init__(self, settings: Settings, source: LocalSource, platform: HarvestPlatform) -> None:
        self.settings = settings
        self.source = source
        self.platform = platform
        self.harvest = platform.harvest
        self._clock = platform.db.clock

    @property
    def db(self) -> Database:
        return self.platform.db

    @asynccontextmanager
    async def run_workers(self) -> AsyncIterator[None]:
        """The role, in this process."""
        async with run_harvest(replace(self.platform, telemetry=Telemetry())):
            yield

    @asynccontextmanager
    async def open_workers(self) -> AsyncIterator["HarvestWorkers"]:
        """What the role is made of, for a test that delivers messages itself."""
        section, db, bus = self.settings.harvest, self.db, self.platform.bus
        metrics = HarvestMetrics(Telemetry().registry)
        async with FeedRegistry.open(section, db) as feeds:
            renewing = renew_dictionaries(section, db.clock)
            planner, fetcher = Planner(db, bus, feeds, "harness"), Fetcher(db, bus, feeds, metrics, "harness")
            consolidator = Consolidator(db, bus, self.platform.storage, feeds, metrics, "harness", renewing)
            rescuer = RunRescuer(db, bus, planner, fetcher, consolidator, section.stalled_after)
            yield HarvestWorkers(planner, fetcher, consolidator, rescuer)

    async def start(self, *, full: bool = False) -> UUID:
        """A new run that does not count earlier changes of the source as changes during the run.

        A run counts a change as its own up to the overlap before its start. The clock of another process may be
        behind by as much again.
        """

        async def is_past() -> bool:
            return not self.source.changed_ids_since(self._clock.now() - 2 * OVERLAP)

        await becomes(is_past, "the last change of the source is older than the overlap")
        return await self.harvest.start(FEED, "harness", full=full)

    async def read_state(self, run_id: UUID) -> str:
        """Where the run stands, or its plan."""
        query = """
            SELECT coalesce(r.state, p.state) FROM harvest_plan p LEFT JOIN run_metadata r USING (run_id)
            WHERE p.run_id = $1
        """
        return str(await self.db.fetchval(query, run_id))

    async def wait_for_end(self, run_id: UUID, expected: HarvestRunState | None = HarvestRunState.COMPLETED) -> Json:
        """The run, once nothing is done for it any more."""
        going = {"planning", "planned", *(state.value for state in RUN.groups["active"])}

        async def has_ended() -> bool:
            return await self.read_state(run_id) not in going

        within = WITHIN if self.settings.bus.kafka is None else 3 * WITHIN
        await becomes(has_ended, f"run {run_id} ends", within, self.describe_state)
        run = await self.run(run_id)
        assert expected is None or run["state"] == expected, run
        return run

    async def complete_run(self, *, full: bool = False) -> Json:
        """A run from its beginning to its good end."""
        return await self.wait_for_end(await self.start(full=full))

    async def run(self, run_id: UUID) -> Json:
        row = await self.db.fetchrow("SELECT * FROM run_metadata WHERE run_id = $1", run_id)
        if row is None:
            return {"state": await self.read_state(run_id)}
        return dict(row)

    async def list_partitions(self, run_id: UUID) -> list[Json]:
        query = """
            SELECT p.*, w.status, w.error_message, w.records_processed FROM partition_progress p
            LEFT JOIN worker_runs w USING (run_id, partition_id) WHERE p.run_id = $1 ORDER BY p.partition_id
        """
        return [dict(row) for row in await self.db.fetch(query, run_id)]

    async def alerts(self) -> list[tuple[str, str]]:
        rows = await self.db.fetch("SELECT code, severity FROM harvest_alert WHERE feed = $1 ORDER BY id", FEED)
        return [(row["code"], row["severity"]) for row in rows]

    async def watermark(self) -> datetime | None:
        return await self.db.fetchval("SELECT watermark FROM harvest_feed WHERE feed = $1", FEED)  # type: ignore[no-any-return]

    async def read_blob(self) -> Json | None:
        try:
            stored = await self.platform.storage.get(watermark.blob_path(FEED))
        except NotFound:
            return None
        found: Json = json.loads(stored.data)
        return found

    async def count_published(self, run_id: UUID) -> Counter[str]:
        """How many messages about a run were published, by topic, whatever became of them."""
        rows = await self.db.fetch("SELECT topic, value FROM published")
        return Counter(row["topic"] for row in rows if json.loads(row["value"])["runId"] == str(run_id))

    async def list_moves(self, machine: str, subject: str) -> list[str]:
        query = "SELECT target FROM journal_move WHERE machine = $1 AND subject = $2 ORDER BY id, n"
        return [row["target"] for row in await self.db.fetch(query, machine, subject)]

    async def read_canonical(self, *, deleted: bool = False) -> dict[str, CanonicalRecord]:
        """The canonical records that are live, or those that are deleted."""
        query = """
            SELECT key, fields::text, cost, price, rule FROM canonical_record
            WHERE feed = $1 AND (deleted_at IS NOT NULL) = $2
        """
        rows = await self.db.fetch(query, FEED, deleted)
        return {
            row["key"]: CanonicalRecord(
                json.loads(row["fields"], parse_float=Decimal), row["cost"], row["price"], row["rule"]
            )
            for row in rows
        }

    async def read_raw(self) -> dict[str, Json]:
        """The raw records that are not gone."""
        rows = await self.db.fetch("SELECT key, payload FROM raw_record WHERE feed = $1 AND NOT is_deleted", FEED)
        return {row["key"]: row["payload"] for row in rows}

    async def check_records(self, *, but: Collection[str] = (), gone: Collection[str] = ()) -> None:
        """Raw and canonical records are the source's, field by field. Not compared: *but*; not deleted yet: *gone*."""
        truth = {key: record for key, record in self.source.truth().items() if key not in but}
        left_out = {*but, *gone}
        raw = {key: record for key, record in (await self.read_raw()).items() if key not in left_out}
        canonical = {key: made for key, made in (await self.read_canonical()).items() if key not in left_out}
        for kept in (raw, canonical):
            missing, extra = sorted(truth.keys() - kept.keys()), sorted(kept.keys() - truth.keys())
            assert (missing, extra) == ([], []), f"missing {missing}, no longer in the source {extra}"
        assert [key for key in truth if raw[key] != truth[key]] == []
        assert [key for key in truth if _told(canonical[key]) != _told(expected_record(truth[key]))] == []

    async def check_run(self, run_id: UUID) -> Json:
        """All a completed run promises, but for its records: counters, partitions, messages, history, watermark."""
        run = await self.run(run_id)
        assert (run["state"], run["failed_workers"]) == ("completed", 0)
        partitions = await self.list_partitions(run_id)
        assert run["completed_workers"] == run["expected_workers"] == len(partitions)
        assert {(part["completed"], part["status"]) for part in partitions} == {(True, "completed")}
        assert [part["records_processed"] for part in partitions] == [part["seen"] for part in partitions]
        assert await self.db.fetchval("SELECT count(*) FROM raw_pending") == 0
        assert await self.list_moves("harvest.run", str(run_id)) == [
            "created",
            "workers_running",
            "consolidating",
            "completed",
        ]
        for part in partitions:
            assert await self.list_moves("harvest.partition", f"{run_id}/{part['partition_id']}") == ["completed"]
        told = await self.count_published(run_id)
        assert (told[contract.WORK_DONE], told[contract.CONSOLIDATIONS]) == (len(partitions), 1)
        await self.check_watermark(run)
        return run

    async def check_watermark(self, run: Json) -> None:
        """H8: the watermark of the feed, its history and its copy are the run's."""
        row = await self.db.fetchrow("SELECT * FROM harvest_feed WHERE feed = $1", FEED)
        note = await self.db.fetchrow("SELECT * FROM harvest_watermark WHERE run_id = $1", run["run_id"])
        blob = await self.read_blob()
        assert row is not None
        assert note is not None
        assert blob is not None
        told = (datetime.fromisoformat(blob["lastUpdatedAt"]), datetime.fromisoformat(blob["lastRunCompletedAt"]))
        assert told == (run["watermark_after"], run["completed_at"])
        assert (row["watermark"], row["watermark_at"], row["watermark_run"]) == (*told, run["run_id"])
        assert (note["last_updated_at"], note["run_completed_at"]) == told
        assert blob["lastRunId"] == str(run["run_id"])

    async def check_quiet(self) -> None:
        """Nothing is on its way any more, and nothing was set aside."""

        async def has_settled() -> bool:
            return await self.backlog() == 0

        await becomes(has_settled, "all messages are settled", explain=self.describe_state)
        assert await self.dead_letters() == []

    async def dead_letters(self) -> list[DeadLetter]:
        """The messages about runs of this database that were set aside."""
        ours = {str(row["run_id"]) for row in await self.db.fetch("SELECT run_id FROM harvest_plan")}
        found = [letter for topic in TOPICS for letter in await self.platform.bus.dead_letters(topic)]
        return [letter for letter in found if json.loads(letter.message.value)["runId"] in ours]

    async def handle_messages(self, topic: str, handle: Callable[[BusDelivery], Awaitable[Outcome]]) -> int:
        """Have the messages of a topic that are due handled by *handle*, one after another; how many there were."""
        async with self.platform.bus.subscribe(topic, worker="harness") as queue:
            return await Worker(queue, handle_each(handle, queue, concurrency=1), Telemetry()).step()

    async def backlog(self) -> int:
        """How many messages are not settled yet."""
        return sum([await self.platform.bus.backlog(topic) for topic in TOPICS])

    async def count_seen(self, run_id: UUID) -> int:
        """How many records the last passes over all partitions saw."""
        return int(await self.db.fetchval("SELECT sum(seen) FROM partition_progress WHERE run_id = $1", run_id))

    async def describe_state(self) -> str:
        """Where everything stands, for whoever reads a failure."""
        queries = {
            "plans": "SELECT state, error, rescues FROM harvest_plan",
            "runs": "SELECT state, completed_workers, failed_workers, expected_workers, error FROM run_metadata",
            "partitions": "SELECT partition_id, next_offset, counted, scan, seen, rescues, status, error_message"
            " FROM partition_progress LEFT JOIN worker_runs USING (run_id, partition_id) WHERE NOT completed",
            "feed": "SELECT paused_until, pause_reason, failures, breaks FROM harvest_feed",
            "bus": "SELECT topic, partition, head, attempts, lease_until, due_at FROM bus_partition"
            " WHERE head IS NOT NULL OR lease_until IS NOT NULL",
            "dead": "SELECT topic, reason FROM bus_dead_letter",
        }
        found = {name: [dict(row) for row in await self.db.fetch(query)] for name, query in queries.items()}
        return "\n".join(f"{name}: {rows}" for name, rows in found.items())


@dataclass(frozen=True)
class HarvestWorkers:
    """The four that do the work."""

    planner: Planner
    fetcher: Fetcher
    consolidator: Consolidator
    rescuer: RunRescuer


def _told(made: CanonicalRecord) -> tuple[Any, ...]:
    fields = {
        name: Decimal(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for name, value in made.fields.items()
    }
    return fields, made.cost, made.price, made.rule


async def count_messages(database_url: str) -> None:
    """Have the database count what is published, for `HarvestHarness.published`."""
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(_COUNT_MESSAGES)
    finally:
        await connection.close()


@asynccontextmanager
async def open_harness(settings: Settings, source: LocalSource) -> AsyncIterator[HarvestHarness]:
    """Open a harness on *settings*, whose database counts messages."""
    async with AsyncExitStack() as stack:
        await count_messages(settings.database.url)
        platform = await stack.enter_async_context(open_platform(settings, Telemetry()))
        yield HarvestHarness(settings, source, await stack.enter_async_context(open_harvest(settings, platform)))


@asynccontextmanager
async def harvest_harness(
    database_url: str, folder: Path, options: LocalOptions | None = None, *, kafka: Kafka | None = None, **told: Any
) -> AsyncIterator[HarvestHarness]:
    """Open a harness over its own source of 300 records, or as *options* say."""
    async with local_source(options or LocalOptions(records=300)) as source:
        settings = harvest_settings(database_url, source.url, folder, kafka=kafka, **told)
        async with open_harness(settings, source) as harness:
            yield harness


def change_at_page(harness: HarvestHarness, asked: RequestLog, at: int, **changes: int) -> list[DatasetChange]:
    """Change the source just before its *at*-th page from now on; what was changed comes to the list."""
    done: list[DatasetChange] = []
    first = len(asked.of(PAGE))

    def act(path: str, number: int) -> None:
        if path == PAGE and number == first + at:
            done.append(harness.source.change(**changes))

    asked.act = act
    return done


def changed(run: Json, harness: HarvestHarness) -> set[str]:
    """What the source changed after the run's upper bound, and has still."""
    return harness.source.changed_ids_since(run["upper_bound"])


async def planned(harness: HarvestHarness, parts: HarvestWorkers) -> tuple[UUID, list[BusMessage]]:
    """A run, and the messages about its partitions, in order; they are taken off the bus."""
    run_id, items = await harness.start(), []
    assert await harness.handle_messages(PLANS, parts.planner.handle) == 1

    async def keep(delivery: BusDelivery) -> Outcome:
        items.append(delivery.message)
        return Done()

    await harness.handle_messages(WORK_ITEMS, keep)
    return run_id, sorted(items, key=lambda item: item.key)


def make_delivery(message: BusMessage) -> BusDelivery:
    return BusDelivery(message, attempt=1, partition=0, position=0, fence=0)


async def take_message(harness: HarvestHarness, topic: str) -> BusMessage:
    """The one message of a topic, taken off the bus."""
    found: list[BusMessage] = []

    async def keep(delivery: BusDelivery) -> Outcome:
        found.append(delivery.message)
        return Done()

    await harness.handle_messages(topic, keep)
    [message] = found
    return message
