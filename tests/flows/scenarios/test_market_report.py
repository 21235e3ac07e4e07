"""F6, F12, F13: market reports from candles to words, on the real engine, while those it asks fail in every way."""

import asyncio
import csv
import hashlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import httpx
import orjson
import pytest
from aiohttp import web

from penstock.flows.contract import CHART_EXPORT
from penstock.flows.kinds.market.manifest import MANIFEST, MANIFEST_OUTPUT
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import Conflict, Invalid
from tests.flows.market_servers import (
    PNG,
    TOKEN,
    TOKEN_NAME,
    Answer,
    ScriptedMarketServer,
    make_answer,
    make_completion,
    market_server,
    never_answer,
    picture,
)
from tests.flows.scenarios.market_harness import EXAMPLE, FLOW, LEASE, example, market, opened, workers
from tests.support.processes import Up
from tests.support.types import Json
from tests.support.wait import becomes, until

SECOND = timedelta(seconds=1)
PICTURES = ["days", "four-hours", "hours"]
LEFT = {
    *(f"runs/r1/ohlcv/{timeframe}.json" for timeframe in ("1h", "4h", "1d")),
    *(f"charts/r1/charts/{name}.svg" for name in PICTURES),
    "charts/r1/charts/manifest.json",
    "runs/r1/report/report.md",
}


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedMarketServer]:
    """An image API, or a model: what it answers is the test's."""
    monkeypatch.setenv(TOKEN_NAME, TOKEN)
    async with market_server() as server:
        server.script(picture)
        yield server


def statuses(run: Json) -> dict[str, str]:
    return {name: step["status"] for name, step in run["steps"].items()}


def failed_charts(run: Json) -> Json:
    """The error of the charts, which ended the run before its report."""
    assert run["status"] == "FAILED"
    assert statuses(run) == {"ohlcv": "SUCCEEDED", "charts": "FAILED", "report": "CANCELLED"}
    assert run["steps"]["report"]["reason"] == "upstream_failed"
    error: Json = run["steps"]["charts"]["error"]
    return error


def parse_candles(symbol: str) -> list[list[float]]:
    """Open, high, low and close of the rows that are good, read without any help of ours."""
    good = []
    with (EXAMPLE / "candles.csv").open() as file:
        for row in csv.DictReader(file):
            with suppress(ValueError):  # two rows have no such time, or no prices; in a third the high is below the low
                datetime.fromisoformat(row["time"])
                prices = [float(row[name]) for name in ("open", "high", "low", "close")]
                if row["symbol"] == symbol and prices[1] >= prices[2]:
                    good.append(prices)
    return good


async def test_the_example_from_candles_to_report(database_url: str, tmp_path: Path) -> None:
    """F13: with no internet it succeeds, and leaves candles, charts, their manifest and a report of what they show."""
    candles = parse_candles("TIDE")
    async with market(database_url, tmp_path) as found:
        run = await found.done()
        assert (run["status"], run["scope"]) == ("SUCCEEDED", {"symbol": "TIDE", "theme": "light"})
        assert set(statuses(run).values()) == {"SUCCEEDED"}
        report = (await found.artifact("report", "report.md")).decode()
        for name in PICTURES:
            drawn = Xml.fromstring(await found.artifact("charts", f"{name}.svg"))
            assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
            assert f"{candles[-1][3]:.2f}" in drawn.itertext()
            assert f"(../../../charts/r1/charts/{name}.svg)" in report
    assert found.published().keys() == LEFT
    assert not found.stored("attempts")
    assert f"it opened at {candles[0][0]:.2f} and closed at **{candles[-1][3]:.2f}**" in report
    assert f"| High | {max(each[1] for each in candles):.2f} |" in report
    assert f"from {min(each[2] for each in candles):.2f} (" in report
    assert f"| Candles | {len(candles):,} |" in report


