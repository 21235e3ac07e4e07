"""F14: steps that tie the parts together, each with the real part, and with workers that die on the way."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry

from penstock.app.bridges import TiedDictionaries, TiedFeeds, TiedFiles, TiedSuppliers
from penstock.app.platform import open_workplace
from penstock.flows.kinds.platform.harvest import harvest_worker
from penstock.flows.kinds.platform.ingest import ingest_worker
from penstock.flows.kinds.platform.refdata import refdata_worker
from penstock.flows.kinds.platform.tracking import tracking_worker
from penstock.flows.kinds.registry import check_inputs
from penstock.flows.step import Handler, Step
from penstock.harvest.contract import PLANS
from penstock.ingest.run.hooks import Hooks, Outcome
from penstock.ingest.run.publish import Step as Place
from penstock.ingest.run.run import Ingestion
from penstock.ingest.workspace import Workplace
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Invalid, Transient
from penstock.refdata import contract
from penstock.refdata.model import Dict
from penstock.settings import Settings
from penstock.tracking.config import TrackingSection
from penstock.tracking.contract import NAME_LIMIT, Stage
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.service import Tracking
from tests.flows.memory_step_io import MemoryStepIO, done, failed, held
from tests.harvest.scripted_source import ScriptedSource, scripted_harvest, stones
from tests.harvest.stepper import FEED, HarvestStepper
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, snapshot
from tests.refdata.harness import RefdataHarness, create_schemas, opened, refdata_settings, upsert
from tests.support.crash import Killed, raise_killed
from tests.support.types import Json
from tests.support.waiting import becomes, until

INGEST, SPLITTER, WORKER, SENDER = Stage
LOOSE = Dict("acme", "LOOSE")


@asynccontextmanager
async def under_way(handler: Handler, step: Step) -> "AsyncIterator[asyncio.Task[Json]]":
    """A step being worked on; at the end its worker dies, unless it is done."""
    task = asyncio.create_task(done(handler, step))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def is_stopped(handler: Handler, step: Step) -> None:
    """A step that was told to stop does so where it would wait."""
    step.cancelled.set()
    assert (await failed(handler, step)).error.code == "CANCELLED"


# harvest.run


@pytest.fixture
async def one(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestStepper]:
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(120))) as stepper:
        yield stepper


def harvesting(attempt: int = 1, step_io: MemoryStepIO | None = None, **more: Any) -> Step:
    return held("harvest.run", {"feed": FEED, **more}, attempt=attempt, step_io=step_io)


async def plans(one: HarvestStepper) -> list[UUID]:
    return [row["run_id"] for row in await one.db.fetch("SELECT run_id FROM harvest_plan ORDER BY requested_at")]


async def planned(one: HarvestStepper, count: int = 1) -> UUID:
    """The last of so many runs that are asked for."""

    async def is_so() -> bool:
        return len(await plans(one)) >= count

    await becomes(is_so, f"{count} runs are planned")
    return (await plans(one))[-1]


async def test_a_feed_is_harvested_once_whoever_dies(one: HarvestStepper) -> None:
    """F14: a second attempt takes the run of the first over, under way or ended; the outputs tell what came of it."""
    worker = harvest_worker(TiedFeeds(one.harvest))
    async with under_way(worker, harvesting(full=True)):
        run_id = await planned(one)
    async with under_way(worker, harvesting(2, full=True)) as task:
        await one.finish()
        outputs = await task
    assert await done(worker, harvesting(3, full=True)) == outputs
    assert await plans(one) == [run_id]
    run = await one.run(run_id)
    assert outputs == {
        "runId": str(run_id),
        "state": "completed",
        "records": 120,
        "consolidated": 120,
        "rejected": 0,
        "watermarkAfter": run["watermark_after"].isoformat(),
    }
    assert (run["requested_by"], run["run_type"]) == ("flows:run-1/step-1", "full")


async def test_another_run_of_the_feed_comes_first(one: HarvestStepper) -> None:
    """F14: while somebody else's run is under way the step waits; then it has its own."""
    other, step_io = await one.harvest.start(FEED, "somebody"), MemoryStepIO()
    async with under_way(harvest_worker(TiedFeeds(one.harvest)), harvesting(step_io=step_io)) as task:

        async def waits() -> bool:
            return bool(step_io.logs)

        await becomes(waits, "the step says what it waits for")
        assert str(other) in step_io.logs[0]
        await one.finish()
        mine = await planned(one, 2)
        await one.finish()
        assert (await task)["runId"] == str(mine) != str(other)


