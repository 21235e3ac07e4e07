"""F13: pictures from an HTTP image API: one POST per chart, answered with the picture."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from penstock.flows.config import ImagesSection
from penstock.flows.kinds.http_client import Answered, Api, CallFailed, Pause, Trouble
from penstock.flows.kinds.market.exported_candles import Series
from penstock.flows.kinds.market.manifest import ChartRequest
from penstock.flows.kinds.market.svg_renderer import Painter, Picture, PictureFailed
from penstock.kernel.clock import Clock

PICTURE_LIMIT = 20_000_000  # bytes
# What a picture of a type begins with: an error page is not kept under the name of a picture. SVG is not among them:
# one from elsewhere may carry scripts.
_TYPES = {
    "image/png": (".png", b"\x89PNG\r\n\x1a\n"),
    "image/jpeg": (".jpg", b"\xff\xd8\xff"),
    "image/webp": (".webp", b"RIFF"),
}


class ImageApi:
    """Has pictures drawn by an image API."""

    def __init__(self, api: Api, session: aiohttp.ClientSession) -> None:
        self._api, self._session = api, session

    async def draw(self, request: ChartRequest, series: Series | None) -> Picture:
        """The picture it answers with; PictureFailed after the last try."""
        body = {**request.as_dict(), **(series.last(request.last).as_dict() if series else {})}
        try:
            return await self._api.post(self._session, body, _picture)
        except CallFailed as failed:
            raise PictureFailed(
                f"IMAGE_{failed.trouble}", failed.message, attempts=failed.attempts, retryable=failed.is_retryable
            ) from failed


def image_api(section: ImagesSection, url: str, token: str | None, clock: Clock, pause: Pause) -> Api:
    """The API of the configuration."""
    return Api(url, token, section.timeout, section.attempts, PICTURE_LIMIT, ", ".join(_TYPES), clock, pause)


@asynccontextmanager
async def opened(api: Api) -> AsyncIterator[Painter]:
    """A painter with connections of its own, for one step."""
    async with api.session() as session:
        yield ImageApi(api, session)


def _picture(answered: Answered) -> Picture:
    """The picture of an answer; CallFailed when it is none."""
    known = _TYPES.get(answered.content_type)
    if known is None:
        what = "nothing" if not answered.body else answered.content_type
        raise CallFailed(Trouble.BAD_ANSWER, f"the image API answered {answered.status} with {what}, not a picture")
    suffix, beginning = known
    if not answered.body.startswith(beginning):
        raise CallFailed(Trouble.BAD_ANSWER, f"the image API's answer is no {answered.content_type}, as it says")
    return Picture(answered.body, answered.content_type, suffix)