async def test_what_is_kept_of_artifacts_is_what_is_stored(database_url: str, tmp_path: Path) -> None:
    """F6, F12: each has its sha256, size and URI with its step, and the outputs point at the manifest."""
    async with market(database_url, tmp_path) as found:
        run = await found.done()
        stored = found.published()
        for kind, name in (("runs", "ohlcv"), ("charts", "charts"), ("runs", "report")):
            for artifact in run["steps"][name]["artifacts"]:
                path = f"{kind}/r1/{name}/{artifact['name']}"
                data, _ = stored.pop(path)
                assert artifact["uri"] == found.storage.uri(path)
                assert (artifact["sha256"], artifact["size"]) == (hashlib.sha256(data).hexdigest(), len(data))
        assert not stored
        charts = run["steps"]["charts"]
        assert charts["outputs"][MANIFEST_OUTPUT] == found.storage.uri("charts/r1/charts/manifest.json")
        told = orjson.loads(await found.artifact("charts", MANIFEST))
        assert await found.manifest() == (PICTURES, {})
    kept = {chart["name"]: (chart["sha256"], chart["size"]) for chart in charts["artifacts"]}
    assert all(kept[item["name"]] == (item["sha256"], item["size"]) for item in told["items"])


async def test_asking_again_for_the_example_changes_nothing(database_url: str, tmp_path: Path) -> None:
    """F2, F6: the same run id is the same run, no step of it is tried again, and its artifacts are not rewritten."""
    async with market(database_url, tmp_path) as found:
        run, stored = await found.done(), found.published()
        assert not await found.create()
        with pytest.raises(Conflict, match="with a different request"):
            await found.create(flow=FLOW, scope={"symbol": "EMBER"})
        for name in ("ohlcv", "charts", "report", None):
            with pytest.raises(Conflict, match="run r1 has succeeded"):
                await found.operations.retry("r1", "tester", name)
        other = await found.done("r2", flow=FLOW, scope={"symbol": "EMBER", "theme": "dark"})
        assert other["status"] == "SUCCEEDED"
        assert await found.views.read_run("r1") == run
        assert {path: one for path, one in found.published().items() if "/r1/" in path} == stored
        twin = await found.done("r3")
        assert twin["status"] == "SUCCEEDED"
        for name in PICTURES:
            assert await found.artifact("charts", f"{name}.svg", "r3") == stored[f"charts/r1/charts/{name}.svg"][0]


TROUBLES = {
    "IMAGE_ERROR": make_answer("busy", status=503),
    "IMAGE_TIMEOUT": never_answer,
    "IMAGE_THROTTLED": make_answer(status=429, Retry_After="3600"),
    "IMAGE_BAD_ANSWER": make_answer("<html>sorry</html>"),
    "IMAGE_REFUSED": make_answer("what?", status=422),
    "IMAGE_UNAUTHORIZED": make_answer(f"who is {TOKEN}?", status=401),
}


@pytest.mark.full
@pytest.mark.parametrize("code", ["IMAGE_ERROR", "IMAGE_TIMEOUT", "IMAGE_THROTTLED", "IMAGE_BAD_ANSWER"])
async def test_fewer_pictures_than_asked_may_be_enough(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path, code: str
) -> None:
    """F12: with minImages of them the step succeeds as partial, and the report goes with those that came."""
    api.script(TROUBLES[code], chart="four-hours")
    images = {"url": api.url, "timeout": 1, "attempts": 1}
    async with market(database_url, tmp_path, api, images=images) as found:
        run = await found.done(**example())
        charts = run["steps"]["charts"]
        assert (run["status"], charts["status"], charts["error"]) == ("SUCCEEDED", "SUCCEEDED", None)
        told = charts["outputs"]
        assert (told["partial"], told["received"], told["requested"]) == (True, 2, 3)
        assert await found.manifest() == (["days", "hours"], {"four-hours": code})
        assert [chart["name"] for chart in charts["artifacts"]] == ["days.png", "hours.png", MANIFEST]
        report = await found.artifact("report", "report.md")
        assert b"days.png" in report
        assert b"four-hours" not in report
        assert TOKEN.encode() not in await found.all_told()


