"""Failed requests: retries, refusals, pauses, and error messages."""

from datetime import timedelta
from email.utils import format_datetime

import aiohttp
import pytest
from aiohttp import web

from penstock.harvest.model import ALWAYS, EVERYTHING, PagePosition, RecordPage
from penstock.harvest.sources.port import HarvestSource, SourceFailed, SourcePaused, SourceRefused
from penstock.kernel.db.database import Database
from tests.harvest.sources.conftest import OpenSource
from tests.harvest.sources.scripted_api import Responder, ScriptedApi, abort, no_response, pages, reply

VALID = pages(2)[0]


async def fetch_page(source: HarvestSource) -> RecordPage:
    return await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 30)


async def fetch_error(source: HarvestSource) -> SourceFailed:
    with pytest.raises(SourceFailed) as caught:
        await fetch_page(source)
    return caught.value


@pytest.mark.parametrize(
    "failure",
    [reply(status=500), reply(status=502), reply(status=503), reply(text="{"), abort],
    ids=range(5),
)
async def test_temporary_failure_is_retried(
    api: ScriptedApi, rest: OpenSource, failure: Responder, harvest_db: Database
) -> None:
    """H15: errors, aborted connections and invalid responses are retried; a success ends the count of failures."""
    api.respond(failure, failure, VALID)
    async with rest(call={"attempts": 3}) as source:
        assert len((await fetch_page(source)).records) == 2
    assert len(api.queries) == 3
    assert await harvest_db.fetchval("SELECT failures FROM harvest_feed") == 0


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (reply(status=500, text="internal error"), "SOURCE_ERROR"),
        (reply(text="{"), "SOURCE_INVALID_RESPONSE"),
        (abort, "SOURCE_UNREACHABLE"),
    ],
    ids=["error", "garbage", "cut"],
)
async def test_attempts_are_limited(
    api: ScriptedApi, rest: OpenSource, failure: Responder, code: str, harvest_db: Database
) -> None:
    """H15: after the last attempt the failure is raised; each attempt counts as a failure of the source."""
    api.respond(failure)
    async with rest(call={"attempts": 2}) as source:
        error = await fetch_error(source)
    assert error.code == code
    assert not isinstance(error, SourceRefused | SourcePaused)
    assert len(api.queries) == 2
    assert await harvest_db.fetchval("SELECT failures FROM harvest_feed") == 2


async def test_request_times_out(api: ScriptedApi, rest: OpenSource) -> None:
    """H15: a request without a response fails after `timeout`."""
    api.respond(no_response(api))
    async with rest(call={"attempts": 1, "timeout": 0.1}) as source:
        error = await fetch_error(source)
    assert error.code == "SOURCE_TIMEOUT"
    assert "0.1 s" in error.message


async def test_closed_port(api: ScriptedApi, rest: OpenSource) -> None:
    """H15: a refused connection is a failure of the source."""
    async with rest(url="http://127.0.0.1:1", call={"attempts": 1}) as source:
        assert (await fetch_error(source)).code == "SOURCE_UNREACHABLE"


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "SOURCE_REFUSED"), (404, "SOURCE_REFUSED"), (401, "SOURCE_UNAUTHORIZED"), (403, "SOURCE_UNAUTHORIZED")],
)
async def test_refusal_is_not_retried(api: ScriptedApi, rest: OpenSource, status: int, code: str) -> None:
    """H15: a rejected request is not retried; the error contains an excerpt of the response."""
    api.respond(reply(status=status, text="no such \0 field " + "x" * 1_000))
    async with rest() as source:
        error = await fetch_error(source)
    assert isinstance(error, SourceRefused)
    assert error.code == code
    assert f"answered with status {status}: no such" in error.message
    assert len(error.message) < 300
    assert "\0" not in error.message
    assert len(api.queries) == 1


