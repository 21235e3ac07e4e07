"""A harness of harvest: a feed over a simulator, the harvest role in this process, and checks at the end of a run."""

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
from penstock.harvest.simulator.server import LocalOptions, LocalSource, run_local_source
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
_SESSION = {"session.timeout.ms": "2000"}  # the time after which the broker removes a dead worker

# Messages are counted in the transaction that publishes them, on either bus.
_COUNT_MESSAGES = """
CREATE TABLE IF NOT EXISTS published (n bigint GENERATED ALWAYS AS IDENTITY, topic text NOT NULL, value bytea NOT NULL);
CREATE OR REPLACE FUNCTION note_published() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO published (topic, value) VALUES (NEW.topic, NEW.value); RETURN NULL; END $$;
CREATE OR REPLACE TRIGGER note_published AFTER INSERT ON bus_message FOR EACH ROW EXECUTE FUNCTION note_published();
CREATE OR REPLACE TRIGGER note_published AFTER INSERT ON bus_outbox FOR EACH ROW EXECUTE FUNCTION note_published();
"""


def make_group_prefix() -> str:
    """Return a group prefix for one test: tests share the topics of a broker, and need separate groups."""
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
    """Return settings of a small feed with small partitions, short turns and short time-outs."""
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
        "overlap": OVERLAP.total_seconds(),  # the clocks of two processes differ
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
    bus = {"group_prefix": make_group_prefix(), "options": _SESSION}
    document = settings_document(database_url, kafka, bus, harvest=harvest_section, refdata=refdata or {})
    return Settings.model_validate({"data_dir": str(folder), **document})


@dataclass(frozen=True, slots=True)
class CanonicalRecord:
    """The values of a canonical record."""

    fields: Mapping[str, Any]
    cost: Decimal | None
    price: Decimal | None
    rule: str | None


def expected_record(record: Json) -> CanonicalRecord:
    """Return the canonical record that the rules of the feed make of *record*, without the code of the product."""
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
    """The requests to the source: path and parameters of each. *act* is called before each response."""

    act: Callable[[str, int], None] | None = None  # receives the path, and the number of requests with it
    refuses: str = ""  # requests with this path fail
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    pages: list[tuple[dict[str, str], SimulatedResponse]] = field(
        default_factory=list
    )  # with parameters; a test may clear the list

    def explain(self, key: str) -> str:
        """Return which of the recorded pages contain the record *key*, and which of them were late or aborted."""
        containing = [
            params | {"delay": answer.delay, "is_cut": answer.is_cut}
            for params, answer in self.pages
            if f'"{key}"'.encode() in answer.body
        ]
        return f"{key}: in {len(containing)} of {len(self.pages)} pages: {containing}"

    def of(self, path: str) -> list[dict[str, str]]:
        return [params for requested, params in self.requests if requested == path]


def record_requests(source: LocalSource) -> RequestLog:
    """Record every request from now on; a test may change the source between two requests."""
    log, respond = RequestLog(), source._routes.answer_request

    def record(request: SimulatedRequest) -> SimulatedResponse:
        path, params = request.path, dict(parse_qsl(request.query.decode()))
        if path in (PAGE, COUNT):
            log.requests.append((path, params))
            if log.act is not None:
                log.act(path, len(log.of(path)))
        response = SimulatedResponse(status=500) if path == log.refuses else respond(request)
        if path == PAGE:
            log.pages.append((params, response))
        return response

    source._routes.answer_request = record  # type: ignore[method-assign]
    return log


