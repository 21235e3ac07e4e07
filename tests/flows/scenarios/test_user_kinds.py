"""F12, F17: kinds of a user's module are checked like the built-in kinds: by their inputs and by their document."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.app.programs import run_remote_flow_workers
from penstock.flows import sdk
from penstock.flows.api.queries import FlowViews
from penstock.flows.config import FlowsSection
from penstock.flows.definition.spec import RunRequest
from penstock.flows.runtime import open_engine, run_flows
from penstock.flows.step import Workers
from penstock.flows.worker.local import LocalWorkSource
from penstock.flows.worker.loop import StepWorker
from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Invalid
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings
from tests.flows.harness import LEASE, FlowsHarness, flows_harness, on_a_port
from tests.flows.scenarios import counting_kind
from tests.flows.scenarios.receipt_worker import KIND, RECEIPT, RECEIPT_OUTPUT, workers
from tests.support.types import Json
from tests.support.wait import becomes

MODULE = "tests.flows.scenarios.receipt_worker"
DRAIN = timedelta(seconds=5)


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsHarness]:
    """Yield the API of flows, with the module in its configuration."""
    async with flows_harness(database_url, tmp_path, modules=[MODULE]) as opened:
        yield opened


@pytest.fixture(params=["beside the database", "over HTTP"])
async def exporting(request: pytest.FixtureRequest, harness: FlowsHarness, url: str) -> AsyncIterator[FlowsHarness]:
    """Yield the same, with the worker of the module."""
    async with AsyncExitStack() as stack:
        if request.param == "over HTTP":
            await stack.enter_async_context(sdk.run_worker(workers, url=url, drain=DRAIN))
        else:
            work_source = LocalWorkSource(harness.engine, harness.storage)
            worker = StepWorker(work_source, workers, Telemetry(), name="w1", concurrency=4, lease_for=LEASE)
            await stack.enter_async_context(worker.run(DRAIN))
        yield harness


async def run_export(harness: FlowsHarness, run_id: str, **inputs: Any) -> Json:
    """Return the step after the end of its run."""
    await harness.create({"export": {"kind": KIND, "inputs": inputs}}, run_id)
    step: Json = (await harness.wait_for_end(run_id))["steps"]["export"]
    return step


async def test_success_is_checked_by_its_document(exporting: FlowsHarness) -> None:
    """F12: a success of a kind with `check_report` is accepted or refused by its document, not by its outputs."""
    uri = exporting.storage.make_uri(f"runs/good/export/{RECEIPT}")
    for run_id, forgets in (("good", False), ("forgot", True)):
        step = await run_export(exporting, run_id, rows=3, receipt='{"rows": 3}', forgets=forgets)
        assert (step["status"], step["error"]) == ("SUCCEEDED", None)
        assert step["outputs"] == {"rows": 3, RECEIPT_OUTPUT: uri.replace("good", run_id)}
        assert [artifact["name"] for artifact in step["artifacts"]] == [RECEIPT]
    wrong = await run_export(exporting, "wrong", rows=3, receipt='{"rows": 2}')
    assert (wrong["status"], wrong["error"]["code"]) == ("FAILED", "RECEIPT_DIFFERS")
    assert wrong["error"]["details"] == [RECEIPT]
    assert [artifact["name"] for artifact in wrong["artifacts"]] == [RECEIPT]
    missing = await run_export(exporting, "missing", rows=3)
    assert (missing["status"], missing["error"]["code"]) == ("FAILED", "RECEIPT_MISSING")
    assert RECEIPT_OUTPUT not in (missing["outputs"] or {})


async def test_crashed_check_fails_the_step(exporting: FlowsHarness) -> None:
    """F12: an error inside a user's check ends its own step with WORKER_ERROR; the document is published."""
    step = await run_export(exporting, "r1", rows=3, receipt="{}")
    assert (step["status"], step["error"]["code"]) == ("FAILED", "WORKER_ERROR")
    assert "KeyError" in step["error"]["message"]
    assert [artifact["name"] for artifact in step["artifacts"]] == [RECEIPT]


async def test_inputs_of_user_kinds_are_checked(harness: FlowsHarness) -> None:
    """F2, F17: a run with inputs that `check_inputs` refuses is not created."""
    steps = {"export": {"kind": KIND, "inputs": {"receipt": "{}"}}}
    problem = await harness.post_refused(422, "BAD_INPUTS", "/flow_runs", runId="r1", steps=steps)
    assert "inputs.rows" in problem["detail"]


async def test_crashed_input_check_is_named(harness: FlowsHarness) -> None:
    """F2, F17: an error inside `check_inputs` refuses the run with BAD_INPUTS, the kind and the error."""
    steps = {"export": {"kind": KIND, "inputs": {"rows": "three"}}}
    problem = await harness.post_refused(422, "BAD_INPUTS", "/flow_runs", runId="r1", steps=steps)
    assert f"step 'export', inputs: the input check of kind '{KIND}' crashed: TypeError: " in problem["detail"]


async def test_make_workers_receives_the_context(database_url: str, tmp_path: Path) -> None:
    """F17: `make_workers` receives the section, the query and the clock of the process; its worker executes a step."""
    section = FlowsSection(modules=[counting_kind.__name__], lease=LEASE)
    clock, storage = ManualClock(), FolderStorage(tmp_path)
    async with AsyncExitStack() as stack:
        db = await stack.enter_async_context(Database.open(database_url, clock=clock, prefers_indexes=True))
        platform = await stack.enter_async_context(open_engine(db, storage, section, Telemetry()))
        await stack.enter_async_context(run_flows(platform, Workers(), queries=db, drain=DRAIN))
        with pytest.raises(Invalid, match=r"inputs\.status: is missing"):
            await platform.engine.create(count_request(), "tester")
        await platform.engine.create(count_request(status="RUNNING"), "tester")
        views = FlowViews(db, platform.catalogue)

        async def has_ended() -> bool:
            return bool((await views.read_run("r1"))["status"] == "SUCCEEDED")

        await becomes(has_ended, "the run ends")
        outputs = (await views.read_run("r1"))["steps"]["count"]["outputs"]
    assert outputs == {"runs": 1, "at": clock.now().isoformat(), "lease": LEASE.total_seconds()}


async def test_remote_worker_calls_make_workers(database_url: str, tmp_path: Path) -> None:
    """F17: `penstock work flows --url` executes the kinds of `make_workers`, without a database to query."""
    modules = [counting_kind.__name__]
    settings = Settings.model_validate({"flows": {"modules": modules}, "server": {"port": 0}})
    stop = asyncio.Event()
    async with flows_harness(database_url, tmp_path, modules=modules) as harness, on_a_port(harness) as url:
        working = asyncio.create_task(run_remote_flow_workers(url, [], settings, stop, lambda _: None))
        await harness.create({"count": {"kind": counting_kind.KIND, "inputs": {"status": "RUNNING"}}})
        run = await harness.wait_for_end()
        stop.set()
        await working
    assert (run["status"], run["steps"]["count"]["outputs"]["runs"]) == ("SUCCEEDED", None)


def count_request(**inputs: Any) -> RunRequest:
    steps = {"count": {"kind": counting_kind.KIND, "inputs": inputs}}
    return RunRequest.model_validate({"runId": "r1", "steps": steps})
