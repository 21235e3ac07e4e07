"""F18: the steps of a run in one trace, and in metrics."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.flows.contract import FlowRunStatus
from penstock.flows.definition.spec import RunRequest
from penstock.flows.metrics import FlowMetrics
from penstock.flows.step import FlowStep, StepFailed, Workers
from penstock.flows.worker.local import LocalWorkSource
from penstock.flows.worker.loop import StepWorker
from penstock.kernel.telemetry.telemetry import Telemetry
from tests.flows.stepper import FlowsStepper, flows_stepper
from tests.support.wait import becomes

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
async def flows(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsStepper]:
    async with flows_stepper(database_url, tmp_path) as found:
        yield found


async def test_every_step_has_a_span_in_the_trace_of_its_run(flows: FlowsStepper) -> None:
    """F18: one span per attempt, in the trace of the request; failed attempts are marked."""
    kept = InMemorySpanExporter()
    telemetry = Telemetry(spans=[SimpleSpanProcessor(kept)])
    workers = Workers()

    @workers.worker("work")
    async def work(step: FlowStep) -> None:
        if step.step_id == "b":
            raise StepFailed("BROKEN", "it broke")

    steps = {"a": {"kind": "work"}, "b": {"kind": "work", "dependsOn": ["a"]}}
    await flows.engine.create(RunRequest.model_validate({"runId": "traced", "steps": steps}), "tester", trace=CALLER)
    work_source = LocalWorkSource(flows.engine, flows.storage)
    metrics = FlowMetrics(telemetry.registry)
    worker = StepWorker(
        work_source, workers, telemetry, metrics, name="w", concurrency=2, lease_for=timedelta(seconds=60)
    )

    async def has_failed() -> bool:
        return await flows.status("traced") == FlowRunStatus.FAILED

    async with worker.run():
        await becomes(has_failed, "the run failed")
    spans = {str((span.attributes or {})["step"]): span for span in kept.get_finished_spans()}
    assert {name: span.status.is_ok for name, span in spans.items()} == {"a": True, "b": False}
    assert {f"{span.context.trace_id:032x}" for span in spans.values() if span.context} == {TRACE}
    exposition = telemetry.format_metrics().decode()
    assert 'penstock_flow_steps_total{kind="work",outcome="SUCCEEDED"} 1.0' in exposition
    assert 'penstock_flow_steps_total{kind="work",outcome="FAILED"} 1.0' in exposition
