"""F12, F17: a kind of a user's module is checked as the built-in ones are: by its inputs and by its document."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.flows import sdk
from penstock.flows.step import Workers
from penstock.flows.worker.local import DirectCounter
from penstock.flows.worker.loop import StepWorker
from penstock.kernel.telemetry.telemetry import Telemetry
from tests.flows.harness import LEASE, FlowsHarness, flows_harness
from tests.flows.receipt_worker import KIND, RECEIPT, RECEIPT_OUTPUT, workers
from tests.support.types import Json

MODULE = "tests.flows.receipt_worker"
DRAIN = timedelta(seconds=5)


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsHarness]:
    """The API of flows, whose configuration names the module."""
    async with flows_harness(database_url, tmp_path, modules=[MODULE]) as opened:
        yield opened


@pytest.fixture(params=["beside the database", "over HTTP"])
async def exporting(request: pytest.FixtureRequest, harness: FlowsHarness, url: str) -> AsyncIterator[FlowsHarness]:
    """The same, with the worker of the module."""
    async with AsyncExitStack() as stack:
        if request.param == "over HTTP":
            await stack.enter_async_context(sdk.working(workers, url=url, drain=DRAIN))
        else:
            counter = DirectCounter(harness.engine, harness.storage)
            worker = StepWorker(counter, workers, Telemetry(), name="w1", concurrency=4, lease_for=LEASE)
            await stack.enter_async_context(worker.working(DRAIN))
        yield harness


async def exported(harness: FlowsHarness, run_id: str, **inputs: Any) -> Json:
    """The step, once its run has ended."""
    await harness.create({"export": {"kind": KIND, "inputs": inputs}}, run_id)
    step: Json = (await harness.ended(run_id))["steps"]["export"]
    return step


async def test_a_users_kind_is_judged_by_its_document(exporting: FlowsHarness) -> None:
    """F12: a success of a kind with `check_report` is accepted or refused by its document, not by its outputs."""
    uri = exporting.storage.uri(f"runs/good/export/{RECEIPT}")
    for run_id, forgets in (("good", False), ("forgot", True)):
        step = await exported(exporting, run_id, rows=3, receipt='{"rows": 3}', forgets=forgets)
        assert (step["status"], step["error"]) == ("SUCCEEDED", None)
        assert step["outputs"] == {"rows": 3, RECEIPT_OUTPUT: uri.replace("good", run_id)}
        assert [one["name"] for one in step["artifacts"]] == [RECEIPT]
    wrong = await exported(exporting, "wrong", rows=3, receipt='{"rows": 2}')
    assert (wrong["status"], wrong["error"]["code"]) == ("FAILED", "RECEIPT_DIFFERS")
    assert wrong["error"]["details"] == [RECEIPT]
    assert [one["name"] for one in wrong["artifacts"]] == [RECEIPT]
    missing = await exported(exporting, "missing", rows=3)
    assert (missing["status"], missing["error"]["code"]) == ("FAILED", "RECEIPT_MISSING")
    assert RECEIPT_OUTPUT not in (missing["outputs"] or {})


async def test_a_check_that_crashes_fails_the_step(exporting: FlowsHarness) -> None:
    """F12: an error inside a user's check ends its own step with WORKER_ERROR; the document is published."""
    step = await exported(exporting, "r1", rows=3, receipt="{}")
    assert (step["status"], step["error"]["code"]) == ("FAILED", "WORKER_ERROR")
    assert "KeyError" in step["error"]["message"]
    assert [one["name"] for one in step["artifacts"]] == [RECEIPT]


async def test_the_inputs_of_a_users_kind_are_checked(harness: FlowsHarness) -> None:
    """F2, F17: a run with inputs that `check_inputs` refuses is not created."""
    steps = {"export": {"kind": KIND, "inputs": {"receipt": "{}"}}}
    problem = await harness.refused(422, "BAD_INPUTS", "/flow_runs", runId="r1", steps=steps)
    assert "inputs.rows" in problem["detail"]


def test_checks_go_with_their_workers() -> None:
    """F17: `add` and `only` keep the checks of the kinds they keep."""
    both = Workers()
    both.worker("PLAIN")(workers.handlers[KIND])
    both.add(workers)
    chosen, plain = both.only([KIND]), both.only(["PLAIN"])
    assert (chosen.input_checks, chosen.report_checks) == (workers.input_checks, workers.report_checks)
    assert (plain.input_checks, plain.report_checks) == ({}, {})
    assert list(both.only([]).report_checks) == [KIND]
