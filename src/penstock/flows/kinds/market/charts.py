"""F12, F13: `worker_charts`: the requested charts, any number of them, and the manifest of all charts."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import structlog

from penstock.flows.kinds.market.candles import CandleFile, CandleSeries, read_series
from penstock.flows.kinds.market.manifest import (
    MANIFEST,
    ChartFailure,
    ChartInputs,
    ChartItem,
    ChartRequest,
    ChartsManifest,
    check_manifest,
    make_manifest,
    parse_chart_inputs,
)
from penstock.flows.kinds.market.renderers import ChartImage, ChartRenderer, RenderFailed
from penstock.flows.model import StepError
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.kernel.errors import Invalid, NotFound, PenstockError

CONCURRENCY = 8  # charts of one step
_MESSAGE_LIMIT = 500  # characters of the message of a failure
_log = structlog.get_logger()

OpenRenderer = Callable[[], AbstractAsyncContextManager[ChartRenderer]]


@dataclass(slots=True)
class _ChartResults:
    """The charts and failures of a step so far."""

    inputs: ChartInputs
    items: list[ChartItem] = field(default_factory=list)
    failures: list[ChartFailure] = field(default_factory=list)

    def add_failure(self, request: ChartRequest, error: RenderFailed) -> None:
        self.failures.append(
            ChartFailure(
                id=request.id,
                code=error.code,
                message=error.message[:_MESSAGE_LIMIT],
                attempts=error.attempts,
                retryable=error.retryable,
            )
        )

    def make_manifest(self, error: RenderFailed) -> ChartsManifest:
        """Return the manifest; requests without a result fail with *error*."""
        finished = {*(item.id for item in self.items), *(failure.id for failure in self.failures)}
        for request in self.inputs.requests:
            if request.id not in finished:
                self.add_failure(request, error)
        return make_manifest(self.inputs.requests, self.items, self.failures)


def worker_charts(open_renderer: OpenRenderer) -> Handler:
    """Return the handler of steps that render charts with the renderer that *open_renderer* opens."""

    async def export(step: FlowStep) -> Outputs:
        try:
            inputs = parse_chart_inputs(step.inputs)
        except Invalid as error:
            raise StepFailed(error.code, error.message, retryable=False) from error
        results = _ChartResults(inputs)
        try:
            async with open_renderer() as renderer:
                await _render_charts(step, results, renderer)
        finally:
            # Written even if the step is cancelled: the manifest records the results so far.
            stopped = RenderFailed("STOPPED", "the step was stopped before this chart was rendered", retryable=True)
            manifest = results.make_manifest(stopped)
            path = await step.write(MANIFEST, manifest.as_bytes())
        return await _make_outputs(step, inputs, manifest, path)

    return export


async def _render_charts(step: FlowStep, results: _ChartResults, renderer: ChartRenderer) -> None:
    slots, candles = asyncio.Semaphore(CONCURRENCY), _CandleReader(step, results.inputs.files)

    async def render(request: ChartRequest) -> None:
        async with slots:
            if step.cancelled.is_set():
                return
            try:
                image = await renderer.draw(request, await candles.read(request))
                results.items.append(await _write_image(step, request, image))
            except RenderFailed as error:
                results.add_failure(request, error)
            except PenstockError as error:
                results.add_failure(request, RenderFailed(error.code, error.message, retryable=error.status >= 500))
            except Exception as error:  # noqa: BLE001 - an edge: an error in one chart must not fail the others
                _log.exception("flow_chart_crashed", run=step.run_id, step=step.step_id, request=request.id)
                results.add_failure(request, RenderFailed("INTERNAL", f"{type(error).__name__} while rendering"))

    async with asyncio.TaskGroup() as tasks:
        for request in results.inputs.requests:
            tasks.create_task(render(request))


async def _write_image(step: FlowStep, request: ChartRequest, image: ChartImage) -> ChartItem:
    name = request.id + image.suffix
    path = await step.write(name, image.data)
    return ChartItem(
        id=request.id,
        name=name,
        content_type=image.content_type,
        size=len(image.data),
        sha256=hashlib.sha256(image.data).hexdigest(),
        path=path,
    )


async def _make_outputs(step: FlowStep, inputs: ChartInputs, manifest: ChartsManifest, path: str) -> Outputs:
    for failure in manifest.failures:
        await step.log(f"{failure.id}: {failure.code}: {failure.message}", "warning")
    result = check_manifest(manifest.as_bytes(), step.inputs, step.artifacts)
    if isinstance(result, StepError):
        is_retryable = any(failure.retryable for failure in manifest.failures)
        raise StepFailed(result.code, result.message, result.details, retryable=is_retryable)
    await step.log(f"{result['received']} of {result['requested']} charts")
    timeframes = {request.id: request.timeframe for request in inputs.requests}
    items = [
        {"id": item.id, "name": item.name, "path": item.path, "timeframe": timeframes[item.id]}
        for item in manifest.items
    ]
    return {**result, "manifest": path, "items": items}


class _CandleReader:
    """A reader of the candles of earlier steps; it reads each file once."""

    def __init__(self, step: FlowStep, files: Sequence[CandleFile]) -> None:
        self._step, self._files = step, files
        self._cache: dict[str, CandleSeries | RenderFailed] = {}
        self._lock = asyncio.Lock()

    async def read(self, request: ChartRequest) -> CandleSeries | None:
        """Return the candles of a request; None if the step has no files."""
        if not self._files:
            return None
        file = self._select_file(request.timeframe)
        async with self._lock:
            if file.timeframe not in self._cache:
                self._cache[file.timeframe] = await self._load(file)
        series = self._cache[file.timeframe]
        if isinstance(series, RenderFailed):
            raise series
        return series

    def _select_file(self, timeframe: str | None) -> CandleFile:
        for file in self._files:
            if timeframe in (None, file.timeframe):
                return file
        timeframes = ", ".join(file.timeframe for file in self._files)
        raise RenderFailed("NO_CANDLES", f"no file has candles of {timeframe}; the files have {timeframes}")

    async def _load(self, file: CandleFile) -> CandleSeries | RenderFailed:
        try:
            data = await self._step.read(file.step, file.name)
            return await asyncio.to_thread(read_series, data)
        except NotFound as error:
            return RenderFailed("CANDLES_MISSING", error.message)
        except ValueError as error:
            return RenderFailed("CANDLES_INVALID", f"{file.name} of step {file.step}: {error}")