async def test_a_run_that_failed_fails_its_step_and_the_next_attempt_has_another(one: HarvestStepper) -> None:
    """F10, F14: HARVEST_FAILED tells why; whoever tries the step again gets a run of its own."""
    worker = harvest_worker(TiedFeeds(one.harvest))
    first = asyncio.create_task(failed(worker, harvesting()))
    run_id = await planned(one)
    await one.harvest.cancel(run_id, "test", "no more")
    error = await first
    assert (error.error.code, error.retryable) == ("HARVEST_FAILED", True)
    assert error.error.details["runId"] == str(run_id)
    assert "no more" in error.error.message
    async with under_way(worker, harvesting(2)) as task:
        again = await planned(one, 2)
        await one.finish()
        assert (await task)["runId"] == str(again) != str(run_id)


async def test_a_step_that_cannot_harvest_says_so(one: HarvestStepper) -> None:
    """F14: a feed nobody knows is final; a step that is told to stop stops, and its run goes on."""
    worker = harvest_worker(TiedFeeds(one.harvest))
    error = await failed(worker, held("harvest.run", {"feed": "pebbles"}))
    assert (error.error.code, error.retryable) == ("FEED_NOT_FOUND", False)
    await is_stopped(worker, harvesting())
    await one.drain(PLANS)
    assert [row["state"] for row in await one.db.fetch("SELECT state FROM run_metadata")] == ["created"]


async def test_a_run_can_be_started_under_an_id(one: HarvestStepper) -> None:
    """H2, F14: one id is one run, whoever asks for it and however often."""
    wanted = UUID(int=7)
    asked = [one.harvest.start(FEED, "test", run_id=wanted) for _ in range(5)]
    assert set(await asyncio.gather(*asked)) == {wanted}
    assert await plans(one) == [wanted]


# ingest.run


@pytest.fixture
def ingest(tmp_path: Path) -> IngestHarness:
    return IngestHarness(tmp_path / "root", KEYED)


@pytest.fixture
def place(ingest: IngestHarness, database_url: str) -> Iterator[Workplace]:
    document = {"database": {"url": database_url}, "ingest": {"root": str(ingest.root)}}
    with open_workplace(Settings.model_validate(document), uses_database=True) as place:
        yield place


class CrashingWorkplace:
    """A workplace whose runs can be made to die at a step, or to do something there."""

    def __init__(self, place: Workplace, at: Place | None = None, act: Callable[[], None] | None = None) -> None:
        self.tree = place.tree
        self._place, self._at, self._act = place, at, act

    def deliver(self, supplier: str) -> dict[str, str]:
        return self._place.deliver(supplier)

    def run(self, supplier: str, hooks: Hooks, *, waits: bool) -> Outcome:
        def on_step(step: Place) -> None:
            hooks.on_step(step)
            if step is self._at:
                (self._act or raise_killed)()

        return self._place.run(supplier, replace(hooks, on_step=on_step), waits=waits)


def ingesting(attempt: int = 1) -> Step:
    return held("ingest.run", {"supplier": SUPPLIER}, attempt=attempt)


def worker_in(place: Workplace | CrashingWorkplace) -> Handler:
    return ingest_worker(TiedSuppliers(place), at_once=1)  # type: ignore[arg-type]


def passed(ingest: IngestHarness) -> list[str]:
    """The runs that published something."""
    found = [ingest.tree.read(f"etl_data/raw_v1/runs/{run}/manifest.json") for run in ingest.tree.runs(SUPPLIER)]
    told = [json.loads(one) for one in found if one]
    return [one["run_id"] for one in told if one["status"] == "PASS"]


