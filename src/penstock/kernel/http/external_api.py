"""Calls to external APIs: limited in time and size, retried if a retry can help, with named failures."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from enum import StrEnum
from http import HTTPStatus
from itertools import count
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from penstock import __version__
from penstock.kernel.clock import Clock
from penstock.kernel.http.connection_error import describe_connection_error
from penstock.kernel.http.retry_after import parse_retry_after
from penstock.kernel.tasks.backoff import Sleep, compute_delay
from penstock.kernel.text import SecretMask, make_storable

LONGEST_PAUSE = timedelta(seconds=60)  # a longer Retry-After ends the call
_EXCERPT_LENGTH = 200  # characters of a response in a message

T = TypeVar("T")
AttemptContext = Callable[[], AbstractAsyncContextManager[object]]
RetryWait = Callable[[Exception, int], timedelta | None]


class ApiFailure(StrEnum):
    """The reason why a call failed."""

    TIMEOUT = "TIMEOUT"
    UNREACHABLE = "UNREACHABLE"
    THROTTLED = "THROTTLED"
    ERROR = "ERROR"  # an internal error of the API
    UNAUTHORIZED = "UNAUTHORIZED"
    MOVED = "MOVED"
    REFUSED = "REFUSED"
    TOO_LARGE = "TOO_LARGE"
    BAD_ANSWER = "BAD_ANSWER"


_FINAL = frozenset({ApiFailure.UNAUTHORIZED, ApiFailure.MOVED, ApiFailure.REFUSED, ApiFailure.TOO_LARGE})


class CallFailed(Exception):
    """A call failed. *status* (0 without a response) and *after*, its Retry-After, are from the response."""

    def __init__(self, failure: ApiFailure, message: str, status: int = 0, after: timedelta | None = None) -> None:
        super().__init__(message)
        self.failure, self.message, self.status, self.after = failure, message, status, after
        self.attempts = 1

    @property
    def is_retryable(self) -> bool:
        """Return whether another attempt can succeed."""
        return self.failure not in _FINAL


class BodyTooLarge(Exception):
    """The body of a response is longer than its limit."""


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """A response with its whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content_type(self) -> str:
        """Return the media type without its parameters, in lower case."""
        return self.headers.get("Content-Type", "application/octet-stream").partition(";")[0].strip().lower()


async def send_request(
    session: aiohttp.ClientSession, method: str, url: URL, *, timeout: float, limit: int, **options: Any
) -> ApiResponse:
    """Send one request and read the response of any status; BodyTooLarge if its body has more than *limit* bytes."""
    total = aiohttp.ClientTimeout(total=timeout)
    # Redirects are not followed: the secrets in a request are for the configured host.
    async with session.request(method, url, timeout=total, allow_redirects=False, **options) as response:
        chunks, size = [], 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > limit:
                raise BodyTooLarge
            chunks.append(chunk)
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    return ApiResponse(response.status, response.headers, body)


def redact_url(url: URL) -> str:
    """Return *url* without the parts that can be secret: user, query and fragment."""
    return str(url.with_user(None).with_query(None).with_fragment(None)) if url.absolute else url.raw_path


def compute_retry_wait(error: Exception, attempt: int) -> timedelta | None:
    """Return the time until the next attempt, at least the Retry-After of the API; None to give up."""
    if not isinstance(error, CallFailed) or not error.is_retryable:
        return None
    wait = max(compute_delay(attempt), error.after or timedelta(0))
    return wait if wait <= LONGEST_PAUSE else None


@dataclass(slots=True)
class ExternalApi:
    """An external API and the limits of a call. Messages never contain the *token* or one of the *secrets*.

    *wait* returns the time between the failed attempt of that number and the next attempt, or None to give up.
    """

    clock: Clock
    timeout: timedelta
    attempts: int
    limit: int  # bytes of a response
    headers: Mapping[str, str]
    _: KW_ONLY
    token: str | None = None
    secrets: set[str] = field(default_factory=set)
    connections: int = 100
    wait: RetryWait = compute_retry_wait
    pause: Sleep = asyncio.sleep

    def open_session(self) -> aiohttp.ClientSession:
        """Return a session for calls, which the caller closes."""
        bearer = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self.connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": f"penstock/{__version__}", **bearer, **self.headers},
        )

    async def call(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: URL,
        read: Callable[[ApiResponse], T],
        data: bytes | None = None,
        *,
        around: AttemptContext = nullcontext,
    ) -> T:
        """Return the result of *read* for a 2xx response; an error of *read* fails the attempt like any other.

        Each attempt runs inside *around*, which may replace the error.
        """
        for attempt in count(1):
            try:
                async with around():
                    return read(await self._attempt(session, method, url, data))
            except Exception as error:
                if isinstance(error, CallFailed):
                    error.attempts = attempt
                wait = self.wait(error, attempt) if attempt < self.attempts else None
                if wait is None:
                    raise
            if wait:
                await self.pause(wait.total_seconds())
        raise AssertionError("unreachable")

    async def _attempt(self, session: aiohttp.ClientSession, method: str, url: URL, data: bytes | None) -> ApiResponse:
        timeout = self.timeout.total_seconds()
        try:
            response = await send_request(session, method, url, timeout=timeout, limit=self.limit, data=data)
        except TimeoutError as error:
            raise CallFailed(ApiFailure.TIMEOUT, f"{redact_url(url)} did not answer within {timeout:g} s") from error
        except BodyTooLarge as error:
            raise CallFailed(
                ApiFailure.TOO_LARGE, f"{redact_url(url)} answered with more than {self.limit} bytes"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # The text of some errors of aiohttp contains the whole URL.
            excerpt = self.make_excerpt(_describe_failure(error))
            raise CallFailed(ApiFailure.UNREACHABLE, f"{redact_url(url)}: {excerpt}") from error
        if HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
            return response
        excerpt = self.make_excerpt(response.body.decode(errors="replace"))
        message = f"{redact_url(url)} answered with status {response.status}: {excerpt}"
        after = parse_retry_after(response.headers.get("Retry-After"), self.clock.now())
        raise CallFailed(_classify(response.status), message.rstrip(": "), response.status, after)

    def mask_secrets(self, text: str) -> str:
        """Return *text* without the secrets of the API."""
        return SecretMask([*self.secrets, self.token or ""]).mask_text(text)

    def make_excerpt(self, text: str) -> str:
        """Return *text* of the API as a message may contain it: without secrets, on one line, short."""
        return make_storable(" ".join(self.mask_secrets(text).split()), _EXCERPT_LENGTH)


def _describe_failure(error: Exception) -> str:
    text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return describe_connection_error(error) or f"{type(error).__name__}: {text}"


def _classify(status: int) -> ApiFailure:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return ApiFailure.THROTTLED
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.REQUEST_TIMEOUT:
        return ApiFailure.ERROR
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return ApiFailure.UNAUTHORIZED
    return ApiFailure.MOVED if status < HTTPStatus.BAD_REQUEST else ApiFailure.REFUSED
