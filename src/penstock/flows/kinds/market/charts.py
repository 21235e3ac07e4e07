"""F12, F13: `worker_charts`: the pictures that are asked for, as many as come, and the manifest of all of them."""

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
    chart_inputs,
    manifest_of,
    verdict,
)
from penstock.flows.kinds.market.renderers import ChartRenderer, Picture, PictureFailed
from penstock.flows.model import StepError
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.kernel.errors import Invalid, NotFound, PenstockError

AT_ONCE = 8  # pictures of one step
_SAID = 500  # characters of a failure

OpenPainter = Callable[[], AbstractAsyncContextManager[ChartRenderer]]


@dataclass(slots=True)
class _Album:
    """What came of a step's requests until now."""

    asked: ChartInputs
    items: list[ChartItem] = field(default_factory=list)
    failures: list[ChartFailure] = field(default_factory=list)

    def fail(self, request: ChartRequest, failed: PictureFailed) -> None:
        self.failures.append(
            ChartFailure(
                id=request.id,
                code=failed.code,
                message=failed.message[:_SAID],
                attempts=failed.attempts,
                retryable=failed.retryable,
            )
        )

    def close(self, failed: PictureFailed) -> ChartsManifest:
        """The manifest; requests of which nothing is known *failed* so."""
        known = {*(item.id for item in self.items), *(failure.id for failure in self.failures)}
        for request in self.asked.requests:
            if request.id not in known:
                self.fail(request, failed)
        return manifest_of(self.asked.requests, self.items, self.failures)


def worker_charts(open_painter: OpenPainter) -> Handler:
    """The worker that has pictures drawn by what *open_painter* opens."""

    async def export(step: FlowStep) -> Outputs:
        try:
            asked = chart_inputs(step.inputs)
        except Invalid as error:
            raise StepFailed(error.code, error.message, retryable=False) from error
        album = _Album(asked)
        try:
            async with open_painter() as painter:
                await _draw_all(step, album, painter)
        finally:
            # Whatever happens, even that the step is stopped half-way, what is known is told.
            manifest = album.close(PictureFailed("STOPPED", "the step was stopped before this picture", retryable=True))
            path = await step.write(MANIFEST, manifest.as_bytes())
        return await _outputs(step, asked, manifest, path)

    return export


async def _draw_all(step: FlowStep, album: _Album, painter: ChartRenderer) -> None:
    room, candles = asyncio.Semaphore(AT_ONCE), _Candles(step, album.asked.files)

    async def one(request: ChartRequest) -> None:
        async with room:
            if step.cancelled.is_set():
                return
            try:
                picture = await painter.draw(request, await candles.of(request))
                album.items.append(await _keep(step, request, picture))
            except PictureFailed as failed:
                album.fail(request, failed)
            except PenstockError as error:
                album.fail(request, PictureFailed(error.code, error.message, retryable=error.status >= 500))
            except Exception as error:  # noqa: BLE001 - an edge: one picture must not cost the others
                structlog.get_logger().exception("picture_crashed", part="flows", run=step.run_id, request=request.id)
                album.fail(request, PictureFailed("INTERNAL", f"{type(error).__name__} while drawing"))

    async with asyncio.TaskGroup() as tasks:
        for request in album.asked.requests:
            tasks.create_task(one(request))


async def _keep(step: FlowStep, request: ChartRequest, picture: Picture) -> ChartItem:
    name = request.id + picture.suffix
    path = await step.write(name, picture.data)
    return ChartItem(
        id=request.id,
        name=name,
        content_type=picture.content_type,
        size=len(picture.data),
        sha256=hashlib.sha256(picture.data).hexdigest(),
        path=path,
    )


async def _outputs(step: FlowStep, asked: ChartInputs, manifest: ChartsManifest, path: str) -> Outputs:
    for failure in manifest.failures:
        await step.log(f"{failure.id}: {failure.code}: {failure.message}", "warning")
    found = verdict(manifest.as_bytes(), step.inputs, step.artifacts)
    if isinstance(found, StepError):
        is_worth_it = any(failure.retryable for failure in manifest.failures)
        raise StepFailed(found.code, found.message, found.details, retryable=is_worth_it)
    await step.log(f"{found['received']} of {found['requested']} pictures")
    timeframes = {request.id: request.timeframe for request in asked.requests}
    items = [
        {"id": item.id, "name": item.name, "path": item.path, "timeframe": timeframes[item.id]}
        for item in manifest.items
    ]
    return {**found, "manifest": path, "items": items}


class _Candles:
    """The candles of the steps before, each read once."""

    def __init__(self, step: FlowStep, files: Sequence[CandleFile]) -> None:
        self._step, self._files = step, files
        self._read: dict[str, CandleSeries | PictureFailed] = {}
        self._reading = asyncio.Lock()

    async def of(self, request: ChartRequest) -> CandleSeries | None:
        """What a request is to show; None when there are no candles at all."""
        if not self._files:
            return None
        file = self._file(request.timeframe)
        async with self._reading:
            if file.timeframe not in self._read:
                self._read[file.timeframe] = await self._load(file)
        found = self._read[file.timeframe]
        if isinstance(found, PictureFailed):
            raise found
        return found

    def _file(self, timeframe: str | None) -> CandleFile:
        for file in self._files:
            if timeframe in (None, file.timeframe):
                return file
        known = ", ".join(file.timeframe for file in self._files)
        raise PictureFailed("NO_CANDLES", f"there are no candles of {timeframe}; there are {known}")

    async def _load(self, file: CandleFile) -> CandleSeries | PictureFailed:
        try:
            data = await self._step.read(file.step, file.name)
            return await asyncio.to_thread(read_series, data)
        except NotFound as error:
            return PictureFailed("CANDLES_MISSING", error.message)
        except ValueError as error:
            return PictureFailed("CANDLES_INVALID", f"{file.name} of {file.step}: {error}")
