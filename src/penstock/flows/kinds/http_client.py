"""One POST to somebody else's API: bounded in time and size, tried again when that may help, its failure named."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import orjson
from yarl import URL

from penstock import __version__
from penstock.flows.kinds.http import Hiding
from penstock.flows.step import Pause
from penstock.kernel.clock import Clock
from penstock.kernel.http.retry_after import retry_after
from penstock.kernel.tasks.backoff import delay
from penstock.kernel.text import storable

LONGEST_PAUSE = timedelta(seconds=60)  # asked for by a Retry-After; whoever asks for more is not asked again
_SAID = 200  # characters of an answer that are told

T = TypeVar("T")


class Trouble(StrEnum):
    """What can go wrong with a call."""

    TIMEOUT = "TIMEOUT"
    UNREACHABLE = "UNREACHABLE"
    THROTTLED = "THROTTLED"
    ERROR = "ERROR"  # the API's own
    UNAUTHORIZED = "UNAUTHORIZED"
    REFUSED = "REFUSED"
    TOO_LARGE = "TOO_LARGE"
    BAD_ANSWER = "BAD_ANSWER"


_FINAL = frozenset({Trouble.UNAUTHORIZED, Trouble.REFUSED, Trouble.TOO_LARGE})


class CallFailed(Exception):
    """A call came to nothing; *after* is how long the API asked to be left alone."""

    def __init__(self, trouble: Trouble, message: str, after: timedelta | None = None) -> None:
        super().__init__(message)
        self.trouble, self.message, self.after = trouble, message, after
        self.attempts = 1

    @property
    def is_retryable(self) -> bool:
        """Whether asking again later may help."""
        return self.trouble not in _FINAL


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer of the 200s."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Api:
    """Somebody else's API, and how it is asked. What is told of its failures never holds the *token*."""

    url: str
    token: str | None
    timeout: timedelta
    attempts: int
    limit: int  # bytes of an answer
    accept: str
    clock: Clock
    pause: Pause

    def session(self) -> aiohttp.ClientSession:
        """Connections of its own, to be closed at the end."""
        headers = {"Accept": self.accept, "Content-Type": "application/json", "User-Agent": f"penstock/{__version__}"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        timeout = aiohttp.ClientTimeout(total=self.timeout.total_seconds())
        return aiohttp.ClientSession(headers=headers, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())

    async def post(self, session: aiohttp.ClientSession, body: object, read: Callable[[Answered], T]) -> T:
        """What *read* makes of the answer; a CallFailed of its own counts like any other."""
        data = orjson.dumps(body)
        for attempt in range(1, self.attempts + 1):
            try:
                return read(await self._try(session, data))
            except CallFailed as failed:
                failed.attempts = attempt
                wait = max(delay(attempt), failed.after or timedelta(0))
                if attempt == self.attempts or not failed.is_retryable or wait > LONGEST_PAUSE:
                    raise
            await self.pause(wait.total_seconds())
        raise AssertionError("unreachable")

    async def _try(self, session: aiohttp.ClientSession, data: bytes) -> Answered:
        try:
            # Redirects are not followed: the token is meant for the host in the configuration.
            async with session.post(self.url, data=data, allow_redirects=False) as response:
                body = await self._bounded(response)
        except TimeoutError as error:
            waited = f"{self.timeout.total_seconds():g} s"
            raise CallFailed(Trouble.TIMEOUT, f"{self._place} did not answer within {waited}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            said = self._said(f"{type(error).__name__}: {error}")
            raise CallFailed(Trouble.UNREACHABLE, f"{self._place}: {said}") from error
        if not HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
            raise self._complaint(response, body)
        return Answered(response.status, response.content_type.lower(), body)

    async def _bounded(self, response: aiohttp.ClientResponse) -> bytes:
        """The answer; one that is too long is not read to its end."""
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > self.limit:
                raise CallFailed(Trouble.TOO_LARGE, f"{self._place} answered with more than {self.limit} bytes")
        return bytes(body)

    def _complaint(self, response: aiohttp.ClientResponse, body: bytes) -> CallFailed:
        status = response.status
        said = f"{self._place} answered {status}: {self._said(body.decode(errors='replace'))}".rstrip(": ")
        after = retry_after(response.headers.get("Retry-After"), self.clock.now())
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            return CallFailed(Trouble.THROTTLED, said, after)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.REQUEST_TIMEOUT:
            return CallFailed(Trouble.ERROR, said, after)
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return CallFailed(Trouble.UNAUTHORIZED, said)
        return CallFailed(Trouble.REFUSED, said)

    @property
    def _place(self) -> str:
        return str(URL(self.url).with_query(None).with_user(None))  # what is in a query may be secret

    def hidden(self, text: str) -> str:
        """*text* without the token, should the API repeat it."""
        return Hiding([self.token]).text(text) if self.token else text

    def _said(self, text: str) -> str:
        return storable(" ".join(self.hidden(text).split()), _SAID)
