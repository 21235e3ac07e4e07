"""All parts of a running server, from Python."""

from collections.abc import AsyncIterator, Sequence

import aiohttp
import orjson

from penstock.kernel.api_client import ApiClient, Json, failure
from penstock.overview.contract import EVENTS, PREFIX, STATUS

_SILENT_FOR = 60.0  # seconds; a stream with nothing to tell says so every fifteen


class OverviewClient(ApiClient):
    """One server's overview."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def status(self) -> Json:
        return await self._get(STATUS)

    async def events(
        self, *, parts: Sequence[str] = (), subject: str = "", last: int = 0, follow: bool = True
    ) -> AsyncIterator[Json]:
        """Moves as they are made, the *last* ones first; not to *follow* is to end with those."""
        asked = [("subject", subject), ("last", str(last)), ("follow", str(follow).lower())]
        address = self._address(EVENTS).update_query([*asked, *(("part", part) for part in parts)])
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=_SILENT_FOR)
        with self._down():
            async with self._opened.get(address, timeout=limit) as response:
                if response.status >= 400:
                    raise failure(response.status, await response.read())
                async for line in response.content:
                    if line.startswith(b"data: "):
                        yield orjson.loads(line[6:])
