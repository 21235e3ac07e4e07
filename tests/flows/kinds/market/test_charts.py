"""F12, F13: pictures drawn here or by an image API that fails in every way; the manifest tells what came of each."""

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
from tests.flows.kinds.market.chart_steps import FILES, HERE, asked, drawn_by, told
from tests.flows.kinds.market.run_step_io import RunStepIO
from tests.flows.market_servers import (
    ScriptedMarketServer,
)


async def test_charts_are_drawn_here_by_default(step_io: RunStepIO) -> None:
    """F12, F13: an SVG for each request, and a manifest with where each is, its size and its sha256."""
    outputs = await step_io.do(HERE, CHART_EXPORT, asked("a", "b"))
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


async def test_a_request_that_cannot_be_drawn_costs_only_itself(step_io: RunStepIO) -> None:
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
    outputs = await step_io.do(HERE, CHART_EXPORT, inputs)
    assert outputs["partial"] is True
    assert told(step_io) == (
        ["fine"],
        [
            ("odd", "UNKNOWN_TEMPLATE"),
            ("none", "NO_CANDLES"),
            ("gone", "CANDLES_MISSING"),
            ("rubbish", "CANDLES_INVALID"),
        ],
    )
    assert len([line for line in step_io.logs["chart"] if line.startswith("warning")]) == 4


async def test_too_few_pictures_fail_the_step_with_its_manifest(step_io: RunStepIO) -> None:
    """F12: the manifest is written even then, and the error says what it says."""
    error = await step_io.fail(
        HERE, CHART_EXPORT, {"requests": [{"id": "a"}, {"id": "b", "template": "pie"}], "files": FILES}
    )
    assert error.code == "TOO_FEW_IMAGES"
    assert error.details["failures"][0]["code"] == "UNKNOWN_TEMPLATE"
    assert told(step_io) == (["a"], [("b", "UNKNOWN_TEMPLATE")])


async def test_inputs_that_make_no_sense(step_io: RunStepIO) -> None:
    """F12: a worker does not begin what the engine would not believe."""
    assert (await step_io.fail(HERE, CHART_EXPORT, asked("a", "a"))).code == "BAD_INPUTS"


class _Stubborn:
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


def _done_by(renderer: ChartRenderer) -> Workers:
    @asynccontextmanager
    async def opened() -> AsyncIterator[ChartRenderer]:
        yield renderer

    workers = Workers()
    workers.worker(CHART_EXPORT)(worker_charts(opened))
    return workers


async def test_a_crash_costs_one_picture(step_io: RunStepIO) -> None:
    """F12: a mistake of ours is a failure among others, and its insides are not told."""
    await step_io.do(_done_by(_Stubborn()), CHART_EXPORT, asked("crash", "fine", minImages=1))
    assert told(step_io) == (["fine"], [("crash", "INTERNAL")])
    assert b"private" not in step_io.artifacts["chart", "manifest.json"]


async def test_a_step_that_is_stopped_leaves_its_manifest(step_io: RunStepIO) -> None:
    """F12: even when the time is up half-way, what is known is written."""
    renderer = _Stubborn()
    doing = asyncio.create_task(step_io.do(_done_by(renderer), CHART_EXPORT, asked("fine", "hang")))
    await renderer.hanging.wait()
    await step_io.wrote["fine.svg"].wait()
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    assert told(step_io) == (["fine"], [("hang", "STOPPED")])


async def test_a_cancelled_step_begins_no_more_pictures(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F9, F12: after it is told to stop nothing is asked for, and the manifest says so."""
    step = step_io.step(CHART_EXPORT, asked("a", "b", minImages=0))
    step.cancelled.set()
    outputs: Any = drawn_by(api).handlers[CHART_EXPORT](step)
    assert (await outputs)["received"] == 0
    assert told(step_io) == ([], [("a", "STOPPED"), ("b", "STOPPED")])
    assert not api.bodies


class _Full(RunStepIO):
    """A store that takes manifests only."""

    async def write(self, held: Any, name: str, data: bytes) -> None:
        if not name.endswith(".json"):
            raise Transient("STORAGE_DOWN", "the store does not answer")
        await super().write(held, name, data)


async def test_a_picture_that_cannot_be_kept_did_not_come(step_io: RunStepIO) -> None:
    """F12: what is not an artifact is no item."""
    full = _Full()
    full.artifacts |= step_io.artifacts
    error = await full.fail(HERE, CHART_EXPORT, asked("a"))
    assert error.code == "TOO_FEW_IMAGES"
    assert told(full) == ([], [("a", "STORAGE_DOWN")])