async def test_a_file_is_published(ingest: IngestHarness, place: Workplace) -> None:
    """F14: the newest file of the inbox is published; the next attempt tells of the same run, and takes no other."""
    ingest.drop(snapshot({"A": 1, "B": 2}))
    outputs = await done(worker_in(place), ingesting())
    assert outputs == {
        "runId": ingest.current(), "status": "PASS", "file": "price.csv", "published": 2, "rejected": 0,
    }  # fmt: skip
    ingest.drop(snapshot({"A": 3}), "later.csv")
    assert await done(worker_in(place), ingesting(2)) == outputs
    assert ingest.names(f"etl_data/raw_v1/inbox/{SUPPLIER}") == ["later.csv"]
    other = await done(worker_in(place), held("ingest.run", {"supplier": SUPPLIER}, run_id="run-2"))
    assert (other["file"], len(passed(ingest))) == ("later.csv", 2)


@pytest.mark.parametrize("at", list(Place))
async def test_a_file_is_published_once_whoever_dies(ingest: IngestHarness, place: Workplace, at: Place) -> None:
    """F14: wherever the worker dies, the next attempt ends with the file published, by one run."""
    ingest.drop(snapshot({"A": 1}))
    with suppress(Killed):
        await done(worker_in(CrashingWorkplace(place, at)), ingesting())
    outputs = await done(worker_in(place), ingesting(2))
    assert (outputs["status"], [outputs["runId"]]) == ("PASS", passed(ingest))
    assert await done(worker_in(place), ingesting(3)) == outputs


async def test_without_a_file_there_is_nothing_to_publish(ingest: IngestHarness, place: Workplace) -> None:
    """F14: FILE_MISSING, worth another try; what was published for others before does not count."""
    ingest.publish(snapshot({"A": 1}))
    error = await failed(worker_in(place), ingesting())
    assert (error.error.code, error.retryable) == ("FILE_MISSING", True)


async def test_a_file_that_is_no_good_fails_the_step(ingest: IngestHarness, place: Workplace) -> None:
    """F14: the run's failure is the step's, also at an attempt that finds the file gone; a better file is taken."""
    ingest.drop(snapshot({"A": "none"}))
    for attempt in (1, 2):
        error = await failed(worker_in(place), ingesting(attempt))
        assert (error.error.code, error.retryable) == ("DQ_TOO_MANY_BAD_ROWS", False)
        assert error.error.details["runId"] in error.error.message
    ingest.drop(snapshot({"A": 1}))
    assert (await done(worker_in(place), ingesting(3)))["status"] == "PASS"


async def test_another_run_of_the_supplier_may_be_quicker(ingest: IngestHarness, place: Workplace) -> None:
    """F14: while somebody else has the supplier the step waits; when he took the file, his run counts."""
    ingest.drop(snapshot({"A": 1}))
    holds, goes_on = threading.Event(), threading.Event()

    def wait_there(step: Place) -> None:
        if step is Place.STARTED:
            holds.set()
            goes_on.wait()

    def somebody() -> None:
        Ingestion(ingest.tree, "somebody", Hooks(on_step=wait_there)).run(SUPPLIER)

    thread = threading.Thread(target=somebody)
    thread.start()
    until(holds.is_set, "the other run is under way")
    suppliers = Refusals(place)
    async with under_way(ingest_worker(suppliers, at_once=1), ingesting()) as task:

        async def was_refused() -> bool:
            return suppliers.refused > 0

        await becomes(was_refused, "the step found the supplier locked")
        goes_on.set()
        outputs = await task
    thread.join()
    assert [outputs["runId"]] == passed(ingest)


class Refusals(TiedSuppliers):
    """Counts how often the supplier was locked."""

    refused = 0

    def run(self, *asked: Any) -> Any:
        try:
            return super().run(*asked)
        except Exception:
            self.refused += 1
            raise


