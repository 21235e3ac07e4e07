"""ingest.run: a file is published once, also if workers die."""

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
from penstock.flows.kinds.platform.ingest import make_ingest_handler
from penstock.flows.step import FlowStep, Handler
from penstock.ingest.model import DeliveryResult
from penstock.ingest.run.hooks import RunHooks, RunOutcome
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.run.run import Ingestion
from penstock.ingest.workspace import IngestWorkspace
from penstock.settings import Settings
from tests.flows.kinds.platform.running_steps import running_step
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


class CrashingWorkspace:
    """A workspace whose runs die at a step, or call a function there."""

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


def make_ingest_step(attempt: int = 1) -> FlowStep:
    return make_step("ingest.run", {"supplier": SUPPLIER}, attempt=attempt)


def make_worker(place: IngestWorkspace | CrashingWorkspace) -> Handler:
    return make_ingest_handler(IngestAdapter(place), concurrency=1)  # type: ignore[arg-type]


def list_published_runs(ingest: IngestHarness) -> list[str]:
    """Return the runs that published a file."""
    manifests = [
        ingest.tree.read(f"etl_data/raw_v1/runs/{run}/manifest.json") for run in ingest.tree.list_runs(SUPPLIER)
    ]
    runs = [json.loads(manifest) for manifest in manifests if manifest]
    return [run["run_id"] for run in runs if run["status"] == "PASS"]


async def test_file_is_published(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """F14: the newest file of the inbox is published; the next attempt returns the same run."""
    ingest.drop(snapshot({"A": 1, "B": 2}))
    outputs = await run_step(make_worker(place), make_ingest_step())
    assert outputs == {
        "runId": ingest.current(), "status": "PASS", "file": "price.csv", "published": 2, "rejected": 0,
    }  # fmt: skip
    ingest.drop(snapshot({"A": 3}), "later.csv")
    assert await run_step(make_worker(place), make_ingest_step(2)) == outputs
    assert ingest.names(f"etl_data/raw_v1/inbox/{SUPPLIER}") == ["later.csv"]
    other = await run_step(make_worker(place), make_step("ingest.run", {"supplier": SUPPLIER}, run_id="run-2"))
    assert (other["file"], len(list_published_runs(ingest))) == ("later.csv", 2)


async def test_a_publication_is_logged_once(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """Log: the server logs the outcome of a run of a step once, not again for a repeated attempt."""
    ingest.drop(snapshot({"A": 1}))
    with capture_logs() as entries:
        outputs = await run_step(make_worker(place), make_ingest_step())
        await run_step(make_worker(place), make_ingest_step(2))
    published = [entry for entry in entries if entry["event"] == "file_published"]
    assert [(entry["file"], entry["run_id"]) for entry in published] == [("price.csv", outputs["runId"])]


@pytest.mark.parametrize("at", list(PublishStep))
async def test_file_is_published_once(ingest: IngestHarness, place: IngestWorkspace, at: PublishStep) -> None:
    """F14: the worker may die at any step; the next attempt ends with the file published, by one run."""
    ingest.drop(snapshot({"A": 1}))
    with suppress(Killed):
        await run_step(make_worker(CrashingWorkspace(place, at)), make_ingest_step())
    outputs = await run_step(make_worker(place), make_ingest_step(2))
    assert (outputs["status"], [outputs["runId"]]) == ("PASS", list_published_runs(ingest))
    assert await run_step(make_worker(place), make_ingest_step(3)) == outputs


async def test_step_without_a_file_fails(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """F14: FILE_MISSING is retryable; earlier publications for other steps do not count."""
    ingest.publish(snapshot({"A": 1}))
    error = await run_failing_step(make_worker(place), make_ingest_step())
    assert (error.error.code, error.retryable) == ("FILE_MISSING", True)


async def test_rejected_file_fails_the_step(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """F14: the step fails with the run, also at an attempt that finds the file moved; a better file is ingested."""
    ingest.drop(snapshot({"A": "none"}))
    for attempt in (1, 2):
        error = await run_failing_step(make_worker(place), make_ingest_step(attempt))
        assert (error.error.code, error.retryable) == ("DQ_TOO_MANY_BAD_ROWS", False)
        assert error.error.details["runId"] in error.error.message
    ingest.drop(snapshot({"A": 1}))
    assert (await run_step(make_worker(place), make_ingest_step(3)))["status"] == "PASS"


async def test_run_of_another_process_counts(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """F14: while the supplier is locked the step waits; a run that took the file counts for the step."""
    ingest.drop(snapshot({"A": 1}))
    holds, goes_on = threading.Event(), threading.Event()

    def wait_there(step: PublishStep) -> None:
        if step is PublishStep.STARTED:
            holds.set()
            goes_on.wait()

    def run_other() -> None:
        Ingestion(ingest.tree, "other", RunHooks(on_step=wait_there)).run(SUPPLIER)

    thread = threading.Thread(target=run_other)
    thread.start()
    until(holds.is_set, "the other run is active")
    suppliers = CountingRefusals(place)
    async with running_step(make_ingest_handler(suppliers, concurrency=1), make_ingest_step()) as task:

        async def was_refused() -> bool:
            return suppliers.refused > 0

        await becomes(was_refused, "the step waits for the locked supplier")
        goes_on.set()
        outputs = await task
    thread.join()
    assert [outputs["runId"]] == list_published_runs(ingest)


class CountingRefusals(IngestAdapter):
    """Count how often the supplier was locked."""

    refused = 0

    def run(self, *args: Any) -> Any:
        try:
            return super().run(*args)
        except Exception:
            self.refused += 1
            raise


async def test_concurrent_files_are_limited(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """F14, F16: many steps may be claimed; the process reads a limited number of files at a time."""
    busy, most = 0, 0

    class CountingSuppliers(IngestAdapter):
        def run(self, *args: Any) -> Any:
            nonlocal busy, most
            busy, most = busy + 1, max(most, busy + 1)
            try:
                return super().run(*args)
            finally:
                busy -= 1

    names = [f"s{number}" for number in range(4)]
    for name in names:
        ingest.configure(KEYED, name)
        ingest.drop(snapshot({"A": 1}), supplier=name)
    worker = make_ingest_handler(CountingSuppliers(place), concurrency=1)
    ended = await asyncio.gather(*(run_step(worker, make_step("ingest.run", {"supplier": name})) for name in names))
    assert ([run["status"] for run in ended], most) == (["PASS"] * 4, 1)


async def test_cancelled_step_stops_its_run(ingest: IngestHarness, place: IngestWorkspace) -> None:
    """F9, F14: a cancelled step publishes nothing, and the file stays for the next run."""
    ingest.drop(snapshot({"A": 1}))
    step = make_ingest_step()
    error = await run_failing_step(make_worker(CrashingWorkspace(place, PublishStep.STARTED, step.cancelled.set)), step)
    assert error.error.code == "CANCELLED"
    assert (list_published_runs(ingest), ingest.names(f"etl_data/raw_v1/inbox/{SUPPLIER}")) == ([], ["price.csv"])
    assert (await run_step(make_worker(place), make_ingest_step(2)))["status"] == "PASS"
