"""F12, F13: pictures drawn here or by an image API that fails in every way; the manifest tells what came of each."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import orjson
import pytest

from penstock.flows.config import FlowsSection
from penstock.flows.contract import CHART_EXPORT
from penstock.flows.kinds.market import renderers
from penstock.flows.kinds.market.candles import Candle, Series
from penstock.flows.kinds.market.charts import worker_charts
from penstock.flows.kinds.market.manifest import ChartRequest, verdict
from penstock.flows.kinds.market.renderers import LocalPainter, Painter, Picture
from penstock.flows.kinds.market.workers import make_workers
from penstock.flows.step import KindContext, Workers
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import Transient
from penstock.kernel.http.retry_after import retry_after
from tests.flows.kinds.market.run_step_io import RunStepIO
from tests.flows.market_servers import (
    PNG,
    TOKEN,
    TOKEN_NAME,
    TOKEN_REF,
    Answer,
    ScriptedMarketServer,
    market_server,
    never,
    picture,
    says,
)
from tests.support.types import Json

BEGIN = datetime(2026, 1, 5, tzinfo=UTC)
CANDLES = [Candle(BEGIN + timedelta(hours=n), 10 + n % 7, 18 + n % 5, 8, 11 + n % 6, 100 + n) for n in range(60)]
FILES = [{"step": "ohlcv", "name": "1h.json", "timeframe": "1h"}]


def asked(*names: str, **more: Any) -> Json:
    return {"requests": [{"id": name} for name in names], "files": FILES, **more}


@pytest.fixture
def step_io() -> RunStepIO:
    step_io = RunStepIO()
    step_io.artifacts["ohlcv", "1h.json"] = Series("TIDE", "1h", CANDLES).as_bytes()
    return step_io


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedMarketServer]:
    monkeypatch.setenv(TOKEN_NAME, TOKEN)
    async with market_server() as server:
        server.will(picture)
        yield server


def drawn_by(api: ScriptedMarketServer, **more: Any) -> Workers:
    images = {"url": f"{api.url}/render?key=hidden", "token": TOKEN_REF, **more}
    section = FlowsSection.model_validate({"images": images})
    return make_workers(KindContext(section, clock=ManualClock(BEGIN), pause=api.pause))


HERE = make_workers(KindContext(FlowsSection()))


def told(step_io: RunStepIO) -> tuple[list[str], list[tuple[str, str]]]:
    """Which pictures came, and which did not, by the manifest."""
    manifest = step_io.document("chart", "manifest.json")
    return [each["id"] for each in manifest["items"]], [(each["id"], each["code"]) for each in manifest["failures"]]


async def test_charts_are_drawn_here_by_default(step_io: RunStepIO) -> None:
    """F12, F13: an SVG for each request, and a manifest with where each is, its size and its sha256."""
    outputs = await step_io.do(HERE, CHART_EXPORT, asked("a", "b"))
    assert (outputs["requested"], outputs["received"], outputs["partial"]) == (2, 2, False)
    assert outputs["manifest"] == "charts/run-1/chart/manifest.json"
    assert outputs["items"][0] == {"id": "a", "name": "a.svg", "path": "charts/run-1/chart/a.svg", "timeframe": None}
    manifest, data = step_io.document("chart", "manifest.json"), step_io.artifacts["chart", "a.svg"]
    assert data.startswith(b"<svg ")
    assert manifest["items"][0] == {
        "id": "a",
        "name": "a.svg",
        "contentType": "image/svg+xml",
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "path": "charts/run-1/chart/a.svg",
    }
    assert [each["id"] for each in manifest["requested"]] == ["a", "b"]


async def test_a_request_that_cannot_be_drawn_costs_only_itself(step_io: RunStepIO) -> None:
    """F12: each failure has its code; with `minImages` the others are a partial success."""
    requests = [
        {"id": "fine"},
        {"id": "odd", "template": "pie"},
        {"id": "none", "timeframe": "1w"},
        {"id": "gone", "timeframe": "1d"},
        {"id": "rubbish", "timeframe": "4h"},
    ]
    more = [{"step": "ohlcv", "name": f"{t}.json", "timeframe": t} for t in ("1d", "4h")]
    step_io.artifacts["ohlcv", "4h.json"] = b'{"candles": 5}'
    inputs = {"requests": requests, "files": FILES + more, "minImages": 1}
    outputs = await step_io.do(HERE, CHART_EXPORT, inputs)
    assert outputs["partial"] is True
    assert told(step_io) == (
        ["fine"],
        [
            ("odd", "UNKNOWN_TEMPLATE"),
            ("none", "NO_CANDLES"),
            ("gone", "CANDLES_MISSING"),
            ("rubbish", "CANDLES_INVALID"),
        ],
    )
    assert len([line for line in step_io.logs["chart"] if line.startswith("warning")]) == 4


async def test_too_few_pictures_fail_the_step_with_its_manifest(step_io: RunStepIO) -> None:
    """F12: the manifest is written even then, and the error says what it says."""
    error = await step_io.fail(
        HERE, CHART_EXPORT, {"requests": [{"id": "a"}, {"id": "b", "template": "pie"}], "files": FILES}
    )
    assert error.code == "TOO_FEW_IMAGES"
    assert error.details["failures"][0]["code"] == "UNKNOWN_TEMPLATE"
    assert told(step_io) == (["a"], [("b", "UNKNOWN_TEMPLATE")])


async def test_without_candles_there_is_nothing_to_draw(step_io: RunStepIO) -> None:
    """F13: the local painter says so; it does not draw an empty chart."""
    await step_io.fail(HERE, CHART_EXPORT, {"requests": [{"id": "a"}]})
    assert told(step_io) == ([], [("a", "NO_CANDLES")])


async def test_inputs_that_make_no_sense(step_io: RunStepIO) -> None:
    """F12: a worker does not begin what the engine would not believe."""
    assert (await step_io.fail(HERE, CHART_EXPORT, asked("a", "a"))).code == "BAD_INPUTS"


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
        says(status=500),
        says(status=503),
        says(status=429),
        says(b"<html>busy</html>", content_type="text/html"),
        says(b"<html>busy</html>"),
        says(status=204),
    ],
    ids=["500", "503", "429", "html", "html as png", "nothing"],
)
async def test_a_failure_of_the_moment_is_tried_again(
    api: ScriptedMarketServer, step_io: RunStepIO, trouble: Answer
) -> None:
    """F13: errors, throttling and rubbish cost a try, with a longer pause each time."""
    api.will(trouble, trouble, picture)
    outputs = await step_io.do(drawn_by(api), CHART_EXPORT, asked("a"))
    assert outputs["received"] == 1
    assert len(api.bodies) == 3
    first, second = api.pauses
    assert 0.05 <= first <= 0.1 <= second <= 0.2


@pytest.mark.parametrize(
    ("trouble", "code", "tries", "retryable"),
    [
        (says("no luck", status=500), "IMAGE_ERROR", 3, True),
        (says(status=429), "IMAGE_THROTTLED", 3, True),
        (says(b"rubbish"), "IMAGE_BAD_ANSWER", 3, True),
        (says(b"<svg onload='x'/>", content_type="image/svg+xml"), "IMAGE_BAD_ANSWER", 3, True),
        (says(status=422), "IMAGE_REFUSED", 1, False),
        (says(status=302, Location="http://127.0.0.1:1/"), "IMAGE_REFUSED", 1, False),
        (says(f"bad token {TOKEN}", status=401), "IMAGE_UNAUTHORIZED", 1, False),
        (says(status=429, Retry_After="3600"), "IMAGE_THROTTLED", 1, True),
    ],
    ids=["500", "429", "rubbish", "svg", "422", "302", "401", "later"],
)
async def test_tries_come_to_an_end(
    api: ScriptedMarketServer, step_io: RunStepIO, trouble: Answer, code: str, tries: int, retryable: bool
) -> None:
    """F13: what is still so after the last try is told exactly, without token or query; what is final is not tried."""
    api.will(trouble)
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
    api.will(never, chart="a")
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
    monkeypatch.setattr(renderers, "PICTURE_LIMIT", 1_000)
    api.will(says(PNG + bytes(2_000)))
    await step_io.fail(drawn_by(api), CHART_EXPORT, asked("a"))
    assert told(step_io) == ([], [("a", "IMAGE_TOO_LARGE")])


async def test_fewer_pictures_than_asked_for(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F12: of forty pictures some come at once, some later, some never: the manifest accounts for every one."""
    names = [f"r{n}" for n in range(40)]
    for n, name in enumerate(names):
        scripts = [(picture,), (says(status=500), picture), (says(status=404),), (says(b"?"),)]
        api.will(*scripts[n % 4], chart=name)
    outputs = await step_io.do(drawn_by(api), CHART_EXPORT, asked(*names, minImages=20))
    assert (outputs["requested"], outputs["received"], outputs["partial"]) == (40, 20, True)
    items, failures = told(step_io)
    assert items == [name for n, name in enumerate(names) if n % 4 < 2]
    assert failures == [
        (name, ["", "", "IMAGE_REFUSED", "IMAGE_BAD_ANSWER"][n % 4]) for n, name in enumerate(names) if n % 4 > 1
    ]
    written = [name for step, name in step_io.artifacts if step == "chart"]
    found = verdict(step_io.artifacts["chart", "manifest.json"], asked(*names, minImages=20), written)
    assert found == {"requested": 40, "received": 20, "partial": True}