class HarvestHarness:
    """A feed over a simulator. Workers run only inside of `run_workers`."""

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
        """Run the harvest role in this process."""
        async with run_harvest(replace(self.platform, telemetry=Telemetry())):
            yield

    @asynccontextmanager
    async def open_workers(self) -> AsyncIterator["HarvestWorkers"]:
        """Yield the workers of the role, for a test that delivers messages itself."""
        section, db, bus = self.settings.harvest, self.db, self.platform.bus
        metrics = HarvestMetrics(Telemetry().registry)
        async with FeedRegistry.open(section, db) as feeds:
            on_published = renew_dictionaries(section, db.clock)
            planner, fetcher = Planner(db, bus, feeds, "harness"), Fetcher(db, bus, feeds, metrics, "harness")
            consolidator = Consolidator(db, bus, self.platform.storage, feeds, metrics, "harness", on_published)
            rescuer = RunRescuer(db, bus, planner, fetcher, consolidator, section.stalled_after)
            yield HarvestWorkers(planner, fetcher, consolidator, rescuer)

    async def start(self, *, full: bool = False) -> UUID:
        """Start a run that does not count earlier changes of the source as changes during the run.

        A run counts changes as its own up to the overlap before its start. The clock of another process may be behind
        by the same time.
        """

        async def is_past() -> bool:
            return not self.source.find_ids_changed_since(self._clock.now() - 2 * OVERLAP)

        await becomes(is_past, "the last change of the source is older than the overlap")
        return await self.harvest.start(FEED, "harness", full=full)

    async def read_state(self, run_id: UUID) -> str:
        """Return the state of the run or of its plan."""
        query = """
            SELECT coalesce(r.state, p.state) FROM harvest_plan p LEFT JOIN run_metadata r USING (run_id)
            WHERE p.run_id = $1
        """
        return str(await self.db.fetchval(query, run_id))

    async def wait_for_end(self, run_id: UUID, expected: HarvestRunState | None = HarvestRunState.COMPLETED) -> Json:
        """Wait until the run has ended, and return it."""
        active = {"planning", "planned", *(state.value for state in RUN.groups["active"])}

        async def has_ended() -> bool:
            return await self.read_state(run_id) not in active

        timeout = WITHIN if self.settings.bus.kafka is None else 3 * WITHIN
        await becomes(has_ended, f"run {run_id} ends", timeout, self.describe_state)
        run = await self.run(run_id)
        assert expected is None or run["state"] == expected, run
        return run

    async def complete_run(self, *, full: bool = False) -> Json:
        """Start a run, wait for its completion, and return it."""
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
            stored = await self.platform.storage.get(watermark.make_blob_path(FEED))
        except NotFound:
            return None
        blob: Json = json.loads(stored.data)
        return blob

    async def count_published(self, run_id: UUID) -> Counter[str]:
        """Return the number of published messages of a run by topic."""
        rows = await self.db.fetch("SELECT topic, value FROM published")
        return Counter(row["topic"] for row in rows if json.loads(row["value"])["runId"] == str(run_id))

    async def list_moves(self, machine: str, subject: str) -> list[str]:
        query = "SELECT target FROM journal_move WHERE machine = $1 AND subject = $2 ORDER BY id, n"
        return [row["target"] for row in await self.db.fetch(query, machine, subject)]

    async def read_canonical(self, *, deleted: bool = False) -> dict[str, CanonicalRecord]:
        """Return the live or the deleted canonical records by key."""
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
        """Return the raw records that are not deleted, by key."""
        rows = await self.db.fetch("SELECT key, payload FROM raw_record WHERE feed = $1 AND NOT is_deleted", FEED)
        return {row["key"]: row["payload"] for row in rows}

    async def check_records(self, *, but: Collection[str] = (), gone: Collection[str] = ()) -> None:
        """Check that raw and canonical records are those of the source, except *but* and the not yet deleted *gone*."""
        truth = {key: record for key, record in self.source.read_truth().items() if key not in but}
        excluded = {*but, *gone}
        raw = {key: record for key, record in (await self.read_raw()).items() if key not in excluded}
        canonical = {key: record for key, record in (await self.read_canonical()).items() if key not in excluded}
        for stored in (raw, canonical):
            missing, extra = sorted(truth.keys() - stored.keys()), sorted(stored.keys() - truth.keys())
            assert (missing, extra) == ([], []), f"missing {missing}, no longer in the source {extra}"
        assert [key for key in truth if raw[key] != truth[key]] == []
        assert [key for key in truth if _comparable(canonical[key]) != _comparable(expected_record(truth[key]))] == []

    async def check_run(self, run_id: UUID) -> Json:
        """Check a completed run except for its records: counters, partitions, messages, history, watermark."""
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
        published = await self.count_published(run_id)
        assert (published[contract.WORK_DONE], published[contract.CONSOLIDATIONS]) == (len(partitions), 1)
        await self.check_watermark(run)
        return run

    async def check_watermark(self, run: Json) -> None:
        """H8: check that the watermark of the feed, its history and its copy are those of the run."""
        row = await self.db.fetchrow("SELECT * FROM harvest_feed WHERE feed = $1", FEED)
        entry = await self.db.fetchrow("SELECT * FROM harvest_watermark WHERE run_id = $1", run["run_id"])
        blob = await self.read_blob()
        assert row is not None
        assert entry is not None
        assert blob is not None
        times = (datetime.fromisoformat(blob["lastUpdatedAt"]), datetime.fromisoformat(blob["lastRunCompletedAt"]))
        assert times == (run["watermark_after"], run["completed_at"])
        assert (row["watermark"], row["watermark_at"], row["watermark_run"]) == (*times, run["run_id"])
        assert (entry["last_updated_at"], entry["run_completed_at"]) == times
        assert blob["lastRunId"] == str(run["run_id"])

    async def check_quiet(self) -> None:
        """Check that all messages are settled, and that none is a dead letter."""

        async def has_settled() -> bool:
            return await self.backlog() == 0

        await becomes(has_settled, "all messages are settled", explain=self.describe_state)
        assert await self.dead_letters() == []

    async def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters of runs of this database."""
        run_ids = {str(row["run_id"]) for row in await self.db.fetch("SELECT run_id FROM harvest_plan")}
        letters = [letter for topic in TOPICS for letter in await self.platform.bus.read_dead_letters(topic)]
        return [letter for letter in letters if json.loads(letter.message.value)["runId"] in run_ids]

    async def handle_messages(self, topic: str, handle: Callable[[BusDelivery], Awaitable[Outcome]]) -> int:
        """Handle the due messages of a topic with *handle*, one after another, and return their number."""
        async with self.platform.bus.subscribe(topic, worker="harness") as queue:
            return await Worker(queue, handle_each(handle, queue, concurrency=1), Telemetry()).step()

    async def backlog(self) -> int:
        """Return the number of unsettled messages."""
        return sum([await self.platform.bus.count_backlog(topic) for topic in TOPICS])

    async def count_seen(self, run_id: UUID) -> int:
        """Return the number of records that the last passes over all partitions saw."""
        return int(await self.db.fetchval("SELECT sum(seen) FROM partition_progress WHERE run_id = $1", run_id))

    async def describe_state(self) -> str:
        """Return the state of runs, partitions and messages, for the report of a failed test."""
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
        rows_by_name = {name: [dict(row) for row in await self.db.fetch(query)] for name, query in queries.items()}
        return "\n".join(f"{name}: {rows}" for name, rows in rows_by_name.items())


@dataclass(frozen=True)
class HarvestWorkers:
    """The workers of the harvest role."""

    planner: Planner
    fetcher: Fetcher
    consolidator: Consolidator
    rescuer: RunRescuer


def _comparable(record: CanonicalRecord) -> tuple[Any, ...]:
    fields = {
        name: Decimal(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for name, value in record.fields.items()
    }
    return fields, record.cost, record.price, record.rule


async def count_messages(database_url: str) -> None:
    """Make the database count published messages, for `HarvestHarness.count_published`."""
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(_COUNT_MESSAGES)
    finally:
        await connection.close()


@asynccontextmanager
async def open_harness(settings: Settings, source: LocalSource) -> AsyncIterator[HarvestHarness]:
    """Open a harness with *settings*, whose database counts messages."""
    async with AsyncExitStack() as stack:
        await count_messages(settings.database.url)
        platform = await stack.enter_async_context(open_platform(settings, Telemetry()))
        yield HarvestHarness(settings, source, await stack.enter_async_context(open_harvest(settings, platform)))


@asynccontextmanager
async def harvest_harness(
    database_url: str,
    folder: Path,
    source_options: LocalOptions | None = None,
    *,
    kafka: Kafka | None = None,
    **options: Any,
) -> AsyncIterator[HarvestHarness]:
    """Open a harness over a new simulator, by default with 300 records; *options* are of `harvest_settings`."""
    async with run_local_source(source_options or LocalOptions(records=300)) as simulator:
        settings = harvest_settings(database_url, simulator.url, folder, kafka=kafka, **options)
        async with open_harness(settings, simulator) as harness:
            yield harness


def change_at_page(harness: HarvestHarness, log: RequestLog, at: int, **changes: int) -> list[DatasetChange]:
    """Change the source before page number *at* from now on; the changes are appended to the returned list."""
    changed: list[DatasetChange] = []
    first = len(log.of(PAGE))

    def act(path: str, number: int) -> None:
        if path == PAGE and number == first + at:
            changed.append(harness.source.change_records(**changes))

    log.act = act
    return changed


def changed_keys(run: Json, harness: HarvestHarness) -> set[str]:
    """Return the keys of the present records that changed after the upper bound of the run."""
    return harness.source.find_ids_changed_since(run["upper_bound"])


async def plan_run(harness: HarvestHarness, workers: HarvestWorkers) -> tuple[UUID, list[BusMessage]]:
    """Plan a run, and take the messages of its partitions off the bus; return both."""
    run_id, items = await harness.start(), []
    assert await harness.handle_messages(PLANS, workers.planner.handle) == 1

    async def take(delivery: BusDelivery) -> Outcome:
        items.append(delivery.message)
        return Done()

    await harness.handle_messages(WORK_ITEMS, take)
    return run_id, sorted(items, key=lambda item: item.key)


def make_delivery(message: BusMessage) -> BusDelivery:
    return BusDelivery(message, attempt=1, partition=0, position=0, fence=0)


async def take_message(harness: HarvestHarness, topic: str) -> BusMessage:
    """Take the only message of a topic off the bus."""
    messages: list[BusMessage] = []

    async def take(delivery: BusDelivery) -> Outcome:
        messages.append(delivery.message)
        return Done()

    await harness.handle_messages(topic, take)
    [message] = messages
    return message
