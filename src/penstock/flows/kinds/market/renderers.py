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
from penstock.flows.kinds.market.svg.chart import draw
from penstock.flows.kinds.market.svg.layout import ChartStyle
from penstock.kernel.clock import Clock
from penstock.kernel.http.external_api import ApiFailure, ApiResponse, CallFailed, ExternalApi
from penstock.kernel.tasks.backoff import Sleep

_THEMES = {DEFAULT_TEMPLATE: "light", f"{DEFAULT_TEMPLATE}-dark": "dark"}  # the templates the local painter knows
PICTURE_LIMIT = 20_000_000  # bytes
# What a picture of a type begins with: an error page is not kept under the name of a picture. SVG is not among them:
# one from elsewhere may carry scripts.
_TYPES = {
    "image/png": (".png", b"\x89PNG\r\n\x1a\n"),
    "image/jpeg": (".jpg", b"\xff\xd8\xff"),
    "image/webp": (".webp", b"RIFF"),
}
CODES = {failure: f"IMAGE_{failure}" for failure in ApiFailure} | {ApiFailure.MOVED: "IMAGE_REFUSED"}


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart that was drawn."""

    data: bytes
    content_type: str
    suffix: str


class PictureFailed(Exception):
    """A picture did not come: a short constant and a sentence, after so many attempts."""

    def __init__(self, code: str, message: str, *, attempts: int = 1, retryable: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.attempts, self.retryable = code, message, attempts, retryable


class ChartRenderer(Protocol):
    """Draws one chart at a time; several at once may be asked for."""

    async def draw(self, request: ChartRequest, series: CandleSeries | None) -> Picture:
        """The picture; PictureFailed when there is none."""


class LocalRenderer:
    """Draws candlesticks as SVG, here."""

    async def draw(self, request: ChartRequest, series: CandleSeries | None) -> Picture:
        """The chart of *series*, the same bytes each time."""
        theme = _THEMES.get(request.template)
        if theme is None:
            known = ", ".join(_THEMES)
            raise PictureFailed("UNKNOWN_TEMPLATE", f"there is no template {request.template}; there are {known}")
        if series is None or not series.candles:
            raise PictureFailed("NO_CANDLES", "there are no candles to draw; give `files`")
        look = ChartStyle(request.width, request.height, request.theme or theme, request.title, request.last)
        drawn = await asyncio.to_thread(draw, series, look)
        return Picture(drawn.encode(), "image/svg+xml", ".svg")


@asynccontextmanager
async def drawn_here() -> AsyncIterator[ChartRenderer]:
    """The local painter, for one step."""
    yield LocalRenderer()


class ImageApi:
    """Has pictures drawn by an image API."""

    def __init__(self, url: URL, api: ExternalApi, session: aiohttp.ClientSession) -> None:
        self._url, self._api, self._session = url, api, session

    async def draw(self, request: ChartRequest, series: CandleSeries | None) -> Picture:
        """The picture it answers with; PictureFailed after the last try."""
        body = {**request.as_dict(), **(series.last(request.last).as_dict() if series else {})}
        try:
            return await self._api.call(self._session, "POST", self._url, _picture, orjson.dumps(body))
        except CallFailed as failed:
            raise PictureFailed(
                CODES[failed.failure], failed.message, attempts=failed.attempts, retryable=failed.is_retryable
            ) from failed


@asynccontextmanager
async def image_api(
    section: ImagesSection, url: str, token: str | None, clock: Clock, pause: Sleep
) -> AsyncIterator[ChartRenderer]:
    """The API of the configuration, with connections of its own, for one step."""
    headers = {"Accept": ", ".join(_TYPES), "Content-Type": "application/json"}
    api = ExternalApi(clock, section.timeout, section.attempts, PICTURE_LIMIT, headers, token=token, pause=pause)
    async with api.session() as session:
        yield ImageApi(URL(url), api, session)


def _picture(answered: ApiResponse) -> Picture:
    """The picture of an answer; CallFailed when it is none."""
    known = _TYPES.get(answered.content_type)
    if known is None:
        what = "nothing" if not answered.body else answered.content_type
        raise CallFailed(ApiFailure.BAD_ANSWER, f"the image API answered {answered.status} with {what}, not a picture")
    suffix, beginning = known
    if not answered.body.startswith(beginning):
        raise CallFailed(ApiFailure.BAD_ANSWER, f"the image API's answer is no {answered.content_type}, as it says")
    return Picture(answered.body, answered.content_type, suffix)