@pytest.mark.parametrize("code", ["IMAGE_TIMEOUT", "IMAGE_REFUSED", "IMAGE_UNAUTHORIZED"])
async def test_too_few_pictures_fail_the_run(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path, code: str
) -> None:
    """F7, F12: FAILED with the pictures that did not come; the manifest and what came are there all the same."""
    api.script(TROUBLES[code], chart="days")
    api.script(TROUBLES[code], chart="hours")
    images = {"url": api.url, "timeout": 1, "attempts": 1}
    async with market(database_url, tmp_path, api, images=images) as found:
        run = await found.done(**example())
        error, charts = failed_charts(run), run["steps"]["charts"]
        assert (error["code"], error["details"]["minImages"]) == ("TOO_FEW_IMAGES", 2)
        assert "1 of 3 charts were rendered; minImages is 2" in error["message"]
        assert [each["id"] for each in error["details"]["failures"]] == ["days", "hours"]
        assert charts["outputs"] == {MANIFEST_OUTPUT: found.storage.uri("charts/r1/charts/manifest.json")}
        assert await found.manifest() == (["four-hours"], {"days": code, "hours": code})
        assert [chart["name"] for chart in charts["artifacts"]] == ["four-hours.png", MANIFEST]
        assert TOKEN.encode() not in await found.all_told()


async def test_an_api_that_recovers_gives_all_pictures(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path
) -> None:
    """F13: a picture that does not come at once is asked for again, as long after as the API says."""
    api.script(make_answer("busy", status=500), make_answer("<html>"), picture, chart="days")
    api.script(never_answer, picture, chart="four-hours")
    api.script(make_answer(status=429, Retry_After="7"), picture, chart="hours")
    async with market(database_url, tmp_path, api, images={"url": api.url, "timeout": 1}) as found:
        run = await found.done(**example())
        assert (run["status"], run["steps"]["charts"]["attempts"]) == ("SUCCEEDED", 1)
        assert run["steps"]["charts"]["outputs"]["partial"] is False
        assert await found.manifest() == (PICTURES, {})
        assert await found.artifact("charts", "hours.png") == PNG
    assert (len(api.bodies), len(api.pauses), api.pauses.count(7.0)) == (7, 4, 1)
    assert all(headers["Authorization"] == f"Bearer {TOKEN}" for headers in api.headers)


async def test_a_step_that_is_tried_again_leaves_only_its_last_attempt(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path
) -> None:
    """F6, F10: what an attempt before wrote is not published, and the manifest is the last one's."""
    busy = make_answer("busy", status=503)
    api.script(make_answer(b"\xff\xd8\xff first", content_type="image/jpeg"), picture, chart="days")
    api.script(busy, picture, chart="hours")
    api.script(busy, busy, chart="four-hours")
    again = {"retry": {"maxAttempts": 2, "backoff": 0}}
    async with market(database_url, tmp_path, api, images={"url": api.url, "attempts": 1}) as found:
        run = await found.done(**example(charts=again))
        charts = run["steps"]["charts"]
        assert (run["status"], charts["attempts"], charts["outputs"]["partial"]) == ("SUCCEEDED", 2, True)
        assert [chart["name"] for chart in charts["artifacts"]] == ["days.png", "hours.png", MANIFEST]
        assert await found.manifest() == (["days", "hours"], {"four-hours": "IMAGE_ERROR"})
        assert not [path for path in found.published() if path.endswith(".jpg")]
        moves = (await found.views.read_history("r1", (0, 0), 100)).moves
        [back] = [move for move in moves if (move.source, move.target) == ("RUNNING", "READY")]
        assert (back.reason or "").startswith("TOO_FEW_IMAGES: 1 of 3")


async def test_refusals_are_not_tried_again(api: ScriptedMarketServer, database_url: str, tmp_path: Path) -> None:
    """F10: a step whose pictures can never come has one attempt, though its `retry` gives it three."""
    api.script(make_answer("no", status=400))
    async with market(database_url, tmp_path, api, images={"url": api.url}) as found:
        run = await found.done()
        assert failed_charts(run)["code"] == "TOO_FEW_IMAGES"
        assert (run["steps"]["charts"]["attempts"], len(api.bodies)) == (1, 3)


