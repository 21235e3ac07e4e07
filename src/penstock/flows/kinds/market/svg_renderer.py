"""What draws charts: here, or somebody else's API."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from penstock.flows.kinds.looks import Look
from penstock.flows.kinds.market.exported_candles import Series
from penstock.flows.kinds.market.manifest import DEFAULT_TEMPLATE, ChartRequest
from penstock.flows.kinds.market.svg.chart import draw

_THEMES = {DEFAULT_TEMPLATE: "light", f"{DEFAULT_TEMPLATE}-dark": "dark"}  # the templates the local painter knows


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


class Painter(Protocol):
    """Draws one chart at a time; several at once may be asked for."""

    async def draw(self, request: ChartRequest, series: Series | None) -> Picture:
        """The picture; PictureFailed when there is none."""


class LocalPainter:
    """Draws candlesticks as SVG, here."""

    async def draw(self, request: ChartRequest, series: Series | None) -> Picture:
        """The chart of *series*, the same bytes each time."""
        theme = _THEMES.get(request.template)
        if theme is None:
            known = ", ".join(_THEMES)
            raise PictureFailed("UNKNOWN_TEMPLATE", f"there is no template {request.template}; there are {known}")
        if series is None or not series.candles:
            raise PictureFailed("NO_CANDLES", "there are no candles to draw; give `files`")
        look = Look(request.width, request.height, request.theme or theme, request.title, request.last)
        drawn = await asyncio.to_thread(draw, series, look)
        return Picture(drawn.encode(), "image/svg+xml", ".svg")


@asynccontextmanager
async def drawn_here() -> AsyncIterator[Painter]:
    """The local painter, for one step."""
    yield LocalPainter()
