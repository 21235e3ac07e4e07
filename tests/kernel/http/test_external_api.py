"""Calls to external APIs: limits, retries, named failures, and messages without secrets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from penstock import __version__
from penstock.kernel.clock import ManualClock
from penstock.kernel.http.external_api import (
    ApiFailure,
    ApiResponse,
    BodyTooLarge,
    CallFailed,
    ExternalApi,
    redact_url,
    send_request,
)

NOW = datetime(2026, 1, 5, tzinfo=UTC)
TOKEN = 'pass"wörd-0123'
Reply = Callable[[], web.StreamResponse]


class ExternalServer:
    """Gives its replies in turn, the last one forever, and keeps each request."""

    def __init__(self) -> None:
        self.url = URL()
        self.replies: list[Reply] = [web.Response]
        self.requests: list[tuple[web.BaseRequest, bytes]] = []
        self.written = 0
        self.pauses: list[float] = []
        self.ending = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request, await request.read()))
        if request.path == "/silent":
            await self.ending.wait()
        if request.path == "/endless":
            return await self._endless(request)
        return (self.replies.pop(0) if len(self.replies) > 1 else self.replies[0])()

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(65_536))
                self.written += 65_536
        except (ConnectionError, aiohttp.ClientConnectionError):
            return response

    async def pause(self, seconds: float) -> None:
        """Keep the time that a call would sleep."""
        self.pauses.append(seconds)

    def api(self, **options: Any) -> ExternalApi:
        given = {"timeout": timedelta(seconds=10), "attempts": 3, "limit": 1_000, "headers": {}, **options}
        return ExternalApi(ManualClock(NOW), pause=self.pause, **given)

    async def call(
        self, path: str = "/", read: Callable[[ApiResponse], Any] = lambda answered: answered.body, **options: Any
    ) -> Any:
        around = {"around": options.pop("around")} if "around" in options else {}
        api = self.api(**options)
        async with api.open_session() as session:
            return await api.call(session, "POST", self.url.join(URL(path)), read, b"{}", **around)

    async def failure(self, path: str = "/", **options: Any) -> CallFailed:
        with pytest.raises(CallFailed) as caught:
            await self.call(path, **options)
        return caught.value


@pytest.fixture
async def server() -> AsyncIterator[ExternalServer]:
    server, app = ExternalServer(), web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as running:
        server.url = running.make_url("/")
        yield server
        server.ending.set()


def says(text: str = "", status: int = 200, **headers: str) -> Reply:
    """This answer; underscores in names of headers stand for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda: web.Response(text=text, status=status, headers=named)


async def test_a_request_carries_the_token_and_the_headers(server: ExternalServer) -> None:
    """The token is a Bearer token, the program and its version are named, and the body arrives as given."""
    server.replies = [says("fine")]
    assert await server.call(headers={"Accept": "image/png"}, token="t0ken") == b"fine"
    [(request, body)] = server.requests
    assert (request.method, body) == ("POST", b"{}")
    assert (request.headers["Authorization"], request.headers["Accept"]) == ("Bearer t0ken", "image/png")
    assert request.headers["User-Agent"] == f"penstock/{__version__}"


async def test_cookies_are_not_kept(server: ExternalServer) -> None:
    """The second request of a session has no cookie of the first answer."""
    server.url = server.url.with_host("localhost")  # a jar of aiohttp takes no cookies of an address
    server.replies = [says(status=500, Set_Cookie="session=1"), says()]
    await server.call()
    assert [request.headers.get("Cookie") for request, _ in server.requests] == [None, None]


async def test_reading_stops_at_the_limit(server: ExternalServer) -> None:
    """A body of exactly the limit is read; an endless one ends the call at once, and the connection with it."""
    server.replies = [says("x" * 1_000)]
    assert len(await server.call()) == 1_000
    failed = await server.failure("/endless")
    assert (failed.failure, failed.is_retryable, failed.attempts) == (ApiFailure.TOO_LARGE, False, 1)
    assert failed.message == f"{server.url}endless answered with more than 1000 bytes"
    assert server.written < 50_000_000  # the buffers of the system


async def test_the_body_of_an_error_has_the_same_limit(server: ExternalServer) -> None:
    """A long error page is not read either."""
    server.replies = [says("x" * 1_001, status=500)]
    assert (await server.failure()).failure is ApiFailure.TOO_LARGE