async def test_a_failed_run_is_taken_up_by_hand(api: ScriptedMarketServer, database_url: str, tmp_path: Path) -> None:
    """F10: once the API is well, the charts are tried again, and the run ends with them and its report."""
    api.script(make_answer("down", status=503))
    async with market(database_url, tmp_path, api, images={"url": api.url}) as found:
        assert failed_charts(await found.done(**example()))["code"] == "TOO_FEW_IMAGES"
        before = found.published()
        assert (await found.manifest())[0] == []
        api.script(picture)
        assert await found.operations.retry("r1", "tester", "charts") == ["charts", "report"]
        run = await found.ended()
        assert set(statuses(run).values()) == {"SUCCEEDED"}
        assert run["steps"]["charts"]["error"] is None
        assert await found.manifest() == (PICTURES, {})
        after = found.published()
        assert {path: one for path, one in after.items() if "/ohlcv/" in path} == {
            path: one for path, one in before.items() if "/ohlcv/" in path
        }


async def test_charts_nobody_needs(api: ScriptedMarketServer, database_url: str, tmp_path: Path) -> None:
    """F7, F12: with `required: false` they are SKIPPED with error and manifest; the report goes without them."""
    api.script(make_answer("down", status=503))
    without = {"inputs": {"charts": "${steps.charts.outputs.items or null}"}}
    async with market(database_url, tmp_path, api, images={"url": api.url}) as found:
        run = await found.done(**example(charts={"required": False}, report=without))
        assert run["status"] == "SUCCEEDED"
        assert statuses(run) == {"ohlcv": "SUCCEEDED", "charts": "SKIPPED", "report": "SUCCEEDED"}
        charts = run["steps"]["charts"]
        assert charts["error"]["code"] == "TOO_FEW_IMAGES"
        assert charts["outputs"][MANIFEST_OUTPUT] == charts["artifacts"][0]["uri"]
        assert b"## Charts" not in await found.artifact("report", "report.md")


BAD_CHARTS: list[Json] = [
    {"minImages": 4},
    {"minImages": 4, "files": []},
    {"minImages": 2, "requests": [{"id": "days"}]},
    {"minImages": 2, "requests": None, "chartTemplateId": "candles"},
    {"minImages": -1},
    {"requests": [{"id": "days"}, {"id": "days"}]},
]


async def test_more_pictures_than_requested_are_refused(database_url: str, tmp_path: Path) -> None:
    """F2, F12: 422 when the run is asked for, whatever else of the inputs is a reference; there is no run of it."""
    async with opened(database_url, tmp_path) as found:
        for inputs in BAD_CHARTS:
            with pytest.raises(Invalid) as told:
                await found.create(**example(charts={"inputs": inputs}))
            assert (told.value.code, told.value.status, told.value.details["step"]) == ("BAD_INPUTS", 422, "charts")
        assert await found.create(**example())


async def test_more_pictures_than_requested_by_reference(database_url: str, tmp_path: Path) -> None:
    """F12: what is known only on the way fails the step with BAD_INPUTS, before any worker has it."""
    async with market(database_url, tmp_path) as found:
        written = example(charts={"inputs": {"minImages": "${scope.least}"}, "retry": {"maxAttempts": 3}})
        run = await found.done(**{**written, "scope": {**written["scope"], "least": 4}})
        error = failed_charts(run)
        assert (error["code"], run["steps"]["charts"]["attempts"]) == ("BAD_INPUTS", 0)
        assert "minImages: 4 is greater than the number of requests, 3" in error["message"]
        fine = await found.done("r2", **{**written, "scope": {**written["scope"], "least": 3}})
        assert fine["status"] == "SUCCEEDED"


Does = Callable[[FlowStep], Awaitable[Outputs]]
ELSEWHERE = {MANIFEST_OUTPUT: "gs://elsewhere/manifest.json", "partial": False, "received": 3, "items": []}


