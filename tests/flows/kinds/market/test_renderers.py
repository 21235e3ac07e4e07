"""Pictures drawn by an image API that fails in every way."""

from datetime import timedelta
from email.utils import format_datetime

import orjson
import pytest

from penstock.flows.contract import CHART_EXPORT
from penstock.flows.kinds.market import renderers
from penstock.flows.kinds.market.manifest import check_manifest
from tests.flows.kinds.market.chart_steps import BEGIN, FILES, HERE, asked, drawn_by, told
from tests.flows.kinds.market.run_step_io import RunStepIO
from tests.flows.market_servers import PNG, TOKEN, Answer, ScriptedMarketServer, make_answer, never_answer, picture


async def test_without_candles_there_is_nothing_to_draw(step_io: RunStepIO) -> None:
    """F13: the local renderer says so; it does not draw an empty chart."""
    await step_io.fail(HERE, CHART_EXPORT, {"requests": [{"id": "a"}]})
    assert told(step_io) == ([], [("a", "NO_CANDLES")])


async def test_the_image_api_is_asked_once_per_chart(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: a POST of JSON with the request, its candles and the token; what comes back is kept as it is."""
    request = {"id": "a", "template": "mine", "theme": "dark", "last": 3, "params": {"dpi": 96}}
    await step_io.do(drawn_by(api), CHART_EXPORT, {"requests": [request], "files": FILES})
    assert step_io.artifacts["chart", "a.png"] == PNG
    [body], [headers] = api.bodies, api.headers
    assert headers["Authorization"] == f"Bearer {TOKEN}"
    assert (body["id"], body["template"], body["theme"], body["params"]) == ("a", "mine", "dark", {"dpi": 96})
    assert (body["symbol"], body["timeframe"], len(body["candles"])) == ("TIDE", "1h", 3)
    assert body["candles"][0][0] == "2026-01-07T09:00:00Z"


@pytest.mark.parametrize(
    "trouble",
    [
        make_answer(status=500),
        make_answer(status=503),
        make_answer(status=429),
        make_answer(b"<html>busy</html>", content_type="text/html"),
        make_answer(b"<html>busy</html>"),
        make_answer(status=204),
    ],
    ids=["500", "503", "429", "html", "html as png", "nothing"],
)
async def test_a_failure_of_the_moment_is_tried_again(
    api: ScriptedMarketServer, step_io: RunStepIO, trouble: Answer
) -> None:
    """F13: errors, throttling and rubbish cost a try, with a longer pause each time."""
    api.script(trouble, trouble, picture)
    outputs = await step_io.do(drawn_by(api), CHART_EXPORT, asked("a"))
    assert outputs["received"] == 1
    assert len(api.bodies) == 3
    first, second = api.pauses
    assert 0.05 <= first <= 0.1 <= second <= 0.2


@pytest.mark.parametrize(
    ("trouble", "code", "tries", "retryable"),
    [
        (make_answer("no luck", status=500), "IMAGE_ERROR", 3, True),
        (make_answer(status=429), "IMAGE_THROTTLED", 3, True),
        (make_answer(b"rubbish"), "IMAGE_BAD_ANSWER", 3, True),
        (make_answer(b"<svg onload='x'/>", content_type="image/svg+xml"), "IMAGE_BAD_ANSWER", 3, True),
        (make_answer(status=422), "IMAGE_REFUSED", 1, False),
        (make_answer(status=302, Location="http://127.0.0.1:1/"), "IMAGE_REFUSED", 1, False),
        (make_answer(f"bad token {TOKEN}", status=401), "IMAGE_UNAUTHORIZED", 1, False),
        (make_answer(status=429, Retry_After="3600"), "IMAGE_THROTTLED", 1, True),
    ],
    ids=["500", "429", "rubbish", "svg", "422", "302", "401", "later"],
)
async def test_tries_come_to_an_end(
    api: ScriptedMarketServer, step_io: RunStepIO, trouble: Answer, code: str, tries: int, retryable: bool
) -> None:
    """F13: what is still so after the last try is told exactly, without token or query; what is final is not tried."""
    api.script(trouble)
    error = await step_io.fail(drawn_by(api), CHART_EXPORT, asked("a"))
    assert error.code == "TOO_FEW_IMAGES"
    [failure] = step_io.document("chart", "manifest.json")["failures"]
    assert (failure["code"], failure["attempts"], failure["retryable"]) == (code, tries, retryable)
    assert len(api.bodies) == tries
    everything = (
        orjson.dumps(error.as_dict()) + step_io.artifacts["chart", "manifest.json"] + repr(step_io.logs).encode()
    )
    assert TOKEN.encode() not in everything
    assert b"hidden" not in everything


async def test_silence_times_out(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: an API that never answers is waited for no longer than `timeout`, and costs only its own picture."""
    api.script(never_answer, chart="a")
    outputs = await step_io.do(drawn_by(api, timeout=0.2, attempts=2), CHART_EXPORT, asked("a", "b", minImages=1))
    assert outputs["partial"] is True
    assert told(step_io) == (["b"], [("a", "IMAGE_TIMEOUT")])


async def test_nobody_there(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: a closed port is a failure like any other."""
    workers = drawn_by(api, url="http://127.0.0.1:1", attempts=2)
    await step_io.fail(workers, CHART_EXPORT, asked("a"))
    assert told(step_io) == ([], [("a", "IMAGE_UNREACHABLE")])


async def test_a_picture_beyond_all_measure(
    api: ScriptedMarketServer, step_io: RunStepIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F13: an answer over the limit is not read to its end."""
    monkeypatch.setattr(renderers, "IMAGE_LIMIT", 1_000)
    api.script(make_answer(PNG + bytes(2_000)))
    await step_io.fail(drawn_by(api), CHART_EXPORT, asked("a"))
    assert told(step_io) == ([], [("a", "IMAGE_TOO_LARGE")])


async def test_fewer_pictures_than_asked_for(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F12: of forty pictures some come at once, some later, some never: the manifest accounts for every one."""
    names = [f"r{n}" for n in range(40)]
    for n, name in enumerate(names):
        scripts = [(picture,), (make_answer(status=500), picture), (make_answer(status=404),), (make_answer(b"?"),)]
        api.script(*scripts[n % 4], chart=name)
    outputs = await step_io.do(drawn_by(api), CHART_EXPORT, asked(*names, minImages=20))
    assert (outputs["requested"], outputs["received"], outputs["partial"]) == (40, 20, True)
    items, failures = told(step_io)
    assert items == [name for n, name in enumerate(names) if n % 4 < 2]
    assert failures == [
        (name, ["", "", "IMAGE_REFUSED", "IMAGE_BAD_ANSWER"][n % 4]) for n, name in enumerate(names) if n % 4 > 1
    ]
    written = [name for step, name in step_io.artifacts if step == "chart"]
    found = check_manifest(step_io.artifacts["chart", "manifest.json"], asked(*names, minImages=20), written)
    assert found == {"requested": 40, "received": 20, "partial": True}


async def test_the_api_says_when(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: a Retry-After is kept to, in seconds or as a date by our clock."""
    at = format_datetime(BEGIN + timedelta(seconds=9), usegmt=True)
    api.script(make_answer(status=429, Retry_After="7"), make_answer(status=503, Retry_After=at), picture)
    await step_io.do(drawn_by(api), CHART_EXPORT, asked("a"))
    assert api.pauses == [7.0, 9.0]
