"""A client for the overview of a running server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from time import monotonic

from penstock.kernel.errors import Transient
from penstock.kernel.http.client import ApiClient, Json
from penstock.kernel.tasks.backoff import Backoff
from penstock.overview.contract import EVENTS, PREFIX, STATUS

_RECONNECT_FOR = 60.0  # seconds for which a follower tries to reconnect after the last event
_SILENCE_LIMIT = 60.0  # seconds without a byte; an idle stream sends a comment every fifteen


class OverviewClient(ApiClient):
    """The overview of one server."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def status(self) -> Json:
        """Return the status report of all parts."""
        return await self._get(STATUS)

    async def events(
        self, *, parts: Sequence[str] = (), subject: str = "", last: int = 0, follow: bool = True
    ) -> AsyncIterator[Json]:
        """Yield the *last* past moves, then, with *follow*, new moves as they are made.

        A stream that breaks while it is followed resumes after the last event. If the server stays down for a minute,
        Transient is raised.
        """
        query = [("subject", subject), ("last", str(last)), ("follow", str(follow).lower())]
        address = self._make_address(EVENTS).update_query([*query, *(("part", part) for part in parts)])
        last_id: str | None = None
        backoff, received_at = Backoff(), monotonic()
        while True:
            try:
                headers = {"last-event-id": last_id} if last_id else {}
                async with self._stream(address, silent_for=_SILENCE_LIMIT, headers=headers) as events:
                    async for event in events:
                        last_id, received_at = event.id, monotonic()
                        backoff.reset()
                        yield event.data
                if not follow:
                    return
            except Transient:
                if not (follow and last_id) or monotonic() - received_at > _RECONNECT_FOR:
                    raise
            await asyncio.sleep(backoff.compute_next().total_seconds())