def manifest_with(*came: str, **changed: Any) -> bytes:
    told = {
        "requested": [{"id": name} for name in PICTURES],
        "items": [{"id": name, "name": f"{name}.png"} for name in came],
        "failures": [{"id": name, "code": "LOST"} for name in PICTURES if name not in came],
    }
    return orjson.dumps(told | changed)


def writing(files: Mapping[str, bytes], untold: str = "", invented: str = "") -> Does:
    """A worker that writes *files*, and says all went well."""

    async def chart(step: FlowStep) -> Outputs:
        for name, data in files.items():
            await step.write(name, data)
        step.artifacts = [*(name for name in step.artifacts if name != untold), *([invented] if invented else [])]
        return ELSEWHERE

    return chart


TWO = {"days.png": PNG, "hours.png": PNG}
LIES: dict[str, tuple[str, Does]] = {
    "nothing": ("MANIFEST_MISSING", writing({})),
    "no manifest": ("MANIFEST_MISSING", writing(TWO)),
    "no JSON": ("MANIFEST_INVALID", writing({**TWO, MANIFEST: b"{"})),
    "no object": ("MANIFEST_INVALID", writing({**TWO, MANIFEST: b"[]"})),
    "too few": ("TOO_FEW_IMAGES", writing({**TWO, MANIFEST: manifest_with("days")})),
    "none": ("TOO_FEW_IMAGES", writing({**TWO, MANIFEST: manifest_with()})),
    "not written": ("ARTIFACT_MISSING", writing({"days.png": PNG, MANIFEST: manifest_with("days", "hours")})),
    "not told of": ("ARTIFACT_MISSING", writing({**TWO, MANIFEST: manifest_with("days", "hours")}, "hours.png")),
    "only told of": (
        "ARTIFACT_MISSING",
        writing({"days.png": PNG, MANIFEST: manifest_with("days", "hours")}, invented="hours.png"),
    ),
    "one picture twice": (
        "MANIFEST_INVALID",
        writing({**TWO, MANIFEST: manifest_with(items=[{"id": name, "name": "days.png"} for name in PICTURES])}),
    ),
    "fewer requested": (
        "MANIFEST_INVALID",
        writing({**TWO, MANIFEST: manifest_with("days", "hours", requested=[{"id": "days"}, {"id": "hours"}])}),
    ),
}


async def lying(step: FlowStep) -> Outputs:
    return await LIES[step.scope["lie"]][1](step)


async def test_a_worker_is_not_believed(database_url: str, tmp_path: Path) -> None:
    """F12: a success that its manifest does not bear out is FAILED; what was written is there to find out why."""
    runs = {f"r{n}": lie for n, lie in enumerate(LIES)}
    async with market(database_url, tmp_path, handlers={CHART_EXPORT: lying}) as found:
        for run_id, lie in runs.items():
            await found.create(run_id, **{**example(), "scope": {"symbol": "TIDE", "theme": "dark", "lie": lie}})
        for run_id, lie in runs.items():
            run, code = await found.ended(run_id), LIES[lie][0]
            assert failed_charts(run)["code"] == code, lie
            charts = run["steps"]["charts"]
            names = [chart["name"] for chart in charts["artifacts"]]
            assert (MANIFEST in names) == (code != "MANIFEST_MISSING"), lie
            uri = found.storage.uri(f"charts/{run_id}/charts/manifest.json") if MANIFEST in names else None
            assert charts["outputs"].get(MANIFEST_OUTPUT) == uri, lie
            assert all([await found.artifact("charts", name, run_id) for name in names])


async def test_a_worker_that_says_too_much_is_corrected(database_url: str, tmp_path: Path) -> None:
    """F12: how many pictures came is what the manifest says; and a manifest that was written is published."""
    files = {**TWO, MANIFEST: manifest_with("days", "hours")}
    async with market(database_url, tmp_path, handlers={CHART_EXPORT: writing(files, untold=MANIFEST)}) as found:
        charts = (await found.done(**example()))["steps"]["charts"]
        assert charts["status"] == "SUCCEEDED"
        told = charts["outputs"]
        assert (told["partial"], told["received"], told["requested"]) == (True, 2, 3)
        assert told[MANIFEST_OUTPUT] == found.storage.uri("charts/r1/charts/manifest.json")
        assert await found.manifest() == (["days", "hours"], {"four-hours": "LOST"})