async def test_the_api_says_when(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: a Retry-After is kept to, in seconds or as a date by our clock."""
    at = format_datetime(BEGIN + timedelta(seconds=9), usegmt=True)
    api.will(says(status=429, Retry_After="7"), says(status=503, Retry_After=at), picture)
    await step_io.do(drawn_by(api), CHART_EXPORT, asked("a"))
    assert api.pauses == [7.0, 9.0]


def test_retry_after_is_seconds_or_a_date() -> None:
    """F13: both forms, and rubbish is no wish."""
    later = format_datetime(BEGIN + timedelta(seconds=90))
    assert retry_after("1.5", BEGIN) == timedelta(seconds=1.5)
    assert retry_after(later, BEGIN) == timedelta(seconds=90)
    assert retry_after(format_datetime(BEGIN - timedelta(days=1)), BEGIN) == timedelta(0)
    assert [retry_after(text, BEGIN) for text in (None, "", "soon", "-1", "9" * 40)] == [None] * 5


class _Stubborn:
    """A painter that crashes, hangs, or draws."""

    def __init__(self) -> None:
        self.hanging = asyncio.Event()

    async def draw(self, request: ChartRequest, series: Series | None) -> Picture:
        if request.id == "crash":
            raise ZeroDivisionError("at line 7 of something private")
        if request.id == "hang":
            self.hanging.set()
            await asyncio.Event().wait()
        return await LocalPainter().draw(request, series)


def _done_by(painter: Painter) -> Workers:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Painter]:
        yield painter

    workers = Workers()
    workers.worker(CHART_EXPORT)(worker_charts(opened))
    return workers


async def test_a_crash_costs_one_picture(step_io: RunStepIO) -> None:
    """F12: a mistake of ours is a failure among others, and its insides are not told."""
    await step_io.do(_done_by(_Stubborn()), CHART_EXPORT, asked("crash", "fine", minImages=1))
    assert told(step_io) == (["fine"], [("crash", "INTERNAL")])
    assert b"private" not in step_io.artifacts["chart", "manifest.json"]


async def test_a_step_that_is_stopped_leaves_its_manifest(step_io: RunStepIO) -> None:
    """F12: even when the time is up half-way, what is known is written."""
    painter = _Stubborn()
    doing = asyncio.create_task(step_io.do(_done_by(painter), CHART_EXPORT, asked("fine", "hang")))
    await painter.hanging.wait()
    await step_io.wrote["fine.svg"].wait()
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    assert told(step_io) == (["fine"], [("hang", "STOPPED")])


async def test_a_cancelled_step_begins_no_more_pictures(api: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F9, F12: after it is told to stop nothing is asked for, and the manifest says so."""
    step = step_io.step(CHART_EXPORT, asked("a", "b", minImages=0))
    step.cancelled.set()
    outputs: Any = drawn_by(api).handlers[CHART_EXPORT](step)
    assert (await outputs)["received"] == 0
    assert told(step_io) == ([], [("a", "STOPPED"), ("b", "STOPPED")])
    assert not api.bodies


class _Full(RunStepIO):
    """A store that takes manifests only."""

    async def write(self, held: Any, name: str, data: bytes) -> None:
        if not name.endswith(".json"):
            raise Transient("STORAGE_DOWN", "the store does not answer")
        await super().write(held, name, data)


async def test_a_picture_that_cannot_be_kept_did_not_come(step_io: RunStepIO) -> None:
    """F12: what is not an artifact is no item."""
    full = _Full()
    full.artifacts |= step_io.artifacts
    error = await full.fail(HERE, CHART_EXPORT, asked("a"))
    assert error.code == "TOO_FEW_IMAGES"
    assert told(full) == ([], [("a", "STORAGE_DOWN")])