async def test_one_exchange_returns_any_status(server: ExternalServer) -> None:
    """A redirect is an answer like any other; only the size of the body is an error."""
    server.replies = [says("gone", status=302, Location="/elsewhere", Content_Type="text/HTML; charset=utf-8")]
    async with aiohttp.ClientSession() as session:
        answered = await send_request(session, "GET", server.url, timeout=10, limit=4)
        with pytest.raises(BodyTooLarge):
            await send_request(session, "GET", server.url, timeout=10, limit=3)
    assert (answered.status, answered.content_type, answered.body) == (302, "text/html", b"gone")
    assert answered.headers["location"] == "/elsewhere"


@pytest.mark.parametrize("value", ["Application/JSON; charset*", "application/json;;", " application/json ; a=b"])
async def test_parameters_of_a_content_type_are_not_parsed(server: ExternalServer, value: str) -> None:
    """H15: an answer with malformed parameters is an answer."""
    server.replies = [lambda: web.Response(body=b"{}", headers={"Content-Type": value})]
    assert await server.call(read=lambda answered: (answered.content_type, answered.body)) == (
        "application/json",
        b"{}",
    )


async def test_a_redirect_is_not_followed(server: ExternalServer) -> None:
    """The secrets of a request are for one host."""
    server.replies = [says(status=307, Location="/elsewhere")]
    failed = await server.failure()
    assert (failed.failure, failed.status, failed.is_retryable) == (ApiFailure.MOVED, 307, False)
    assert [request.path for request, _ in server.requests] == ["/"]


async def test_a_silent_api_times_out(server: ExternalServer) -> None:
    """An attempt without an answer ends at the timeout, and the message says so."""
    failed = await server.failure("/silent", timeout=timedelta(seconds=0.1), attempts=2)
    assert (failed.failure, failed.attempts) == (ApiFailure.TIMEOUT, 2)
    assert failed.message == f"{server.url}silent did not answer within 0.1 s"


async def test_each_attempt_has_the_whole_timeout(server: ExternalServer) -> None:
    """The timeout that one attempt has used up is there again for the next one."""

    @asynccontextmanager
    async def answered_the_second_time() -> AsyncIterator[None]:
        if server.pauses:
            server.ending.set()
        yield

    assert await server.call("/silent", timeout=timedelta(seconds=1), around=answered_the_second_time) == b""
    assert len(server.pauses) == 1


async def test_a_closed_port_is_unreachable(server: ExternalServer) -> None:
    """No connection is a failure that is retried."""
    failed = await server.failure("http://127.0.0.1:1/")
    assert (failed.failure, failed.attempts, failed.status) == (ApiFailure.UNREACHABLE, 3, 0)


@pytest.mark.parametrize("value", ["t0ken-0123\r\nX: y", "t0ken-0123\n"])
async def test_a_token_that_no_header_can_carry(server: ExternalServer, value: str) -> None:
    """The failure is named, and does not tell the token."""
    failed = await server.failure(token=value)
    assert failed.failure is ApiFailure.UNREACHABLE
    assert "t0ken" not in failed.message
    assert server.requests == []


@pytest.mark.parametrize(
    ("status", "failure", "attempts"),
    [
        (500, ApiFailure.ERROR, 3),
        (503, ApiFailure.ERROR, 3),
        (408, ApiFailure.ERROR, 3),
        (429, ApiFailure.THROTTLED, 3),
        (401, ApiFailure.UNAUTHORIZED, 1),
        (403, ApiFailure.UNAUTHORIZED, 1),
        (304, ApiFailure.MOVED, 1),
        (400, ApiFailure.REFUSED, 1),
        (404, ApiFailure.REFUSED, 1),
    ],
)
async def test_a_status_names_its_failure(
    server: ExternalServer, status: int, failure: ApiFailure, attempts: int
) -> None:
    """Failures that can pass are retried up to `attempts`, the others are not."""
    server.replies = [says(status=status)]
    failed = await server.failure()
    assert (failed.failure, failed.status, failed.attempts) == (failure, status, attempts)
    assert len(server.requests) == attempts
    assert failed.is_retryable is (attempts > 1)
    assert failed.message == f"{server.url} answered with status {status}"


async def test_attempts_end_with_the_first_success(server: ExternalServer) -> None:
    """The pause grows from attempt to attempt."""
    server.replies = [says(status=500), says(status=502), says("fine")]
    assert await server.call() == b"fine"
    first, second = server.pauses
    assert 0.05 <= first <= 0.1 <= second <= 0.2


