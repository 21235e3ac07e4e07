"""All parts of a running server, from Python."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from time import monotonic

from penstock.kernel.errors import Transient
from penstock.kernel.http.client import ApiClient, Json
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
                headers = {"last-event-id": heard} if heard else {}
                async with self._stream(address, silent_for=_SILENT_FOR, headers=headers) as events:
                    async for event in events:
                        heard, has_begun, seen_at = event.id, True, monotonic()
                        backoff.reset()
                        yield event.data
                if not follow:
                    return
            except Transient:
                if not (follow and has_begun) or monotonic() - seen_at > _GIVE_UP_AFTER:
                    raise
            await asyncio.sleep(backoff.next().total_seconds())
