"""H15: one request to a source: each attempt passes the gate of the feed, its failure is that of a source."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from penstock.harvest.config import CallSection
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.harvest.sources.rate_limiter import CLOSED, RateLimiter
from penstock.kernel.http.external_api import ApiFailure, CallFailed, ExternalApi, redact_url
from penstock.kernel.tasks.backoff import compute_delay

T = TypeVar("T")
UNAUTHORIZED = "SOURCE_UNAUTHORIZED"


@dataclass(frozen=True, slots=True)
class SourceClient:
    """Calls one source. Messages never contain one of the secrets of its *api*."""

    api: ExternalApi
    session: aiohttp.ClientSession
    gate: RateLimiter

    @classmethod
    @asynccontextmanager
    async def open(
        cls, gate: RateLimiter, call: CallSection, headers: Mapping[str, str]
    ) -> "AsyncIterator[SourceClient]":
        """With connections of its own, closed at the end."""
        sent = {"Accept": "application/json", **headers}
        limits = (call.timeout, call.attempts, call.page_bytes)
        api = ExternalApi(gate.clock, *limits, sent, connections=call.at_once, wait=_wait)
        async with api.session() as session:
            yield cls(api, session, gate)

    async def ask(self, method: str, url: URL, read: Callable[[bytes], T], body: bytes | None = None) -> T:
        """What *read* makes of the answer; a SourceFailed of its own counts like any other."""
        around = partial(self._attempt, method, url)
        return await self.api.call(self.session, method, url, lambda found: read(found.body), body, around=around)

    @asynccontextmanager
    async def _attempt(self, method: str, url: URL) -> AsyncIterator[None]:
        """Around one attempt. The gate sees its failure as that of a source."""
        async with self.gate.request():
            try:
                yield
            except CallFailed as failed:
                raise self._meaning(failed, method, url) from failed
            except (msgspec.MsgspecError, RecursionError) as error:
                raise SourceFailed(
                    "SOURCE_INVALID_RESPONSE", f"{method} {redact_url(url)}: {self.api.make_excerpt(str(error))}"
                ) from error

    def _meaning(self, failed: CallFailed, method: str, url: URL) -> SourceFailed:
        """A failed attempt as a failure of the source."""
        failure, said, place = failed.failure, f"{method} {failed.message}", f"{method} {redact_url(url)}"
        is_pause = failed.status == HTTPStatus.SERVICE_UNAVAILABLE and failed.after is not None
        if is_pause or failure is ApiFailure.THROTTLED:
            return SourcePaused("SOURCE_THROTTLED", said, after=failed.after)
        if failure is ApiFailure.MOVED:
            return SourceRefused("SOURCE_REDIRECTED", f"{place} answered {failed.status}: give its new address as url")
        if failure is ApiFailure.TOO_LARGE:
            said = f"{place} answered with more than {self.api.limit} bytes: ask for fewer records, or raise page_bytes"
            return SourceRefused("SOURCE_TOO_LARGE", said)
        if not failed.is_retryable:
            return SourceRefused(UNAUTHORIZED if failure is ApiFailure.UNAUTHORIZED else "SOURCE_REFUSED", said)
        if failure is ApiFailure.TIMEOUT:
            limit = self.api.timeout.total_seconds()
            return SourceFailed("SOURCE_TIMEOUT", f"{place} did not answer within {limit:g} s")
        return SourceFailed("SOURCE_UNREACHABLE" if failure is ApiFailure.UNREACHABLE else "SOURCE_ERROR", said)


def _wait(error: Exception, attempt: int) -> timedelta | None:
    if not isinstance(error, SourceFailed) or isinstance(error, SourceRefused) or error.code in CLOSED:
        return None
    return timedelta(0) if isinstance(error, SourcePaused) else compute_delay(attempt)  # the gate waits for a pause


def instant(at: datetime) -> str:
    """ISO 8601 with every microsecond: a source asked in seconds would lose or double what changed in between."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