async def test_a_bad_answer_is_retried(server: ExternalServer) -> None:
    """A CallFailed of the reader counts; another error of the reader ends the call unchanged."""

    def picky(answered: ApiResponse) -> bytes:
        if answered.body == b"bad":
            raise CallFailed(ApiFailure.BAD_ANSWER, "no picture")
        return bytes([answered.body[0]])

    server.replies = [says("bad"), says("good")]
    assert await server.call(read=picky) == b"g"
    server.replies = [says("bad")]
    failed = await server.failure(read=picky)
    assert (failed.failure, failed.attempts, failed.message) == (ApiFailure.BAD_ANSWER, 3, "no picture")
    asked, server.replies = len(server.requests), [says()]
    with pytest.raises(IndexError):
        await server.call(read=picky)
    assert len(server.requests) == asked + 1


@pytest.mark.parametrize("header", ["30", format_datetime(NOW + timedelta(seconds=30), usegmt=True)])
@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_waited_for(server: ExternalServer, header: str, status: int) -> None:
    """In seconds or as a date, with either status."""
    server.replies = [says(status=status, Retry_After=header), says("fine")]
    assert await server.call() == b"fine"
    assert server.pauses == [30]


async def test_a_long_retry_after_ends_the_call(server: ExternalServer) -> None:
    """A minute is the longest pause; the failure has the time that the API asks for."""
    server.replies = [says(status=429, Retry_After="60"), says(status=429, Retry_After="61")]
    failed = await server.failure()
    assert (failed.attempts, failed.after, failed.is_retryable) == (2, timedelta(seconds=61), True)
    assert server.pauses == [60]


async def test_each_attempt_runs_inside_its_hook(server: ExternalServer) -> None:
    """The hook sees the failure and may replace it; `wait` decides on the replacement, and zero is no pause."""
    seen: list[object] = []

    @asynccontextmanager
    async def around() -> AsyncIterator[None]:
        try:
            yield
            seen.append("fine")
        except CallFailed as failed:
            seen.append(failed.failure)
            raise LookupError(failed.status) from failed

    def wait(error: Exception, attempt: int) -> timedelta | None:
        seen.append((repr(error), attempt))
        return None if error.args == (404,) else timedelta(0)

    server.replies = [says(status=500), says("fine")]
    assert await server.call(around=around, wait=wait) == b"fine"
    assert seen == [ApiFailure.ERROR, ("LookupError(500)", 1), "fine"]
    server.replies = [says(status=404)]
    with pytest.raises(LookupError):
        await server.call(around=around, wait=wait)
    assert (len(server.requests), server.pauses) == (3, [])


@pytest.mark.parametrize(
    "text",
    ["what is {}?", 'what is "{}"?', "\N{ZERO WIDTH SPACE}{}{}", "x" * 195 + "{}"],
)
@pytest.mark.parametrize("spelt", [TOKEN, 'pass\\"wörd-0123', 'pass\\"w\\u00f6rd-0123'], ids=["plain", "json", "ascii"])
async def test_a_message_has_no_secret(server: ExternalServer, text: str, spelt: str) -> None:
    """As it is and as JSON spells it, in the body of an error, also where the message is cut."""
    server.replies = [says(text.format(spelt, spelt), status=400)]
    failed = await server.failure(secrets={TOKEN, ""})
    assert "***" in failed.message
    assert "0123" not in failed.message
    server.replies = [says(text.format("t0ken", "t0ken"), status=400)]
    assert "t0k" not in (await server.failure(token="t0ken")).message


async def test_a_message_is_one_short_line(server: ExternalServer) -> None:
    """Without what no store can keep, and without the query and the user of the URL."""
    server.replies = [says("no\n such \0 field " + "x" * 500, status=400)]
    url = server.url.with_user("me").with_password("hush")
    failed = await server.failure(f"{url}list?key=hidden#part")
    assert failed.message.startswith(
        f"{server.url}list answered with status 400: no such \N{REPLACEMENT CHARACTER} field xxx"
    )
    assert len(failed.message) <= len(f"{server.url}list answered with status 400: ") + 200


def test_a_bare_url_has_no_secret_part() -> None:
    """Only scheme, host, port and path; of a relative URL, the path."""
    assert redact_url(URL("https://me:hush@host:81/a%20b?key=1#x")) == "https://host:81/a%20b"
    assert redact_url(URL("a/b?key=1")) == "a/b"
