"""F13: charts of an image API with all kinds of faults."""

from datetime import timedelta
from email.utils import format_datetime

import orjson
import pytest

from penstock.flows.contract import CHART_EXPORT
from penstock.flows.kinds.market import renderers
from penstock.flows.kinds.market.manifest import check_manifest
from tests.flows.kinds.market.chart_steps import (
    BEGIN,
    FILES,
    LOCAL_WORKERS,
    chart_inputs,
    make_api_workers,
    read_results,
)
from tests.flows.kinds.market.run_step_io import RunStepIO
from tests.flows.market_servers import PNG, TOKEN, Answer, ScriptedMarketServer, make_answer, never_answer, picture


async def test_chart_without_candles_is_a_failure(step_io: RunStepIO) -> None:
    """F13: the local renderer does not draw an empty chart."""
    await step_io.run_failing_step(LOCAL_WORKERS, CHART_EXPORT, {"requests": [{"id": "a"}]})
    assert read_results(step_io) == ([], [("a", "NO_CANDLES")])


async def test_image_api_is_called_once_per_chart(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: a POST of JSON with request, candles and token; the response is stored unchanged."""
    request = {"id": "a", "template": "mine", "theme": "dark", "last": 3, "params": {"dpi": 96}}
    await step_io.run_step(make_api_workers(api), CHART_EXPORT, {"requests": [request], "files": FILES})
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
async def test_temporary_failures_are_retried(api: ScriptedMarketServer, step_io: RunStepIO, trouble: Answer) -> None:
    """F13: errors, throttling and invalid images are retried, with increasing delays."""
    api.script(trouble, trouble, picture)
    outputs = await step_io.run_step(make_api_workers(api), CHART_EXPORT, chart_inputs("a"))
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
async def test_attempts_are_limited(
    api: ScriptedMarketServer, step_io: RunStepIO, trouble: Answer, code: str, tries: int, retryable: bool
) -> None:
    """F13: the last error is reported without token and query; final errors are not retried."""
    api.script(trouble)
    error = await step_io.run_failing_step(make_api_workers(api), CHART_EXPORT, chart_inputs("a"))
    assert error.code == "TOO_FEW_IMAGES"
    [failure] = step_io.document("chart", "manifest.json")["failures"]
    assert (failure["code"], failure["attempts"], failure["retryable"]) == (code, tries, retryable)
    assert len(api.bodies) == tries
    everything = (
        orjson.dumps(error.as_dict()) + step_io.artifacts["chart", "manifest.json"] + repr(step_io.logs).encode()
    )
    assert TOKEN.encode() not in everything
    assert b"hidden" not in everything


async def test_missing_response_times_out(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: an API without a response is waited for up to `timeout`, and fails only its own chart."""
    api.script(never_answer, chart="a")
    outputs = await step_io.run_step(
        make_api_workers(api, timeout=0.2, attempts=2), CHART_EXPORT, chart_inputs("a", "b", minImages=1)
    )
    assert outputs["partial"] is True
    assert read_results(step_io) == (["b"], [("a", "IMAGE_TIMEOUT")])


async def test_closed_port_is_unreachable(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: a closed port is IMAGE_UNREACHABLE."""
    workers = make_api_workers(api, url="http://127.0.0.1:1", attempts=2)
    await step_io.run_failing_step(workers, CHART_EXPORT, chart_inputs("a"))
    assert read_results(step_io) == ([], [("a", "IMAGE_UNREACHABLE")])


async def test_too_large_image_is_refused(
    api: ScriptedMarketServer, step_io: RunStepIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F13: a response above the limit is not read to its end."""
    monkeypatch.setattr(renderers, "IMAGE_LIMIT", 1_000)
    api.script(make_answer(PNG + bytes(2_000)))
    await step_io.run_failing_step(make_api_workers(api), CHART_EXPORT, chart_inputs("a"))
    assert read_results(step_io) == ([], [("a", "IMAGE_TOO_LARGE")])


async def test_partial_success_of_many_charts(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F12: of forty charts some come at once, some later, some never; the manifest has every one."""
    names = [f"r{n}" for n in range(40)]
    for n, name in enumerate(names):
        scripts = [(picture,), (make_answer(status=500), picture), (make_answer(status=404),), (make_answer(b"?"),)]
        api.script(*scripts[n % 4], chart=name)
    outputs = await step_io.run_step(make_api_workers(api), CHART_EXPORT, chart_inputs(*names, minImages=20))
    assert (outputs["requested"], outputs["received"], outputs["partial"]) == (40, 20, True)
    items, failures = read_results(step_io)
    assert items == [name for n, name in enumerate(names) if n % 4 < 2]
    assert failures == [
        (name, ["", "", "IMAGE_REFUSED", "IMAGE_BAD_ANSWER"][n % 4]) for n, name in enumerate(names) if n % 4 > 1
    ]
    written = [name for step, name in step_io.artifacts if step == "chart"]
    result = check_manifest(step_io.artifacts["chart", "manifest.json"], chart_inputs(*names, minImages=20), written)
    assert result == {"requested": 40, "received": 20, "partial": True}


async def test_retry_after_is_applied(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: a Retry-After in seconds, or as a date by the injected clock."""
    at = format_datetime(BEGIN + timedelta(seconds=9), usegmt=True)
    api.script(make_answer(status=429, Retry_After="7"), make_answer(status=503, Retry_After=at), picture)
    await step_io.run_step(make_api_workers(api), CHART_EXPORT, chart_inputs("a"))
    assert api.pauses == [7.0, 9.0]
