"""F13: the two renderers of charts: SVG drawn in this process, and an HTTP image API."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import aiohttp
import orjson
from yarl import URL

from penstock.flows.config import ImagesSection
from penstock.flows.kinds.market.candles import CandleSeries
from penstock.flows.kinds.market.manifest import DEFAULT_TEMPLATE, ChartRequest
from penstock.flows.kinds.market.svg.chart import draw_chart
from penstock.flows.kinds.market.svg.layout import ChartStyle
from penstock.kernel.clock import Clock
from penstock.kernel.http.external_api import ApiFailure, ApiResponse, CallFailed, ExternalApi
from penstock.kernel.tasks.backoff import Sleep

_THEMES = {DEFAULT_TEMPLATE: "light", f"{DEFAULT_TEMPLATE}-dark": "dark"}  # the templates of the local renderer
IMAGE_LIMIT = 20_000_000  # bytes
# The first bytes of each image type: an error page must not be stored as an image. SVG of an image API is not
# accepted, because it may contain scripts.
_TYPES = {
    "image/png": (".png", b"\x89PNG\r\n\x1a\n"),
    "image/jpeg": (".jpg", b"\xff\xd8\xff"),
    "image/webp": (".webp", b"RIFF"),
}
CODES = {failure: f"IMAGE_{failure}" for failure in ApiFailure} | {ApiFailure.MOVED: "IMAGE_REFUSED"}


@dataclass(frozen=True, slots=True)
class ChartImage:
    """A rendered chart."""

    data: bytes
    content_type: str
    suffix: str


class RenderFailed(Exception):
    """A failure of one chart: an error code and a message, after *attempts* attempts."""

    def __init__(self, code: str, message: str, *, attempts: int = 1, retryable: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.attempts, self.retryable = code, message, attempts, retryable


class ChartRenderer(Protocol):
    """A renderer of charts; concurrent calls are allowed."""

    async def draw(self, request: ChartRequest, series: CandleSeries | None) -> ChartImage:
        """Return the rendered chart, or raise RenderFailed."""


class LocalRenderer:
    """A renderer that draws candlesticks as SVG in this process."""

    async def draw(self, request: ChartRequest, series: CandleSeries | None) -> ChartImage:
        """Return the chart of *series*; equal series have equal bytes."""
        theme = _THEMES.get(request.template)
        if theme is None:
            templates = ", ".join(_THEMES)
            message = f"the local renderer has no template {request.template}; its templates are {templates}"
            raise RenderFailed("UNKNOWN_TEMPLATE", message)
        if series is None or not series.candles:
            raise RenderFailed("NO_CANDLES", "the chart has no candles; name the files of OHLCV_EXPORT in `files`")
        style = ChartStyle(request.width, request.height, request.theme or theme, request.title, request.last)
        svg = await asyncio.to_thread(draw_chart, series, style)
        return ChartImage(svg.encode(), "image/svg+xml", ".svg")


@asynccontextmanager
async def open_local_renderer() -> AsyncIterator[ChartRenderer]:
    """Yield the local renderer, for one step."""
    yield LocalRenderer()


class ImageApi:
    """A renderer that calls an HTTP image API."""

    def __init__(self, url: URL, api: ExternalApi, session: aiohttp.ClientSession) -> None:
        self._url, self._api, self._session = url, api, session

    async def draw(self, request: ChartRequest, series: CandleSeries | None) -> ChartImage:
        """Return the image in the response; RenderFailed after the last attempt."""
        body = {**request.as_dict(), **(series.select_last(request.last).as_dict() if series else {})}
        try:
            return await self._api.call(self._session, "POST", self._url, _parse_image, orjson.dumps(body))
        except CallFailed as failed:
            raise RenderFailed(
                CODES[failed.failure], failed.message, attempts=failed.attempts, retryable=failed.is_retryable
            ) from failed


@asynccontextmanager
async def open_image_api(
    section: ImagesSection, url: str, token: str | None, clock: Clock, pause: Sleep
) -> AsyncIterator[ChartRenderer]:
    """Yield a renderer for the configured image API, with its own connections, for one step."""
    headers = {"Accept": ", ".join(_TYPES), "Content-Type": "application/json"}
    api = ExternalApi(clock, section.timeout, section.attempts, IMAGE_LIMIT, headers, token=token, pause=pause)
    async with api.open_session() as session:
        yield ImageApi(URL(url), api, session)


def _parse_image(response: ApiResponse) -> ChartImage:
    """Return the image in a response; CallFailed if the response is not an image."""
    image_type = _TYPES.get(response.content_type)
    if image_type is None:
        content = f"content of type {response.content_type}" if response.body else "no content"
        message = f"the image API responded with status {response.status} and {content}, not with an image"
        raise CallFailed(ApiFailure.BAD_ANSWER, message)
    suffix, prefix = image_type
    if not response.body.startswith(prefix):
        message = f"the response of the image API is not of its content type, {response.content_type}"
        raise CallFailed(ApiFailure.BAD_ANSWER, message)
    return ChartImage(response.body, response.content_type, suffix)