async def fails(step: FlowStep) -> Outputs:
    for name, data in {**TWO, MANIFEST: manifest_with("days", "hours")}.items():
        await step.write(name, data)
    raise StepFailed("OUT_OF_PAPER", "there is no paper", {"sheets": 0})


async def breaks(step: FlowStep) -> Outputs:
    await step.write(MANIFEST, manifest_with())
    raise RuntimeError("a bug")


@pytest.mark.parametrize(("handler", "code"), [(fails, "OUT_OF_PAPER"), (breaks, "WORKER_ERROR")])
async def test_a_worker_that_fails_leaves_its_manifest(
    database_url: str, tmp_path: Path, handler: Handler, code: str
) -> None:
    """F12: who says FAILED is believed, whatever the manifest holds; it is published, and pointed at."""
    async with market(database_url, tmp_path, handlers={CHART_EXPORT: handler}) as found:
        run = await found.done(**example())
        assert failed_charts(run)["code"] == code
        uri = found.storage.uri("charts/r1/charts/manifest.json")
        assert run["steps"]["charts"]["outputs"] == {MANIFEST_OUTPUT: uri}
        assert len((await found.manifest())[1]) in (1, 3)


async def test_charts_that_take_too_long_leave_their_manifest(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path
) -> None:
    """F12: an attempt stopped by its `timeout` is FAILED; of each picture the manifest tells whether it came."""
    api.script(never_answer, chart="hours")
    async with market(database_url, tmp_path, api, images={"url": api.url}) as found:
        run = await found.done(**example(charts={"timeout": 0.5}))
        assert failed_charts(run)["code"] == "STEP_TIMEOUT"
        items, failures = await found.manifest()
        assert (failures["hours"], sorted([*items, *failures])) == ("STOPPED", PICTURES)


async def test_a_lie_is_worth_another_attempt(database_url: str, tmp_path: Path) -> None:
    """F10, F12: with `retry` the next attempt may be honest; nothing of the first one is published."""
    honest, liar = workers().handlers[CHART_EXPORT], writing({"days.png": b"first"})

    async def chart(step: FlowStep) -> Outputs:
        told: Outputs = await (liar(step) if step.attempt == 1 else honest(step))  # type: ignore[misc]
        return told

    async with market(database_url, tmp_path, handlers={CHART_EXPORT: chart}) as found:
        run = await found.done(**example(charts={"retry": {"maxAttempts": 2, "backoff": 0}}))
        assert (run["status"], run["steps"]["charts"]["attempts"]) == ("SUCCEEDED", 2)
        assert found.published().keys() == LEFT


async def test_a_model_writes_the_report(api: ScriptedMarketServer, database_url: str, tmp_path: Path) -> None:
    """F13: an OpenAI-compatible endpoint is given the figures, and what it writes stands above them."""
    api.script(make_completion("It rose, with a pause in spring."))
    async with market(database_url, tmp_path, api, llm={"url": api.url, "model": "small-1"}) as found:
        run = await found.done(**example(report={"inputs": {"instructions": "Be brief."}}))
        assert (run["status"], run["steps"]["report"]["outputs"]["writer"]) == ("SUCCEEDED", "small-1")
        report = (await found.artifact("report", "report.md")).decode()
    assert report.startswith("# TIDE, market report\n\nIt rose, with a pause in spring.\n\n_Written by small-1._")
    assert report.count("![") == 3
    [path], [asked], [headers] = api.paths, api.bodies, api.headers
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", f"Bearer {TOKEN}")
    content = asked["messages"][1]["content"]
    figures = orjson.loads(content.removeprefix("Be brief."))
    candles = parse_candles("TIDE")
    assert [each["timeframe"] for each in figures["timeframes"]] == ["1h", "4h", "1d"]
    assert {each["high"] for each in figures["timeframes"]} == {max(each[1] for each in candles)}


