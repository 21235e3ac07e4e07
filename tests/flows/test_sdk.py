"""F17: the SDK: workers in Python that use the API of a server."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.app.programs import run_remote_flow_workers
from penstock.flows import sdk
from penstock.flows.config import FlowsSection
from penstock.flows.contract import StepReportAnswer, StepReportKind
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.model import StepError, StepReport
from penstock.flows.worker.remote import HttpWorkSource
from penstock.kernel.errors import BadConfig
from penstock.settings import Settings
from tests.flows import sdk_worker
from tests.flows.harness import FlowsHarness, chain
from tests.flows.scenarios.test_traces import CALLER, TRACE
from tests.services.collector import Collector
from tests.support.wait import becomes

ROOT = Path(__file__).parents[2]
MODULE = "tests.flows.sdk_worker"
FREE_PORT = {"port": 0}


@asynccontextmanager
async def run_workers(url: str, workers: sdk.Workers = sdk.workers, **more: Any) -> AsyncIterator[None]:
    """Run workers over HTTP in this process."""
    stop = asyncio.Event()
    serving = asyncio.create_task(sdk.serve(workers, stop, url=url, **more))
    try:
        yield
    finally:
        stop.set()
        await serving


async def wait_until_running(harness: FlowsHarness, step: str = "a") -> None:
    async def is_running() -> bool:
        return (await harness.statuses())[step] == "RUNNING"

    await becomes(is_running, f"{step} starts")


async def test_worker_over_http(harness: FlowsHarness, url: str) -> None:
    """F17: a worker over HTTP has inputs, logs, artifacts, artifacts of other steps, outputs, and errors with codes."""
    steps = {
        "greet": {"kind": "GREET", "inputs": {"name": "world"}},
        "recall": {"kind": "RECALL", "dependsOn": ["greet"], "inputs": {"step": "greet"}},
        "fails": {"kind": "GREET", "dependsOn": ["recall"]},
    }
    await harness.create(steps)
    async with run_workers(url):
        run = await harness.wait_for_end()
    steps = run["steps"]
    assert (steps["greet"]["outputs"], steps["recall"]["outputs"]) == ({"greeted": "world"}, {"read": "hello world"})
    assert [artifact["name"] for artifact in steps["greet"]["artifacts"]] == ["greeting.txt"]
    assert steps["fails"]["error"]["code"] == "NO_NAME"
    logs = await harness.get("/flow_runs/r1/steps/greet/logs")
    assert [line["message"] for line in logs["lines"]] == ["greeting world"]


async def test_invalid_report_of_a_batch(harness: FlowsHarness, url: str) -> None:
    """F5: a report of a batch that the server refuses fails its step; the other reports are accepted."""
    await harness.create({name: {"kind": "work", "required": False} for name in "abc"})
    async with sdk.FlowClient(url) as client:
        work_source = HttpWorkSource(client)
        claimed = await work_source.claim("w1", {"work": 10}, 10, 0)
        reports = [StepReport(step.run_id, step.step_id, step.fence, StepReportKind.SUCCEEDED) for step in claimed]
        reports[1] = replace(reports[1], outcome=StepReportKind.FAILED, error=StepError("no constant", "x"))
        answers, prefetched = await work_source.settle("w1", list(zip(claimed, reports, strict=True)), ["work"], 10)
    assert (answers, list(prefetched)) == ([StepReportAnswer.SETTLED] * 3, [])
    steps = (await harness.run())["steps"]
    assert [steps[name]["status"] for name in "abc"] == ["SUCCEEDED", "SKIPPED", "SUCCEEDED"]
    assert steps["b"]["error"]["code"] == "BAD_REPORT"


async def test_a_cancelled_step_is_stopped(harness: FlowsHarness, url: str) -> None:
    """F9: a heartbeat tells the worker that the run was cancelled, and the worker ends the step."""
    await harness.create(chain("a", kind="WAIT"))
    async with run_workers(url, lease_for=timedelta(seconds=0.6)):
        await wait_until_running(harness)
        await harness.post("/flow_runs/r1/cancel")

        async def is_cancelled() -> bool:
            return await harness.statuses() == {"a": "CANCELLED"}

        await becomes(is_cancelled, "the step ends")


async def test_stopping_worker_releases_its_steps(harness: FlowsHarness, url: str) -> None:
    """F17: a worker that stops releases the steps that do not end in time; the attempts do not count."""
    await harness.create(chain("a", kind="WAIT"))
    async with run_workers(url, drain=timedelta(0)):
        await wait_until_running(harness)
    step = (await harness.run())["steps"]["a"]
    assert (step["status"], step["attempts"]) == ("READY", 0)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_program_ends_after_a_signal(harness: FlowsHarness, url: str, number: signal.Signals) -> None:
    """F17: `run()` executes steps until SIGTERM or SIGINT, completes running steps, and exits with 0."""
    env = {**os.environ, "PENSTOCK_URL": url}
    worker = await asyncio.create_subprocess_exec(sys.executable, "-m", MODULE, cwd=ROOT, env=env)
    try:
        await harness.create({"greet": {"kind": "GREET", "inputs": {"name": "x"}}})
        assert (await harness.wait_for_end())["status"] == "SUCCEEDED"
        worker.send_signal(number)
        async with asyncio.timeout(30):
            assert await worker.wait() == 0
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()


async def test_workers_of_a_module(harness: FlowsHarness, url: str) -> None:
    """F17: `penstock work flows --url --module --kinds` executes steps of the module's workers, of these kinds."""
    settings = Settings.model_validate({"flows": {"modules": [MODULE]}, "server": FREE_PORT})
    [workers] = FlowCatalogue(FlowsSection(modules=[MODULE])).workers
    assert workers is sdk_worker.worker.__self__  # type: ignore[attr-defined]
    stop, addresses = asyncio.Event(), list[str]()
    running = asyncio.create_task(run_remote_flow_workers(url, ["GREET"], settings, stop, addresses.append))
    await harness.create({"a": {"kind": "GREET", "inputs": {"name": "x"}}, "b": {"kind": "RECALL"}})

    async def is_done() -> bool:
        return await harness.statuses() == {"a": "SUCCEEDED", "b": "READY"}

    await becomes(is_done, "the step of that kind ends, the other waits")
    stop.set()
    await running
    assert len(addresses) == 1
    assert addresses != [url]
    with pytest.raises(BadConfig, match="no worker is registered for step kind 'NONE'"):
        await run_remote_flow_workers(url, ["NONE"], settings, stop, addresses.append)
    with pytest.raises(BadConfig, match="no module with workers is configured"):
        await run_remote_flow_workers(url, [], Settings(), stop, addresses.append)


async def test_traces_of_remote_workers(harness: FlowsHarness, url: str) -> None:
    """F18: a worker over HTTP sends its spans to `telemetry.otlp_endpoint`."""
    stop = asyncio.Event()
    with Collector() as collector:
        telemetry = {"otlp_endpoint": collector.endpoint}
        settings = Settings.model_validate(
            {"flows": {"modules": [MODULE]}, "telemetry": telemetry, "server": FREE_PORT}
        )
        running = asyncio.create_task(run_remote_flow_workers(url, ["GREET"], settings, stop, lambda _: None))
        steps = {"a": {"kind": "GREET", "inputs": {"name": "x"}}}
        response = await harness.http.post(
            "/flow_runs", json={"runId": "r1", "steps": steps}, headers={"traceparent": CALLER}
        )
        response.raise_for_status()
        await harness.wait_for_end()
        stop.set()
        await running
        [span] = collector.of(TRACE, "flow.step")
    assert span.about["step"] == "a"
