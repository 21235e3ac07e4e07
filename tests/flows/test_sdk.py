"""F17: the SDK: workers in Python that have nothing but the address of a server."""

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
async def working(url: str, workers: sdk.Workers = sdk.workers, **more: Any) -> AsyncIterator[None]:
    """Workers of this process, over HTTP."""
    stop = asyncio.Event()
    serving = asyncio.create_task(sdk.serve(workers, stop, url=url, **more))
    try:
        yield
    finally:
        stop.set()
        await serving


async def until_running(harness: FlowsHarness, step: str = "a") -> None:
    async def is_running() -> bool:
        return (await harness.statuses())[step] == "RUNNING"

    await becomes(is_running, f"{step} begins")


async def test_a_worker_over_http_does_its_steps(harness: FlowsHarness, url: str) -> None:
    """F17: `@worker`: inputs, logs, artifacts, those of other steps, outputs, and errors with a code."""
    steps = {
        "greet": {"kind": "GREET", "inputs": {"name": "world"}},
        "recall": {"kind": "RECALL", "dependsOn": ["greet"], "inputs": {"step": "greet"}},
        "fails": {"kind": "GREET", "dependsOn": ["recall"]},
    }
    await harness.create(steps)
    async with working(url):
        run = await harness.wait_for_end()
    found = run["steps"]
    assert (found["greet"]["outputs"], found["recall"]["outputs"]) == ({"greeted": "world"}, {"read": "hello world"})
    assert [one["name"] for one in found["greet"]["artifacts"]] == ["greeting.txt"]
    assert found["fails"]["error"]["code"] == "NOBODY"
    logs = await harness.get("/flow_runs/r1/steps/greet/logs")
    assert [line["message"] for line in logs["lines"]] == ["greeting world"]


async def test_what_makes_no_sense_takes_no_other_with_it(harness: FlowsHarness, url: str) -> None:
    """F5: of reports handed in together the one the server refuses fails its step; the others count."""
    await harness.create({name: {"kind": "work", "required": False} for name in "abc"})
    async with sdk.FlowClient(url) as client:
        work_source = sdk.HttpWorkSource(client)
        held = await work_source.claim("w1", {"work": 10}, 10, 0)
        reports = [StepReport(one.run_id, one.step_id, one.fence, StepReportKind.SUCCEEDED) for one in held]
        reports[1] = replace(reports[1], outcome=StepReportKind.FAILED, error=StepError("no constant", "x"))
        answers, handed = await work_source.settle("w1", list(zip(held, reports, strict=True)), ["work"], 10)
    assert (answers, list(handed)) == ([StepReportAnswer.SETTLED] * 3, [])
    steps = (await harness.run())["steps"]
    assert [steps[name]["status"] for name in "abc"] == ["SUCCEEDED", "SKIPPED", "SUCCEEDED"]
    assert steps["b"]["error"]["code"] == "BAD_REPORT"


async def test_a_cancelled_step_is_stopped(harness: FlowsHarness, url: str) -> None:
    """F9: a worker hears at its heartbeat that the run was cancelled, and ends the step."""
    await harness.create(chain("a", kind="WAIT"))
    async with working(url, lease_for=timedelta(seconds=0.6)):
        await until_running(harness)
        await harness.post("/flow_runs/r1/cancel")

        async def is_cancelled() -> bool:
            return await harness.statuses() == {"a": "CANCELLED"}

        await becomes(is_cancelled, "the step ends")


async def test_a_worker_that_stops_gives_back_what_it_has(harness: FlowsHarness, url: str) -> None:
    """F17: at its end a worker gives back what does not end in time, as if it had never begun."""
    await harness.create(chain("a", kind="WAIT"))
    async with working(url, drain=timedelta(0)):
        await until_running(harness)
    step = (await harness.run())["steps"]["a"]
    assert (step["status"], step["attempts"]) == ("READY", 0)


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_a_program_ends_when_it_is_told_to(harness: FlowsHarness, url: str, how: signal.Signals) -> None:
    """F17: `run()` works until SIGTERM or SIGINT, ends what is under way, and leaves with 0."""
    env = {**os.environ, "PENSTOCK_URL": url}
    worker = await asyncio.create_subprocess_exec(sys.executable, "-m", MODULE, cwd=ROOT, env=env)
    try:
        await harness.create({"greet": {"kind": "GREET", "inputs": {"name": "x"}}})
        assert (await harness.wait_for_end())["status"] == "SUCCEEDED"
        worker.send_signal(how)
        async with asyncio.timeout(30):
            assert await worker.wait() == 0
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()


async def test_a_module_has_its_decorators_workers(harness: FlowsHarness, url: str) -> None:
    """F17: `penstock work flows --url --module` does what the `@worker`s of the module do, of some kinds."""
    settings = Settings.model_validate({"flows": {"modules": [MODULE]}, "server": FREE_PORT})
    [found] = FlowCatalogue(FlowsSection(modules=[MODULE])).workers
    assert found is sdk_worker.worker.__self__  # type: ignore[attr-defined]
    stop, addresses = asyncio.Event(), list[str]()
    working = asyncio.create_task(run_remote_flow_workers(url, ["GREET"], settings, stop, addresses.append))
    await harness.create({"a": {"kind": "GREET", "inputs": {"name": "x"}}, "b": {"kind": "RECALL"}})

    async def is_done() -> bool:
        return await harness.statuses() == {"a": "SUCCEEDED", "b": "READY"}

    await becomes(is_done, "the step of that kind ends, the other waits")
    stop.set()
    await working
    assert len(addresses) == 1
    assert addresses != [url]
    with pytest.raises(BadConfig, match="no worker is registered for step kind 'NONE'"):
        await run_remote_flow_workers(url, ["NONE"], settings, stop, addresses.append)
    with pytest.raises(BadConfig, match="there is nobody to do steps"):
        await run_remote_flow_workers(url, [], Settings(), stop, addresses.append)


async def test_steps_done_from_afar_are_traced_where_the_settings_say(harness: FlowsHarness, url: str) -> None:
    """F18: a worker that has only a server's address sends its spans to `telemetry.otlp_endpoint` too."""
    stop = asyncio.Event()
    with Collector() as collector:
        telemetry = {"otlp_endpoint": collector.endpoint}
        settings = Settings.model_validate(
            {"flows": {"modules": [MODULE]}, "telemetry": telemetry, "server": FREE_PORT}
        )
        working = asyncio.create_task(run_remote_flow_workers(url, ["GREET"], settings, stop, lambda _: None))
        steps = {"a": {"kind": "GREET", "inputs": {"name": "x"}}}
        made = await harness.http.post(
            "/flow_runs", json={"runId": "r1", "steps": steps}, headers={"traceparent": CALLER}
        )
        made.raise_for_status()
        await harness.wait_for_end()
        stop.set()
        await working
        [span] = collector.of(TRACE, "flow.step")
    assert span.about["step"] == "a"