@pytest.mark.parametrize(
    ("trouble", "code", "attempts"),
    [
        (never_answer, "LLM_TIMEOUT", 2),
        (make_answer(f"overloaded, {TOKEN}", status=503), "LLM_UNAVAILABLE", 2),
        (make_answer(f'{{"error": "{TOKEN}"}}', status=429), "LLM_THROTTLED", 2),
        (make_answer("<html>", content_type="text/html"), "LLM_BAD_ANSWER", 2),
        (make_completion(f"cut off at {TOKEN}", "length"), "LLM_BAD_ANSWER", 2),
        (make_answer(f"the key {TOKEN} is unknown", status=401), "LLM_UNAUTHORIZED", 1),
        (make_answer(f"{TOKEN} may not ask that", status=400), "LLM_REFUSED", 1),
    ],
)
async def test_a_model_that_fails_the_report(
    api: ScriptedMarketServer,
    database_url: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    trouble: Answer,
    code: str,
    attempts: int,
) -> None:
    """F10, F13: each failure has its code, and is tried again where that may help; the token is never told."""
    api.script(trouble)
    again = {"retry": {"maxAttempts": 2, "backoff": 0}}
    patience = 0.1 if trouble is never_answer else 30
    async with market(database_url, tmp_path, api, llm={"url": api.url, "timeout": patience}) as found:
        run = await found.done(**example(report=again))
        report = run["steps"]["report"]
        assert (run["status"], report["status"], report["error"]["code"]) == ("FAILED", "FAILED", code)
        assert (report["attempts"], report["artifacts"]) == (attempts, [])
        assert run["reason"] == "step report failed"
        assert statuses(run) == {"ohlcv": "SUCCEEDED", "charts": "SUCCEEDED", "report": "FAILED"}
        assert TOKEN.encode() not in await found.all_told()
    assert all(headers["Authorization"] == f"Bearer {TOKEN}" for headers in api.headers)
    assert TOKEN not in "".join(capfd.readouterr())


async def test_a_model_that_recovers_between_attempts(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path
) -> None:
    """F10: an attempt that came to nothing is followed by one that succeeds; its log tells of both."""
    busy = make_answer("busy", status=503)
    api.script(busy, busy, busy, make_completion("All is well."))
    async with market(database_url, tmp_path, api, llm={"url": api.url}) as found:
        run = await found.done(**example(report={"retry": {"maxAttempts": 2, "backoff": 0}}))
        report = run["steps"]["report"]
        assert (run["status"], report["attempts"], report["error"]) == ("SUCCEEDED", 2, None)
        assert b"All is well." in await found.artifact("report", "report.md")
        moves = (await found.views.read_history("r1", (0, 0), 100)).moves
        assert [move.reason for move in moves if (move.source, move.target) == ("RUNNING", "READY")] == [
            f"LLM_UNAVAILABLE: {api.url}/chat/completions answered with status 503: busy"
        ]


async def test_a_model_that_repeats_the_token(api: ScriptedMarketServer, database_url: str, tmp_path: Path) -> None:
    """F13: whatever it make_completion, the report does not hold the secret it was asked with."""
    api.script(make_completion(f"You are {TOKEN}, and prices rose."))
    async with market(database_url, tmp_path, api, llm={"url": api.url}) as found:
        assert (await found.done(**example()))["status"] == "SUCCEEDED"
        assert TOKEN.encode() not in await found.all_told()
        assert b"and prices rose." in await found.artifact("report", "report.md")


