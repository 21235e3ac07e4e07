"""F12, F13: charts of the local renderer or of a faulty image API; the manifest has the result of each."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.flows.contract import CHART_EXPORT
from penstock.flows.kinds.market.candles import CandleSeries
from penstock.flows.kinds.market.charts import worker_charts
from penstock.flows.kinds.market.manifest import ChartRequest
from penstock.flows.kinds.market.renderers import ChartImage, ChartRenderer, LocalRenderer
from penstock.flows.step import Workers
from penstock.kernel.errors import Transient
from tests.flows.kinds.market.chart_steps import FILES, LOCAL_WORKERS, chart_inputs, make_api_workers, read_results
from tests.flows.kinds.market.run_step_io import RunStepIO
from tests.flows.market_servers import (
    ScriptedMarketServer,
)


async def test_local_renderer_is_the_default(step_io: RunStepIO) -> None:
    """F12, F13: an SVG per request, and a manifest with path, size and sha256 of each."""
    outputs = await step_io.run_step(LOCAL_WORKERS, CHART_EXPORT, chart_inputs("a", "b"))
    assert (outputs["requested"], outputs["received"], outputs["partial"]) == (2, 2, False)
    assert outputs["manifest"] == "charts/run-1/chart/manifest.json"
    assert outputs["items"][0] == {"id": "a", "name": "a.svg", "path": "charts/run-1/chart/a.svg", "timeframe": None}
    manifest, data = step_io.document("chart", "manifest.json"), step_io.artifacts["chart", "a.svg"]
    assert data.startswith(b"<svg ")
    assert manifest["items"][0] == {
        "id": "a",
        "name": "a.svg",
        "contentType": "image/svg+xml",
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "path": "charts/run-1/chart/a.svg",
    }
    assert [each["id"] for each in manifest["requested"]] == ["a", "b"]


async def test_failed_request_does_not_fail_others(step_io: RunStepIO) -> None:
    """F12: each failure has its code; with `minImages` the others are a partial success."""
    requests = [
        {"id": "fine"},
        {"id": "odd", "template": "pie"},
        {"id": "none", "timeframe": "1w"},
        {"id": "gone", "timeframe": "1d"},
        {"id": "rubbish", "timeframe": "4h"},
    ]
    more = [{"step": "ohlcv", "name": f"{t}.json", "timeframe": t} for t in ("1d", "4h")]
    step_io.artifacts["ohlcv", "4h.json"] = b'{"candles": 5}'
    inputs = {"requests": requests, "files": FILES + more, "minImages": 1}
    outputs = await step_io.run_step(LOCAL_WORKERS, CHART_EXPORT, inputs)
    assert outputs["partial"] is True
    assert read_results(step_io) == (
        ["fine"],
        [
            ("odd", "UNKNOWN_TEMPLATE"),
            ("none", "NO_CANDLES"),
            ("gone", "CANDLES_MISSING"),
            ("rubbish", "CANDLES_INVALID"),
        ],
    )
    assert len([line for line in step_io.logs["chart"] if line.startswith("warning")]) == 4


async def test_too_few_charts_fail_the_step(step_io: RunStepIO) -> None:
    """F12: the manifest is written, and the error has the failures of the manifest."""
    error = await step_io.run_failing_step(
        LOCAL_WORKERS, CHART_EXPORT, {"requests": [{"id": "a"}, {"id": "b", "template": "pie"}], "files": FILES}
    )
    assert error.code == "TOO_FEW_IMAGES"
    assert error.details["failures"][0]["code"] == "UNKNOWN_TEMPLATE"
    assert read_results(step_io) == (["a"], [("b", "UNKNOWN_TEMPLATE")])


async def test_invalid_inputs_fail_the_step(step_io: RunStepIO) -> None:
    """F12: the worker checks the inputs as the engine does."""
    assert (await step_io.run_failing_step(LOCAL_WORKERS, CHART_EXPORT, chart_inputs("a", "a"))).code == "BAD_INPUTS"


class _FaultyRenderer:
    """A renderer that crashes, hangs, or draws."""

    def __init__(self) -> None:
        self.hanging = asyncio.Event()

    async def draw(self, request: ChartRequest, series: CandleSeries | None) -> ChartImage:
        if request.id == "crash":
            raise ZeroDivisionError("at line 7 of something private")
        if request.id == "hang":
            self.hanging.set()
            await asyncio.Event().wait()
        return await LocalRenderer().draw(request, series)


def _make_workers(renderer: ChartRenderer) -> Workers:
    @asynccontextmanager
    async def opened() -> AsyncIterator[ChartRenderer]:
        yield renderer

    workers = Workers()
    workers.worker(CHART_EXPORT)(worker_charts(opened))
    return workers


async def test_crash_fails_one_chart(step_io: RunStepIO) -> None:
    """F12: an unexpected error is a failure of the chart, and its message is not shown."""
    await step_io.run_step(_make_workers(_FaultyRenderer()), CHART_EXPORT, chart_inputs("crash", "fine", minImages=1))
    assert read_results(step_io) == (["fine"], [("crash", "INTERNAL")])
    assert b"private" not in step_io.artifacts["chart", "manifest.json"]


async def test_stopped_step_writes_its_manifest(step_io: RunStepIO) -> None:
    """F12: a step that is cancelled writes the results so far."""
    renderer = _FaultyRenderer()
    doing = asyncio.create_task(step_io.run_step(_make_workers(renderer), CHART_EXPORT, chart_inputs("fine", "hang")))
    await renderer.hanging.wait()
    await step_io.wrote["fine.svg"].wait()
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    assert read_results(step_io) == (["fine"], [("hang", "STOPPED")])


async def test_cancelled_step_starts_no_more_charts(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F9, F12: after the cancellation no request is sent, and the manifest has STOPPED."""
    step = step_io.step(CHART_EXPORT, chart_inputs("a", "b", minImages=0))
    step.cancelled.set()
    outputs: Any = make_api_workers(api).handlers[CHART_EXPORT](step)
    assert (await outputs)["received"] == 0
    assert read_results(step_io) == ([], [("a", "STOPPED"), ("b", "STOPPED")])
    assert not api.bodies


class _FullStorage(RunStepIO):
    """A store that accepts only manifests."""

    async def write(self, claimed: Any, name: str, data: bytes) -> None:
        if not name.endswith(".json"):
            raise Transient("STORAGE_DOWN", "the store does not answer")
        await super().write(claimed, name, data)


async def test_chart_that_cannot_be_stored_is_a_failure(step_io: RunStepIO) -> None:
    """F12: a chart without an artifact is not an item."""
    full = _FullStorage()
    full.artifacts |= step_io.artifacts
    error = await full.run_failing_step(LOCAL_WORKERS, CHART_EXPORT, chart_inputs("a"))
    assert error.code == "TOO_FEW_IMAGES"
    assert read_results(full) == ([], [("a", "STORAGE_DOWN")])
