"""Requests that fail: which are tried again, which are not, and what is said of them."""

from datetime import timedelta
from email.utils import format_datetime

import aiohttp
import pytest
from aiohttp import web

from penstock.harvest.model import ALWAYS, EVERYTHING, PagePosition, RecordPage
from penstock.harvest.sources.port import HarvestSource, SourceFailed, SourcePaused, SourceRefused
from penstock.kernel.db.database import Database
from tests.harvest.sources.conftest import Opened
from tests.harvest.sources.scripted_api import Answer, ScriptedApi, cuts, never, pages, says

FINE = pages(2)[0]


async def fetched(source: HarvestSource) -> RecordPage:
    return await source.fetch(EVERYTHING, ALWAYS, PagePosition(), 30)


async def failed(source: HarvestSource) -> SourceFailed:
    with pytest.raises(SourceFailed) as caught:
        await fetched(source)
    return caught.value


@pytest.mark.parametrize(
    "trouble", [says(status=500), says(status=502), says(status=503), says(text="{"), cuts], ids=range(5)
)
async def test_a_failure_of_the_moment_is_tried_again(
    api: ScriptedApi, rest: Opened, trouble: Answer, harvest_db: Database
) -> None:
    """H15: errors, cut connections and broken answers cost a try; the answer after them ends the failures."""
    api.will(trouble, trouble, FINE)
    async with rest(call={"attempts": 3}) as source:
        assert len((await fetched(source)).records) == 2
    assert len(api.asked) == 3
    assert await harvest_db.fetchval("SELECT failures FROM harvest_feed") == 0


@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        (says(status=500, text="no luck"), "SOURCE_ERROR"),
        (says(text="{"), "SOURCE_INVALID_RESPONSE"),
        (cuts, "SOURCE_UNREACHABLE"),
    ],
    ids=["error", "garbage", "cut"],
)
async def test_tries_come_to_an_end(
    api: ScriptedApi, rest: Opened, trouble: Answer, code: str, harvest_db: Database
) -> None:
    """H15: after so many tries the failure is told; every one of them counted against the source."""
    api.will(trouble)
    async with rest(call={"attempts": 2}) as source:
        error = await failed(source)
    assert error.code == code
    assert not isinstance(error, SourceRefused | SourcePaused)
    assert len(api.asked) == 2
    assert await harvest_db.fetchval("SELECT failures FROM harvest_feed") == 2


async def test_silence_times_out(api: ScriptedApi, rest: Opened) -> None:
    """H15: a source that never answers is waited for no longer than `timeout`."""
    api.will(never(api))
    async with rest(call={"attempts": 1, "timeout": 0.1}) as source:
        error = await failed(source)
    assert error.code == "SOURCE_TIMEOUT"
    assert "0.1 s" in error.message


async def test_nobody_there(api: ScriptedApi, rest: Opened) -> None:
    """H15: a closed port is a failure like any other."""
    async with rest(url="http://127.0.0.1:1", call={"attempts": 1}) as source:
        assert (await failed(source)).code == "SOURCE_UNREACHABLE"


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "SOURCE_REFUSED"), (404, "SOURCE_REFUSED"), (401, "SOURCE_UNAUTHORIZED"), (403, "SOURCE_UNAUTHORIZED")],
)
async def test_a_refusal_is_told_at_once(api: ScriptedApi, rest: Opened, status: int, code: str) -> None:
    """H15: what is wrong with the request is not asked again; the error says what the source said of it."""
    api.will(says(status=status, text="no such \0 field " + "x" * 1_000))
    async with rest() as source:
        error = await failed(source)
    assert isinstance(error, SourceRefused)
    assert error.code == code
    assert f"answered with status {status}: no such" in error.message
    assert len(error.message) < 300
    assert "\0" not in error.message
    assert len(api.asked) == 1


async def test_an_answer_too_large_is_not_read(api: ScriptedApi, rest: Opened) -> None:
    """H15: reading stops where `page_bytes` ends."""
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

    api.will(endless)
    async with rest(call={"page_bytes": 10_000}) as source:
        error = await failed(source)
    assert isinstance(error, SourceRefused)
    assert error.code == "SOURCE_TOO_LARGE"
    assert len(api.asked) == 1
    assert written < 50_000_000  # what the system's buffers took


async def test_a_redirect_is_not_followed(api: ScriptedApi, rest: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """H15: a secret goes to the host in the configuration, and to no other."""
    monkeypatch.setenv("TOKEN", "s3same")
    api.will(says(status=302, Location=f"{api.url.replace('127.0.0.1', 'localhost')}/elsewhere?key=s3same"), FINE)
    async with rest(secret_headers={"Authorization": "env:TOKEN"}) as source:
        error = await failed(source)
    assert isinstance(error, SourceRefused)
    assert error.code == "SOURCE_REDIRECTED"
    assert len(api.asked) == 1


async def test_a_secret_is_sent_and_never_told(api: ScriptedApi, rest: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """H15: an answer that repeats a secret does not bring it into an error, nor does a parameter."""
    monkeypatch.setenv("TOKEN", "Bearer s3same")
    api.will(says(status=400, text="what is Bearer s3same?"))
    async with rest(secret_headers={"Authorization": "env:TOKEN"}, params={"k": "hush"}) as source:
        error = await failed(source)
    assert api.headers[0]["Authorization"] == "Bearer s3same"
    assert "what is ***?" in error.message
    assert "s3same" not in str(error)
    assert "hush" not in str(error)


async def test_a_short_pause_is_waited_for_and_a_long_one_told(
    api: ScriptedApi, rest: Opened, harvest_db: Database
) -> None:
    """H15: Retry-After in seconds; the request goes on after a moment, and is put back when it takes longer."""
    api.will(says(status=429, Retry_After="0.1"), FINE)
    async with rest() as source:
        assert len((await fetched(source)).records) == 2
        api.will(says(status=429, Retry_After="60"), FINE)
        error = await failed(source)
        assert isinstance(error, SourcePaused)
        assert error.after is not None
        assert timedelta(seconds=55) < error.after <= timedelta(seconds=60)
        assert isinstance(await failed(source), SourcePaused)
    assert len(api.asked) == 3  # nobody asks during a pause
    assert await harvest_db.fetchval("SELECT failures FROM harvest_feed") == 0


@pytest.mark.parametrize("status", [429, 503])
async def test_a_pause_until_a_date(api: ScriptedApi, rest: Opened, harvest_db: Database, status: int) -> None:
    """H15: Retry-After as a date, with either status."""
    until = harvest_db.clock.now() + timedelta(minutes=1)
    api.will(says(status=status, Retry_After=format_datetime(until, usegmt=True)))
    async with rest() as source:
        error = await failed(source)
    assert isinstance(error, SourcePaused)
    kept = await harvest_db.fetchval("SELECT paused_until FROM harvest_feed")
    assert abs(kept - until) < timedelta(seconds=2)


async def test_failures_break_off(api: ScriptedApi, rest: Opened) -> None:
    """H15: once the breaker is open the source is not asked any more, and the error says why."""
    api.will(says(status=500, text="out of paper"))
    async with rest(call={"attempts": 10, "break_after": 2, "break_for": 60}) as source:
        error = await failed(source)
    assert error.code == "SOURCE_CIRCUIT_OPEN"
    assert not isinstance(error, SourcePaused)
    assert "out of paper" in error.message
    assert error.after is not None
    assert len(api.asked) == 2