async def test_no_more_files_are_read_at_once_than_there_is_room_for(ingest: IngestHarness, place: Workplace) -> None:
    """F14, F16: many steps may be handed out; the process reads so many files at a time."""
    busy, most = 0, 0

    class CountingSuppliers(TiedSuppliers):
        def run(self, *asked: Any) -> Any:
            nonlocal busy, most
            busy, most = busy + 1, max(most, busy + 1)
            try:
                return super().run(*asked)
            finally:
                busy -= 1

    names = [f"s{number}" for number in range(4)]
    for name in names:
        ingest.configure(KEYED, name)
        ingest.drop(snapshot({"A": 1}), supplier=name)
    worker = ingest_worker(CountingSuppliers(place), at_once=1)
    ended = await asyncio.gather(*(done(worker, held("ingest.run", {"supplier": name})) for name in names))
    assert ([one["status"] for one in ended], most) == (["PASS"] * 4, 1)


async def test_a_run_of_ingest_stops_with_its_step(ingest: IngestHarness, place: Workplace) -> None:
    """F9, F14: a step that is told to stop publishes nothing, and its file stays for the next."""
    ingest.drop(snapshot({"A": 1}))
    step = ingesting()
    error = await failed(worker_in(CrashingWorkplace(place, Place.STARTED, step.cancelled.set)), step)
    assert error.error.code == "CANCELLED"
    assert (passed(ingest), ingest.names(f"etl_data/raw_v1/inbox/{SUPPLIER}")) == ([], ["price.csv"])
    assert (await done(worker_in(place), ingesting(2)))["status"] == "PASS"


# refdata.publish


@pytest.fixture
async def refdata(database_url: str) -> AsyncIterator[RefdataHarness]:
    await create_schemas(database_url)
    async with opened(refdata_settings(database_url)) as refdata:
        yield refdata


def publish(attempt: int = 1, step_io: MemoryStepIO | None = None, mode: str = "SNAPSHOT", **more: Any) -> Step:
    inputs = {"tenant": "acme", "dictionary": "LOOSE", "mode": mode, **more}
    return held("refdata.publish", inputs, attempt=attempt, step_io=step_io)


def items(count: int) -> list[Json]:
    return [{"key": f"k{number}", "payload": {"n": number}} for number in range(count)]


async def on_the_bus(refdata: RefdataHarness, count: int = 1) -> None:
    """Back when so many commands wait."""

    async def is_so() -> bool:
        return await refdata.bus.backlog(refdata.topic) >= count

    await becomes(is_so, f"{count} commands are on the bus")


async def test_a_dictionary_is_published(refdata: RefdataHarness) -> None:
    """F14: a SNAPSHOT replaces all, a DELTA some; the step ends with the version that is committed."""
    worker = refdata_worker(TiedDictionaries(refdata.refdata))
    for mode, given, version, left in (
        ("SNAPSHOT", items(2), 1, {"k0": {"n": 0}, "k1": {"n": 1}}),
        ("DELTA", [{"key": "k0", "op": "DELETE"}, upsert("k2", 5)], 2, {"k1": {"n": 1}, "k2": 5}),
        ("SNAPSHOT", items(1), 3, {"k0": {"n": 0}}),
    ):
        async with under_way(worker, publish(mode=mode, items=given)) as task:
            await on_the_bus(refdata)
            await refdata.apply()
            outputs = await task
        assert outputs == {"tenantId": "acme", "dictCode": "LOOSE", "version": version, "items": len(given)}
        assert await refdata.items("LOOSE") == left


