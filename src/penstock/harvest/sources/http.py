"""H15: requests to a source. Each attempt passes the rate limiter of the feed, and fails as a `SourceFailed`."""

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
from penstock.harvest.sources.port import INVALID_RESPONSE, SourceFailed, SourcePaused, SourceRefused
from penstock.harvest.sources.rate_limiter import CLOSED, RateLimiter
from penstock.kernel.http.external_api import ApiFailure, ApiResponse, CallFailed, ExternalApi, redact_url
from penstock.kernel.tasks.backoff import compute_delay
from penstock.kernel.text import make_storable

T = TypeVar("T")
UNAUTHORIZED = "SOURCE_UNAUTHORIZED"
_MESSAGE_LENGTH = 500


@dataclass(frozen=True, slots=True)
class SourceClient:
    """A client of one source. Messages never contain one of the secrets of its *api*."""

    api: ExternalApi
    session: aiohttp.ClientSession
    limiter: RateLimiter

    @classmethod
    @asynccontextmanager
    async def open(
        cls, limiter: RateLimiter, call: CallSection, headers: Mapping[str, str]
    ) -> "AsyncIterator[SourceClient]":
        """Open a client with separate connections."""
        all_headers = {"Accept": "application/json", **headers}
        limits = (call.timeout, call.attempts, call.page_bytes)
        api = ExternalApi(limiter.clock, *limits, all_headers, connections=call.concurrency, wait=_choose_delay)
        async with api.open_session() as session:
            yield cls(api, session, limiter)

    async def request(self, method: str, url: URL, read: Callable[[bytes], T], body: bytes | None = None) -> T:
        """Send a request, and return the result of *read*, which may raise SourceFailed for an invalid response."""
        around = partial(self._attempt, method, url)

        def read_response(response: ApiResponse) -> T:
            try:
                return read(response.body)
            except SourceFailed as failed:
                if failed.code != INVALID_RESPONSE:
                    raise
                message = make_storable(self.api.mask_secrets(failed.message), _MESSAGE_LENGTH)
                raise SourceFailed(INVALID_RESPONSE, f"{method} {redact_url(url)}: {message}") from failed

        return await self.api.call(self.session, method, url, read_response, body, around=around)

    @asynccontextmanager
    async def _attempt(self, method: str, url: URL) -> AsyncIterator[None]:
        """Wrap one attempt. The rate limiter receives its failure as a SourceFailed."""
        async with self.limiter.limit_request():
            try:
                yield
            except CallFailed as failed:
                raise self._convert_failure(failed, method, url) from failed
            except (msgspec.MsgspecError, RecursionError) as error:
                raise SourceFailed(
                    INVALID_RESPONSE, f"{method} {redact_url(url)}: {self.api.make_excerpt(str(error))}"
                ) from error

    def _convert_failure(self, failed: CallFailed, method: str, url: URL) -> SourceFailed:
        """Return a failed attempt as a failure of the source."""
        failure, message, target = failed.failure, f"{method} {failed.message}", f"{method} {redact_url(url)}"
        is_pause = failed.status == HTTPStatus.SERVICE_UNAVAILABLE and failed.after is not None
        if is_pause or failure is ApiFailure.THROTTLED:
            return SourcePaused("SOURCE_THROTTLED", message, after=failed.after)
        if failure is ApiFailure.MOVED:
            message = f"{target} answered with status {failed.status}, a redirect: set source.url to the new address"
            return SourceRefused("SOURCE_REDIRECTED", message)
        if failure is ApiFailure.TOO_LARGE:
            message = f"{target} sent more than {self.api.limit} bytes: decrease page_size, or increase call.page_bytes"
            return SourceRefused("SOURCE_TOO_LARGE", message)
        if not failed.is_retryable:
            return SourceRefused(UNAUTHORIZED if failure is ApiFailure.UNAUTHORIZED else "SOURCE_REFUSED", message)
        if failure is ApiFailure.TIMEOUT:
            limit = self.api.timeout.total_seconds()
            return SourceFailed("SOURCE_TIMEOUT", f"{target} did not respond within {limit:g} s")
        return SourceFailed("SOURCE_UNREACHABLE" if failure is ApiFailure.UNREACHABLE else "SOURCE_ERROR", message)


def _choose_delay(error: Exception, attempt: int) -> timedelta | None:
    if not isinstance(error, SourceFailed) or isinstance(error, SourceRefused) or error.code in CLOSED:
        return None
    return (
        timedelta(0) if isinstance(error, SourcePaused) else compute_delay(attempt)
    )  # the rate limiter waits for a pause


def format_time(at: datetime) -> str:
    """Return a time in ISO 8601 with microseconds: with whole seconds, runs would lose or repeat changes."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