async def test_too_large_response_is_not_read(api: ScriptedApi, rest: OpenSource) -> None:
    """H15: a response is read up to `page_bytes`."""
    written = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b" " * 65_536)
                written += 65_536
        except (ConnectionError, aiohttp.ClientConnectionError):
            return response

    api.respond(endless)
    async with rest(call={"page_bytes": 10_000}) as source:
        error = await fetch_error(source)
    assert isinstance(error, SourceRefused)
    assert error.code == "SOURCE_TOO_LARGE"
    assert len(api.queries) == 1
    assert written < 50_000_000  # the size of the buffers of the system


async def test_redirect_is_not_followed(api: ScriptedApi, rest: OpenSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """H15: a secret is sent only to the host in the configuration."""
    monkeypatch.setenv("TOKEN", "s3same")
    api.respond(reply(status=302, Location=f"{api.url.replace('127.0.0.1', 'localhost')}/elsewhere?key=s3same"), VALID)
    async with rest(secret_headers={"Authorization": "env:TOKEN"}) as source:
        error = await fetch_error(source)
    assert isinstance(error, SourceRefused)
    assert error.code == "SOURCE_REDIRECTED"
    assert len(api.queries) == 1


async def test_secret_is_sent_and_never_shown(
    api: ScriptedApi, rest: OpenSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H15: an error contains neither a secret that the response repeats nor the parameters of the request."""
    monkeypatch.setenv("TOKEN", "Bearer s3same")
    api.respond(reply(status=400, text="invalid token Bearer s3same"))
    async with rest(secret_headers={"Authorization": "env:TOKEN"}, params={"k": "hush"}) as source:
        error = await fetch_error(source)
    assert api.headers[0]["Authorization"] == "Bearer s3same"
    assert "invalid token ***" in error.message
    assert "s3same" not in str(error)
    assert "hush" not in str(error)


async def test_short_pause_is_awaited_and_a_long_one_is_raised(
    api: ScriptedApi, rest: OpenSource, harvest_db: Database
) -> None:
    """H15: a request waits for a short Retry-After, and fails with a pause for a long one."""
    api.respond(reply(status=429, Retry_After="0.1"), VALID)
    async with rest() as source:
        assert len((await fetch_page(source)).records) == 2
        api.respond(reply(status=429, Retry_After="60"), VALID)
        error = await fetch_error(source)
        assert isinstance(error, SourcePaused)
        assert error.after is not None
        assert timedelta(seconds=55) < error.after <= timedelta(seconds=60)
        assert isinstance(await fetch_error(source), SourcePaused)
    assert len(api.queries) == 3  # no request during a pause
    assert await harvest_db.fetchval("SELECT failures FROM harvest_feed") == 0


@pytest.mark.parametrize("status", [429, 503])
async def test_pause_until_a_date(api: ScriptedApi, rest: OpenSource, harvest_db: Database, status: int) -> None:
    """H15: Retry-After can be a date, for both statuses."""
    until = harvest_db.clock.now() + timedelta(minutes=1)
    api.respond(reply(status=status, Retry_After=format_datetime(until, usegmt=True)))
    async with rest() as source:
        error = await fetch_error(source)
    assert isinstance(error, SourcePaused)
    paused_until = await harvest_db.fetchval("SELECT paused_until FROM harvest_feed")
    assert abs(paused_until - until) < timedelta(seconds=2)


async def test_failures_open_the_circuit_breaker(api: ScriptedApi, rest: OpenSource) -> None:
    """H15: while the circuit breaker is open no request is sent, and the error contains the last failure."""
    api.respond(reply(status=500, text="out of paper"))
    async with rest(call={"attempts": 10, "break_after": 2, "break_for": 60}) as source:
        error = await fetch_error(source)
    assert error.code == "SOURCE_CIRCUIT_OPEN"
    assert not isinstance(error, SourcePaused)
    assert "out of paper" in error.message
    assert error.after is not None
    assert len(api.queries) == 2