class Held:
    """A picture that comes when it is let go."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.asked, self.let_go = asyncio.Event(), asyncio.Event()

    async def __call__(self, server: ScriptedMarketServer) -> web.StreamResponse:
        self.asked.set()
        await self.let_go.wait()
        return await make_answer(self._data)(server)


@pytest.mark.parametrize("is_late", [False, True])
async def test_who_lost_the_lease_cannot_publish(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path, clock: ManualClock, is_late: bool
) -> None:
    """F6, F11: a worker that goes on after its lease, until before or after the winner's end, changes nothing."""
    slow, slow_hours, quick = Held(PNG + b"slow"), Held(PNG), Held(PNG)
    slow_hours.let_go.set()
    api.script(slow, make_answer(PNG + b"quick"), chart="days")
    api.script(slow_hours, quick, chart="hours")
    section: Json = {"images": {"url": api.url}}
    async with opened(database_url, tmp_path, clock=clock, **section) as found, AsyncExitStack() as winner:
        async with found.worked_by(workers(api, **section), "slow", at_once=1):
            await found.create(**example())
            await slow.asked.wait()
            await slow_hours.asked.wait()  # otherwise this request could come after the winner's and be held instead
            clock.advance(LEASE + SECOND)
            assert await found.engine.reap() == 1
            await winner.enter_async_context(found.worked_by(workers(api, **section), "quick"))
            await quick.asked.wait()
            await becomes(lambda: found.has_written(PNG + b"quick"), "the winner has its days")
            if is_late:
                quick.let_go.set()
                await found.ended()
            before = found.published(), await found.views.read_run("r1")
            slow.let_go.set()
        assert (found.published(), await found.views.read_run("r1")) == before
        quick.let_go.set()
        run = await found.ended()
        charts = run["steps"]["charts"]
        assert (run["status"], charts["worker"], charts["attempts"]) == ("SUCCEEDED", "quick", 2)
        assert await found.artifact("charts", "days.png") == PNG + b"quick"
        assert await found.manifest() == (PICTURES, {})
        kept = {chart["name"]: chart["sha256"] for chart in charts["artifacts"]}
        assert kept["days.png"] == hashlib.sha256(PNG + b"quick").hexdigest()
    assert len(api.bodies) == 6


@pytest.mark.full
def test_the_example_as_a_user_runs_it(database_url: str, tmp_path: Path) -> None:
    """F13, F18: `penstock up` with the example's configuration: the run is asked for, seen and fetched over HTTP.

    Who watches when the server stops is told to its end, and not waited for.
    """
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "market-report")
    asked = {"runId": "tide-1", "flow": FLOW, "scope": {"symbol": "TIDE", "theme": "dark"}}
    env = {"PENSTOCK__DATABASE__URL": database_url}
    with (
        Up(tmp_path, "--config", "examples/market-report/penstock.yaml", env=env) as up,
        httpx.Client(base_url=up.api) as http,
    ):
        assert http.post("/api/v1/flow_runs", json=asked).status_code == 201
        until(lambda: http.get("/api/v1/flow_runs/tide-1").json()["status"] in ("SUCCEEDED", "FAILED"), "it ends")
        run = http.get("/api/v1/flow_runs/tide-1").json()
        assert (run["status"], set(statuses(run).values())) == ("SUCCEEDED", {"SUCCEEDED"})
        for artifact in run["steps"]["charts"]["artifacts"]:
            got = http.get(f"/api/v1/flow_runs/tide-1/steps/charts/artifacts/{artifact['name']}")
            assert (got.status_code, len(got.content)) == (200, artifact["size"])
            assert hashlib.sha256(got.content).hexdigest() == artifact["sha256"]
        assert http.get("/api/v1/flow_runs/tide-1/steps/charts/artifacts/days.svg").text.startswith("<svg ")
        assert http.post("/api/v1/flow_runs", json=asked).status_code == 200
        wrong = http.post("/api/v1/flow_runs", json=example(charts={"inputs": {"minImages": 4}}))
        assert (wrong.status_code, wrong.json()["code"]) == (422, "BAD_INPUTS")
        refused = http.post("/api/v1/flow_runs/tide-1/steps/charts/retry")
        assert (refused.status_code, refused.json()["code"]) == (409, "CANNOT_RETRY")
        with http.stream("GET", "/api/v1/flow_runs/events") as watched:
            assert up.stop() == 0
            assert watched.read() is not None  # to a proper end: it was not broken off
    assert "Traceback" not in up.log_file.read_text()
