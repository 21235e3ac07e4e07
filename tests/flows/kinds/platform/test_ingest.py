"""ingest.run: a file is published once, whichever worker dies on the way."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.app.bridges import IngestAdapter
from penstock.app.platform import open_ingest_workspace
from penstock.flows.kinds.platform.ingest import ingest_worker
from penstock.flows.step import FlowStep, Handler
from penstock.ingest.model import DeliveryResult
from penstock.ingest.run.hooks import RunHooks, RunOutcome
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.run.run import Ingestion
from penstock.ingest.workspace import IngestWorkspace
from penstock.settings import Settings
from tests.flows.kinds.platform.running_steps import under_way
from tests.flows.memory_step_io import make_step, run_failing_step, run_step
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, snapshot
from tests.support.crash import Killed, raise_killed
from tests.support.wait import becomes, until


@pytest.fixture
def ingest(tmp_path: Path) -> IngestHarness:
    return IngestHarness(tmp_path / "root", KEYED)


@pytest.fixture
def place(ingest: IngestHarness, database_url: str) -> Iterator[IngestWorkspace]:
    document = {"database": {"url": database_url}, "ingest": {"root": str(ingest.root)}}
    with open_ingest_workspace(Settings.model_validate(document), uses_database=True) as place:
        yield place


class CrashingWorkplace:
    """A workplace whose runs can be made to die at a step, or to do something there."""

    def __init__(
        self, place: IngestWorkspace, at: PublishStep | None = None, act: Callable[[], None] | None = None
    ) -> None:
        self.tree = place.tree
        self._place, self._at, self._act = place, at, act

    def deliver(self, supplier: str) -> dict[str, DeliveryResult]:
        return self._place.deliver(supplier)

    def run(self, supplier: str, hooks: RunHooks, *, waits: bool) -> RunOutcome:
        def on_step(step: PublishStep) -> None:
            hooks.on_step(step)
            if step is self._at:
                (self._act or raise_killed)()

        return self._place.run(supplier, replace(hooks, on_step=on_step), waits=waits)


def ingesting(attempt: int = 1) -> FlowStep:
    return make_step("ingest.run", {"supplier": SUPPLIER}, attempt=attempt)


def worker_in(place: IngestWorkspace | CrashingWorkplace) -> Handler:
    return ingest_worker(IngestAdapter(place), concurrency=1)  # type: ignore[arg-type]


def passed(ingest: IngestHarness) -> list[str]:
    """The runs that published something."""
    found = [ingest.tree.read(f"etl_data/raw_v1/runs/{run}/manifest.json") for run in ingest.tree.list_runs(SUPPLIER)]
    told = [json.loads(one) for one in found if one]
    return [one["run_id"] for one in told if one["status"] == "PASS"]


async def test_a_file_is_published(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """F14: the newest file of the inbox is published; the next attempt tells of the same run, and takes no other."""
    ingest.drop(snapshot({"A": 1, "B": 2}))
    outputs = await run_step(worker_in(place), ingesting())
    assert outputs == {
        "runId": ingest.current(), "status": "PASS", "file": "price.csv", "published": 2, "rejected": 0,
    }  # fmt: skip
    ingest.drop(snapshot({"A": 3}), "later.csv")
    assert await run_step(worker_in(place), ingesting(2)) == outputs
    assert ingest.names(f"etl_data/raw_v1/inbox/{SUPPLIER}") == ["later.csv"]
    other = await run_step(worker_in(place), make_step("ingest.run", {"supplier": SUPPLIER}, run_id="run-2"))
    assert (other["file"], len(passed(ingest))) == ("later.csv", 2)


async def test_a_publication_is_logged_once(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """Log: the server logs the outcome of a run of a step once, not again for a repeated attempt."""
    ingest.drop(snapshot({"A": 1}))
    with capture_logs() as entries:
        outputs = await run_step(worker_in(place), ingesting())
        await run_step(worker_in(place), ingesting(2))
    published = [entry for entry in entries if entry["event"] == "file_published"]
    assert [(entry["file"], entry["run_id"]) for entry in published] == [("price.csv", outputs["runId"])]


@pytest.mark.parametrize("at", list(PublishStep))
async def test_a_file_is_published_once_whoever_dies(
    ingest: IngestHarness, place: IngestWorkspace, at: PublishStep
) -> None:
    """F14: wherever the worker dies, the next attempt ends with the file published, by one run."""
    ingest.drop(snapshot({"A": 1}))
    with suppress(Killed):
        await run_step(worker_in(CrashingWorkplace(place, at)), ingesting())
    outputs = await run_step(worker_in(place), ingesting(2))
    assert (outputs["status"], [outputs["runId"]]) == ("PASS", passed(ingest))
    assert await run_step(worker_in(place), ingesting(3)) == outputs


async def test_without_a_file_there_is_nothing_to_publish(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """F14: FILE_MISSING, worth another try; what was published for others before does not count."""
    ingest.publish(snapshot({"A": 1}))
    error = await run_failing_step(worker_in(place), ingesting())
    assert (error.error.code, error.retryable) == ("FILE_MISSING", True)


async def test_a_file_that_is_no_good_fails_the_step(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """F14: the run's failure is the step's, also at an attempt that finds the file gone; a better file is taken."""
    ingest.drop(snapshot({"A": "none"}))
    for attempt in (1, 2):
        error = await run_failing_step(worker_in(place), ingesting(attempt))
        assert (error.error.code, error.retryable) == ("DQ_TOO_MANY_BAD_ROWS", False)
        assert error.error.details["runId"] in error.error.message
    ingest.drop(snapshot({"A": 1}))
    assert (await run_step(worker_in(place), ingesting(3)))["status"] == "PASS"


async def test_another_run_of_the_supplier_may_be_quicker(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """F14: while somebody else has the supplier the step waits; when he took the file, his run counts."""
    ingest.drop(snapshot({"A": 1}))
    holds, goes_on = threading.Event(), threading.Event()

    def wait_there(step: PublishStep) -> None:
        if step is PublishStep.STARTED:
            holds.set()
            goes_on.wait()

    def somebody() -> None:
        Ingestion(ingest.tree, "somebody", RunHooks(on_step=wait_there)).run(SUPPLIER)

    thread = threading.Thread(target=somebody)
    thread.start()
    until(holds.is_set, "the other run is under way")
    suppliers = Refusals(place)
    async with under_way(ingest_worker(suppliers, concurrency=1), ingesting()) as task:

        async def was_refused() -> bool:
            return suppliers.refused > 0

        await becomes(was_refused, "the step found the supplier locked")
        goes_on.set()
        outputs = await task
    thread.join()
    assert [outputs["runId"]] == passed(ingest)


class Refusals(IngestAdapter):
    """Counts how often the supplier was locked."""

    refused = 0

    def run(self, *asked: Any) -> Any:
        try:
            return super().run(*asked)
        except Exception:
            self.refused += 1
            raise


async def test_no_more_files_are_read_at_once_than_there_is_room_for(
    ingest: IngestHarness, place: IngestWorkspace
) -> None:
    """F14, F16: many steps may be handed out; the process reads so many files at a time."""
    busy, most = 0, 0

    class CountingSuppliers(IngestAdapter):
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
    worker = ingest_worker(CountingSuppliers(place), concurrency=1)
    ended = await asyncio.gather(*(run_step(worker, make_step("ingest.run", {"supplier": name})) for name in names))
    assert ([one["status"] for one in ended], most) == (["PASS"] * 4, 1)


async def test_a_run_of_ingest_stops_with_its_step(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """F9, F14: a step that is told to stop publishes nothing, and its file stays for the next."""
    ingest.drop(snapshot({"A": 1}))
    step = ingesting()
    error = await run_failing_step(worker_in(CrashingWorkplace(place, PublishStep.STARTED, step.cancelled.set)), step)
    assert error.error.code == "CANCELLED"
    assert (passed(ingest), ingest.names(f"etl_data/raw_v1/inbox/{SUPPLIER}")) == ([], ["price.csv"])
    assert (await run_step(worker_in(place), ingesting(2)))["status"] == "PASS"
