"""H15: one request to a source: bounded in time and size, tried again when that may help, its failures named."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import count
from typing import NoReturn, TypeVar

import aiohttp
import msgspec
from yarl import URL

from penstock import __version__
from penstock.harvest.config import CallSection
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.harvest.sources.rate_limiter import CLOSED, Gate
from penstock.kernel.http.retry_after import retry_after
from penstock.kernel.tasks.backoff import delay
from penstock.kernel.text import storable

T = TypeVar("T")
UNAUTHORIZED = "SOURCE_UNAUTHORIZED"
_SAID = 200  # characters of an answer that are told
_HIDDEN = "***"


class Caller:
    """Calls one source. What it says of failures never holds one of its *secrets*."""

    def __init__(self, session: aiohttp.ClientSession, gate: Gate, call: CallSection) -> None:
        self.secrets: set[str] = set()
        self._session = session
        self._gate = gate
        self._call = call

    @classmethod
    @asynccontextmanager
    async def open(cls, gate: Gate, call: CallSection, headers: Mapping[str, str]) -> "AsyncIterator[Caller]":
        """With connections of its own, closed at the end."""
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=call.at_once),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "application/json", "User-Agent": f"penstock/{__version__}", **headers},
            timeout=aiohttp.ClientTimeout(total=call.timeout.total_seconds()),
        )
        async with session:
            yield cls(session, gate, call)

    async def ask(self, method: str, url: URL, read: Callable[[bytes], T], body: bytes | None = None) -> T:
        """What *read* makes of the answer; a SourceFailed of its own counts like any other."""
        for attempt in count(1):
            try:
                async with self._gate.request():
                    return await self._try(method, url, read, body)
            except SourceRefused:
                raise
            except SourceFailed as failed:
                if attempt >= self._call.attempts or failed.code in CLOSED:
                    raise
                if not isinstance(failed, SourcePaused):  # a pause is waited for by the gate
                    await asyncio.sleep(delay(attempt).total_seconds())
        raise AssertionError("unreachable")

    async def _try(self, method: str, url: URL, read: Callable[[bytes], T], body: bytes | None) -> T:
        try:
            async with self._session.request(method, url, data=body, allow_redirects=False) as response:
                answer = await self._bounded(response)
                if not HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
                    self._complain(response, answer)
            return read(answer)
        except TimeoutError as error:
            waited = f"{self._call.timeout.total_seconds():g} s"
            raise SourceFailed("SOURCE_TIMEOUT", f"{_place(method, url)} did not answer within {waited}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise SourceFailed("SOURCE_UNREACHABLE", f"{_place(method, url)}: {self.said(_reason(error))}") from error
        except (msgspec.MsgspecError, RecursionError) as error:
            raise SourceFailed("SOURCE_GARBAGE", f"{_place(method, url)}: {self.said(str(error))}") from error

    async def _bounded(self, response: aiohttp.ClientResponse) -> bytes:
        """The answer; one that is too long is not read to its end."""
        most = self._call.page_bytes
        chunks, size = [], 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > most:
                hint = "ask for fewer records, or raise page_bytes"
                place = _place(response.method, response.url)
                raise SourceRefused("SOURCE_TOO_LARGE", f"{place} answered with more than {most} bytes: {hint}")
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _complain(self, response: aiohttp.ClientResponse, answer: bytes) -> NoReturn:
        status, place = response.status, _place(response.method, response.url)
        said = f"{place} answered {status}: {self.said(answer.decode(errors='replace'))}"
        asked = retry_after(response.headers.get("Retry-After"), self._gate.clock.now())
        if status == HTTPStatus.TOO_MANY_REQUESTS or (status == HTTPStatus.SERVICE_UNAVAILABLE and asked is not None):
            raise SourcePaused("SOURCE_THROTTLED", said, after=asked)
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise SourceRefused(UNAUTHORIZED, said)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.REQUEST_TIMEOUT:
            raise SourceFailed("SOURCE_ERROR", said)
        if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            # Not followed: what is secret in a request is meant for the host in the configuration.
            raise SourceRefused("SOURCE_MOVED", f"{place} answered {status}: give its new address as url")
        raise SourceRefused("SOURCE_REFUSED", said)

    def said(self, text: str) -> str:
        """What the source said, as it may be told."""
        for secret in self.secrets:
            text = text.replace(secret, _HIDDEN)
        return storable(" ".join(text.split()), _SAID)


def instant(at: datetime) -> str:
    """ISO 8601 with every microsecond: a source asked in seconds would lose or double what changed in between."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _place(method: str, url: URL) -> str:
    return f"{method} {url.with_query(None)}"  # what is in a query may be secret


def _reason(error: Exception) -> str:
    # Some of aiohttp's errors repeat the whole address.
    text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return f"{type(error).__name__}: {text}"
