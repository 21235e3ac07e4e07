"""All parts of a running server, from Python."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from time import monotonic

import aiohttp
import orjson
from yarl import URL

from penstock.kernel.errors import Transient
from penstock.kernel.http.client import ApiClient, Json, failure
from penstock.kernel.tasks.backoff import Backoff
from penstock.overview.contract import EVENTS, PREFIX, STATUS

_GIVE_UP_AFTER = 60.0  # seconds that a server may be away from one who follows it
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
        """Moves as they are made, the *last* ones first; not to *follow* is to end with those.

        A server that ends the stream while it is followed is asked to go on after the last event; one that stays away
        is Transient.
        """
        asked = [("subject", subject), ("last", str(last)), ("follow", str(follow).lower())]
        address = self._address(EVENTS).update_query([*asked, *(("part", part) for part in parts)])
        heard: str | None = None
        backoff, has_begun, seen_at = Backoff(), False, monotonic()
        while True:
            try:
                async for name, event in self._stream(address, heard):
                    heard, has_begun, seen_at = name, True, monotonic()
                    backoff.reset()
                    yield event
                if not follow:
                    return
            except Transient:
                if not (follow and has_begun) or monotonic() - seen_at > _GIVE_UP_AFTER:
                    raise
            await asyncio.sleep(backoff.next().total_seconds())

    async def _stream(self, address: URL, heard: str | None) -> AsyncIterator[tuple[str, Json]]:
        """Events with their ids, for as long as the server tells them."""
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=_SILENT_FOR)
        headers = {"last-event-id": heard} if heard else {}
        with self._down():
            async with self._opened.get(address, timeout=limit, headers=headers) as response:
                if response.status >= 400:
                    raise failure(response.status, await response.read())
                name = ""
                async for line in response.content:
                    if line.startswith(b"id: "):
                        name = line[4:].decode().strip()
                    elif line.startswith(b"data: "):
                        yield name, orjson.loads(line[6:])