@pytest.mark.parametrize("mode", ["SNAPSHOT", "DELTA"])
async def test_a_dictionary_is_published_once_whoever_dies(
    refdata: RefdataHarness, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """F14: in chunks, with a worker that died between them and one after, it is the same versions and no more."""
    monkeypatch.setattr(contract, "_ITEM_ROOM", 70)  # bytes: two items
    worker = refdata_worker(TiedDictionaries(refdata.refdata))
    async with under_way(worker, publish(items=items(5), mode=mode)):
        await on_the_bus(refdata)
    async with under_way(worker, publish(2, items=items(5), mode=mode)) as task:

        async def is_published() -> bool:
            await refdata.apply()
            return task.done()

        await becomes(is_published, "all commands are applied")
        outputs = await task
    assert outputs["version"] == (1 if mode == "SNAPSHOT" else 3)
    assert await done(worker, publish(3, items=items(5), mode=mode)) == outputs
    assert await refdata.items("LOOSE") == {one["key"]: one["payload"] for one in items(5)}
    assert len((await refdata.refdata.history(LOOSE, before=99, limit=9)).items) == outputs["version"]
    assert await refdata.bus.backlog(refdata.topic) == 0


@pytest.mark.parametrize("end", ["", "\n", "\r\n\n"])
@pytest.mark.parametrize("is_list", [True, False])
async def test_a_dictionary_is_published_from_an_artifact(refdata: RefdataHarness, is_list: bool, end: str) -> None:
    """F14: JSON lines or a list, as a step before wrote them, to the last digit."""
    one, two = '{"key": "a", "payload": 0.10000000000000000001}', '{"payload": [1], "key": "b"}'
    step_io = MemoryStepIO(
        artifacts={("before", "rates"): (f"[{one},\n{two}]{end}" if is_list else f"{one}\n{two}{end}").encode()}
    )
    worker = refdata_worker(TiedDictionaries(refdata.refdata))
    given: Json = {"from": {"step": "before", "artifact": "rates"}}
    step = publish(step_io=step_io, **given)
    async with under_way(worker, step) as task:
        await on_the_bus(refdata)
        await refdata.apply()
        assert (await task)["items"] == 2
    loaded = await refdata.refdata.catalogue.get(LOOSE).provider.load_all(refdata.db, LOOSE)
    assert loaded.items == {"a": "0.10000000000000000001", "b": "[1]"}


async def test_what_refdata_refuses_fails_the_step_and_the_next_attempt_sends_it_anew(refdata: RefdataHarness) -> None:
    """F10, F14: the reason is the step's error; once it is mended, a second attempt is a command of its own."""
    worker = refdata_worker(TiedDictionaries(refdata.refdata))
    first = asyncio.create_task(failed(worker, publish(items=items(3))))
    await on_the_bus(refdata)
    await refdata.apply(max_items=2)
    error = await first
    assert error.error.code == "SNAPSHOT_TOO_LARGE"
    assert "3 items" in error.error.message
    async with under_way(worker, publish(2, items=items(3))) as task:
        await on_the_bus(refdata)
        await refdata.apply()
        assert (await task)["version"] == 1


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"dictionary": "NONE", "items": []}, "UNKNOWN_DICTIONARY"),
        ({"items": [{"key": "a"}]}, "MALFORMED"),
        ({"items": [{"key": "a", "payload": 1}] * 2}, "DUPLICATE_KEY"),
        ({"items": [{"key": "", "payload": 1}]}, "BAD_ITEMS"),
        ({"items": ["a"]}, "BAD_ITEMS"),
        ({"items": [{"key": "a", "payload": "x" * 900_000}]}, "COMMAND_TOO_LARGE"),
        ({"from": {"step": "before", "artifact": "none"}}, "ARTIFACT_MISSING"),
    ],
)
async def test_what_cannot_be_published_is_not_sent(refdata: RefdataHarness, more: Json, code: str) -> None:
    """F14: a mistake in the items or the names is final, and told before anything is sent."""
    error = await failed(refdata_worker(TiedDictionaries(refdata.refdata)), publish(**more))
    assert (error.error.code, error.retryable) == (code, False)
    assert await refdata.bus.backlog(refdata.topic) == 0


async def test_a_step_that_waits_for_a_commit_can_be_stopped(refdata: RefdataHarness) -> None:
    """F9, F14: nobody applies, and the step does not wait for ever."""
    await is_stopped(refdata_worker(TiedDictionaries(refdata.refdata)), publish(items=items(1)))


# tracking.wait


@pytest.fixture
async def tracking(db: Database) -> AsyncIterator[Tracking]:
    async with Tracking.open(db, TrackingSection(), TrackingMetrics(CollectorRegistry())) as tracking:
        yield tracking


class CountingFiles(TiedFiles):
    """Counts the looks; the first one is told that nobody answers."""

    looks = 0

    async def shards(self, filename: str, stage: Stage) -> Any:
        self.looks += 1
        if self.looks == 1:
            raise Transient("DATABASE_DOWN", "for a moment")
        return await super().shards(filename, stage)


async def take(tracking: Tracking, stage: Stage, *shards: int) -> None:
    for shard in shards:
        await tracking.move(stage, "start", "f", shard, actor="test")
        await tracking.move(stage, "done", "f", shard, actor="test")


def waiting(**more: Any) -> Step:
    return held("tracking.wait", {"filename": "f", "pollSeconds": 0.2, **more})


async def test_a_step_waits_until_all_shards_are_through(tracking: Tracking) -> None:
    """F14: for a file nobody registered yet, for all its shards, and through a database that is away for a moment."""
    files = CountingFiles(tracking)

    async def looked(task: "asyncio.Task[Json]") -> None:
        """Back when it has looked at what there is now, and still waits."""
        before = files.looks

        async def is_so() -> bool:
            return files.looks >= before + 2

        await becomes(is_so, "it looks again")
        assert not task.done()

    async with under_way(tracking_worker(files), waiting(stage="shard-splitter")) as task:
        await looked(task)
        await tracking.register("f", [0, 1], worker=None, actor="test")
        await tracking.move(INGEST, "done", "f", actor="test")
        await take(tracking, SPLITTER, 0)
        await looked(task)
        await take(tracking, SPLITTER, 1)
        assert await task == {"filename": "f", "stage": "shard-splitter", "shards": 2}
    async with under_way(tracking_worker(files), waiting()) as task:
        await take(tracking, WORKER, 0, 1)
        await take(tracking, SENDER, 0)
        await looked(task)
        await take(tracking, SENDER, 1)
        assert (await task)["stage"] == "mysql-sender"


async def test_a_shard_that_failed_fails_the_step(tracking: Tracking) -> None:
    """F14: TRACKING_FAILED names the shards and why; a failure behind the stage that is asked for does not matter."""
    await tracking.register("f", [0, 1, 2], worker=None, actor="test")
    await tracking.move(INGEST, "done", "f", actor="test")
    await take(tracking, SPLITTER, 0, 1, 2)
    await tracking.move(WORKER, "fail", "f", 1, actor="test", reason="disk full")
    worker = tracking_worker(TiedFiles(tracking))
    error = await failed(worker, waiting())
    assert (error.error.code, error.retryable) == ("TRACKING_FAILED", True)
    assert list(error.error.details["shards"]) == ["1"]
    assert "disk full" in error.error.message
    assert (await done(worker, waiting(stage="shard-splitter")))["shards"] == 3


async def test_a_step_that_waits_for_a_file_can_be_stopped(tracking: Tracking) -> None:
    """F9, F14: a file may never come."""
    await is_stopped(tracking_worker(TiedFiles(tracking)), waiting())


# all of them

TARGET: Json = {"tenant": "a", "dictionary": "B", "mode": "DELTA"}


@pytest.mark.parametrize(
    ("kind", "good", "wrong"),
    [
        ("harvest.run", {"feed": "a"}, [{}, {"feed": "a/b"}, {"feed": "a", "full": "perhaps"}, {"feed": "a", "x": 1}]),
        ("ingest.run", {"supplier": "a"}, [{}, {"supplier": ".."}, {"supplier": ""}, {"supplier": "a" * 65}]),
        (
            "refdata.publish",
            {**TARGET, "items": "${steps.a.outputs.items}"},
            [{}, TARGET, {**TARGET, "mode": "X", "items": []}, {**TARGET, "items": [], "from": {"step": "a"}}],
        ),
        (
            "tracking.wait",
            {"filename": "${scope.f}"},
            [{}, {"filename": "f", "stage": "x"}, {"pollSeconds": 0}, {"filename": "f" * (NAME_LIMIT + 1)}],
        ),
    ],
)
def test_inputs_are_looked_over_before(kind: str, good: Json, wrong: list[Json]) -> None:
    """F2, F14: a mistake is told when the run is asked for, and the field is named; a reference is not one."""
    check_inputs[kind](good)
    for inputs in wrong:
        with pytest.raises(Invalid, match="inputs") as told:
            check_inputs[kind](inputs)
        assert told.value.code == "BAD_INPUTS"
