"""F6, F12, F13: market reports from candles to text, on the real engine, with image and model APIs that fail."""

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
from tests.flows.scenarios.market_harness import (
    EXAMPLE,
    FLOW,
    LEASE,
    make_request,
    make_workers,
    open_market,
    run_market,
)
from tests.support.processes import Up
from tests.support.types import Json
from tests.support.wait import becomes, until

SECOND = timedelta(seconds=1)
CHARTS = ["days", "four-hours", "hours"]
PUBLISHED_PATHS = {
    *(f"runs/r1/ohlcv/{timeframe}.json" for timeframe in ("1h", "4h", "1d")),
    *(f"charts/r1/charts/{name}.svg" for name in CHARTS),
    "charts/r1/charts/manifest.json",
    "runs/r1/report/report.md",
}


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedMarketServer]:
    """A server that acts as image API or model; the test sets its answers."""
    monkeypatch.setenv(TOKEN_NAME, TOKEN)
    async with market_server() as server:
        server.script(picture)
        yield server


def read_statuses(run: Json) -> dict[str, str]:
    return {name: step["status"] for name, step in run["steps"].items()}


def read_charts_error(run: Json) -> Json:
    """Return the error of the charts; assert that it ended the run before the report."""
    assert run["status"] == "FAILED"
    assert read_statuses(run) == {"ohlcv": "SUCCEEDED", "charts": "FAILED", "report": "CANCELLED"}
    assert run["steps"]["report"]["reason"] == "upstream_failed"
    error: Json = run["steps"]["charts"]["error"]
    return error


def parse_candles(symbol: str) -> list[list[float]]:
    """Return open, high, low and close of the valid rows, parsed independently of Penstock."""
    prices = []
    with (EXAMPLE / "candles.csv").open() as file:
        for row in csv.DictReader(file):
            with suppress(ValueError):  # two rows have no valid time or prices; a third has a high below its low
                datetime.fromisoformat(row["time"])
                candle = [float(row[name]) for name in ("open", "high", "low", "close")]
                if row["symbol"] == symbol and candle[1] >= candle[2]:
                    prices.append(candle)
    return prices


async def test_the_example_writes_a_report(database_url: str, tmp_path: Path) -> None:
    """F13: the example succeeds without internet, and publishes candles, charts, their manifest and a report."""
    candles = parse_candles("TIDE")
    async with run_market(database_url, tmp_path) as harness:
        run = await harness.run_to_end()
        assert (run["status"], run["scope"]) == ("SUCCEEDED", {"symbol": "TIDE", "theme": "light"})
        assert set(read_statuses(run).values()) == {"SUCCEEDED"}
        report = (await harness.read_artifact("report", "report.md")).decode()
        for name in CHARTS:
            chart = Xml.fromstring(await harness.read_artifact("charts", f"{name}.svg"))
            assert chart.tag == "{http://www.w3.org/2000/svg}svg"
            assert f"{candles[-1][3]:.2f}" in chart.itertext()
            assert f"(../../../charts/r1/charts/{name}.svg)" in report
    assert harness.list_published().keys() == PUBLISHED_PATHS
    assert not harness.list_objects("attempts")
    assert f"it opened at {candles[0][0]:.2f} and closed at **{candles[-1][3]:.2f}**" in report
    assert f"| High | {max(candle[1] for candle in candles):.2f} |" in report
    assert f"from {min(candle[2] for candle in candles):.2f} (" in report
    assert f"| Candles | {len(candles):,} |" in report


async def test_artifact_metadata_matches_the_stored_objects(database_url: str, tmp_path: Path) -> None:
    """F6, F12: a step lists sha256, size and URI of each artifact, and the outputs contain the URI of the manifest."""
    async with run_market(database_url, tmp_path) as harness:
        run = await harness.run_to_end()
        stored = harness.list_published()
        for kind, name in (("runs", "ohlcv"), ("charts", "charts"), ("runs", "report")):
            for artifact in run["steps"][name]["artifacts"]:
                path = f"{kind}/r1/{name}/{artifact['name']}"
                data, _ = stored.pop(path)
                assert artifact["uri"] == harness.storage.make_uri(path)
                assert (artifact["sha256"], artifact["size"]) == (hashlib.sha256(data).hexdigest(), len(data))
        assert not stored
        charts = run["steps"]["charts"]
        assert charts["outputs"][MANIFEST_OUTPUT] == harness.storage.make_uri("charts/r1/charts/manifest.json")
        manifest = orjson.loads(await harness.read_artifact("charts", MANIFEST))
        assert await harness.read_manifest() == (CHARTS, {})
    listed = {chart["name"]: (chart["sha256"], chart["size"]) for chart in charts["artifacts"]}
    assert all(listed[item["name"]] == (item["sha256"], item["size"]) for item in manifest["items"])


async def test_a_repeated_request_changes_nothing(database_url: str, tmp_path: Path) -> None:
    """F2, F6: a request with the same run id returns the same run; no step and no artifact is written again."""
    async with run_market(database_url, tmp_path) as harness:
        run, stored = await harness.run_to_end(), harness.list_published()
        assert not await harness.create()
        with pytest.raises(Conflict, match="with a different request"):
            await harness.create(flow=FLOW, scope={"symbol": "EMBER"})
        for name in ("ohlcv", "charts", "report", None):
            with pytest.raises(Conflict, match="run r1 has succeeded"):
                await harness.operations.retry("r1", "tester", name)
        other = await harness.run_to_end("r2", flow=FLOW, scope={"symbol": "EMBER", "theme": "dark"})
        assert other["status"] == "SUCCEEDED"
        assert await harness.views.read_run("r1") == run
        assert {path: file for path, file in harness.list_published().items() if "/r1/" in path} == stored
        twin = await harness.run_to_end("r3")
        assert twin["status"] == "SUCCEEDED"
        for name in CHARTS:
            assert (
                await harness.read_artifact("charts", f"{name}.svg", "r3") == stored[f"charts/r1/charts/{name}.svg"][0]
            )


IMAGE_ERRORS = {
    "IMAGE_ERROR": make_answer("busy", status=503),
    "IMAGE_TIMEOUT": never_answer,
    "IMAGE_THROTTLED": make_answer(status=429, Retry_After="3600"),
    "IMAGE_BAD_ANSWER": make_answer("<html>sorry</html>"),
    "IMAGE_REFUSED": make_answer("what?", status=422),
    "IMAGE_UNAUTHORIZED": make_answer(f"who is {TOKEN}?", status=401),
}


@pytest.mark.full
@pytest.mark.parametrize("code", ["IMAGE_ERROR", "IMAGE_TIMEOUT", "IMAGE_THROTTLED", "IMAGE_BAD_ANSWER"])
async def test_minimum_of_charts_is_a_partial_success(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path, code: str
) -> None:
    """F12: with at least minImages charts the step succeeds as partial, and the report contains the rendered ones."""
    api.script(IMAGE_ERRORS[code], chart="four-hours")
    images = {"url": api.url, "timeout": 1, "attempts": 1}
    async with run_market(database_url, tmp_path, api, images=images) as harness:
        run = await harness.run_to_end(**make_request())
        charts = run["steps"]["charts"]
        assert (run["status"], charts["status"], charts["error"]) == ("SUCCEEDED", "SUCCEEDED", None)
        outputs = charts["outputs"]
        assert (outputs["partial"], outputs["received"], outputs["requested"]) == (True, 2, 3)
        assert await harness.read_manifest() == (["days", "hours"], {"four-hours": code})
        assert [chart["name"] for chart in charts["artifacts"]] == ["days.png", "hours.png", MANIFEST]
        report = await harness.read_artifact("report", "report.md")
        assert b"days.png" in report
        assert b"four-hours" not in report
        assert TOKEN.encode() not in await harness.read_all()


@pytest.mark.parametrize("code", ["IMAGE_TIMEOUT", "IMAGE_REFUSED", "IMAGE_UNAUTHORIZED"])
async def test_too_few_charts_fail_the_run(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path, code: str
) -> None:
    """F7, F12: the error lists the missing charts; the manifest and the rendered charts are published anyway."""
    api.script(IMAGE_ERRORS[code], chart="days")
    api.script(IMAGE_ERRORS[code], chart="hours")
    images = {"url": api.url, "timeout": 1, "attempts": 1}
    async with run_market(database_url, tmp_path, api, images=images) as harness:
        run = await harness.run_to_end(**make_request())
        error, charts = read_charts_error(run), run["steps"]["charts"]
        assert (error["code"], error["details"]["minImages"]) == ("TOO_FEW_IMAGES", 2)
        assert "1 of 3 charts were rendered; minImages is 2" in error["message"]
        assert [failure["id"] for failure in error["details"]["failures"]] == ["days", "hours"]
        assert charts["outputs"] == {MANIFEST_OUTPUT: harness.storage.make_uri("charts/r1/charts/manifest.json")}
        assert await harness.read_manifest() == (["four-hours"], {"days": code, "hours": code})
        assert [chart["name"] for chart in charts["artifacts"]] == ["four-hours.png", MANIFEST]
        assert TOKEN.encode() not in await harness.read_all()


async def test_failed_image_requests_are_retried(api: ScriptedMarketServer, database_url: str, tmp_path: Path) -> None:
    """F13: a failed image request is retried, after the delay of Retry-After if the API sends it."""
    api.script(make_answer("busy", status=500), make_answer("<html>"), picture, chart="days")
    api.script(never_answer, picture, chart="four-hours")
    api.script(make_answer(status=429, Retry_After="7"), picture, chart="hours")
    async with run_market(database_url, tmp_path, api, images={"url": api.url, "timeout": 1}) as harness:
        run = await harness.run_to_end(**make_request())
        assert (run["status"], run["steps"]["charts"]["attempts"]) == ("SUCCEEDED", 1)
        assert run["steps"]["charts"]["outputs"]["partial"] is False
        assert await harness.read_manifest() == (CHARTS, {})
        assert await harness.read_artifact("charts", "hours.png") == PNG
    assert (len(api.bodies), len(api.pauses), api.pauses.count(7.0)) == (7, 4, 1)
    assert all(headers["Authorization"] == f"Bearer {TOKEN}" for headers in api.headers)


async def test_a_retried_step_publishes_only_its_last_attempt(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path
) -> None:
    """F6, F10: the files of earlier attempts are not published, and the manifest is of the last attempt."""
    busy = make_answer("busy", status=503)
    api.script(make_answer(b"\xff\xd8\xff first", content_type="image/jpeg"), picture, chart="days")
    api.script(busy, picture, chart="hours")
    api.script(busy, busy, chart="four-hours")
    retry = {"retry": {"maxAttempts": 2, "backoff": 0}}
    async with run_market(database_url, tmp_path, api, images={"url": api.url, "attempts": 1}) as harness:
        run = await harness.run_to_end(**make_request(charts=retry))
        charts = run["steps"]["charts"]
        assert (run["status"], charts["attempts"], charts["outputs"]["partial"]) == ("SUCCEEDED", 2, True)
        assert [chart["name"] for chart in charts["artifacts"]] == ["days.png", "hours.png", MANIFEST]
        assert await harness.read_manifest() == (["days", "hours"], {"four-hours": "IMAGE_ERROR"})
        assert not [path for path in harness.list_published() if path.endswith(".jpg")]
        moves = (await harness.views.read_history("r1", (0, 0), 100)).moves
        [retried] = [move for move in moves if (move.source, move.target) == ("RUNNING", "READY")]
        assert (retried.reason or "").startswith("TOO_FEW_IMAGES: 1 of 3")


async def test_permanent_refusals_are_not_retried(api: ScriptedMarketServer, database_url: str, tmp_path: Path) -> None:
    """F10: a step whose image requests are all refused has one attempt, although its `retry` allows three."""
    api.script(make_answer("no", status=400))
    async with run_market(database_url, tmp_path, api, images={"url": api.url}) as harness:
        run = await harness.run_to_end()
        assert read_charts_error(run)["code"] == "TOO_FEW_IMAGES"
        assert (run["steps"]["charts"]["attempts"], len(api.bodies)) == (1, 3)


async def test_a_failed_run_is_retried_by_an_operator(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path
) -> None:
    """F10: after the API has recovered, a retry of the charts completes the run with charts and report."""
    api.script(make_answer("down", status=503))
    async with run_market(database_url, tmp_path, api, images={"url": api.url}) as harness:
        assert read_charts_error(await harness.run_to_end(**make_request()))["code"] == "TOO_FEW_IMAGES"
        before = harness.list_published()
        assert (await harness.read_manifest())[0] == []
        api.script(picture)
        assert await harness.operations.retry("r1", "tester", "charts") == ["charts", "report"]
        run = await harness.wait_for_end()
        assert set(read_statuses(run).values()) == {"SUCCEEDED"}
        assert run["steps"]["charts"]["error"] is None
        assert await harness.read_manifest() == (CHARTS, {})
        after = harness.list_published()
        assert {path: file for path, file in after.items() if "/ohlcv/" in path} == {
            path: file for path, file in before.items() if "/ohlcv/" in path
        }


async def test_optional_charts_are_skipped(api: ScriptedMarketServer, database_url: str, tmp_path: Path) -> None:
    """F7, F12: failed charts with `required: false` are SKIPPED with error and manifest; the report has none."""
    api.script(make_answer("down", status=503))
    without = {"inputs": {"charts": "${steps.charts.outputs.items or null}"}}
    async with run_market(database_url, tmp_path, api, images={"url": api.url}) as harness:
        run = await harness.run_to_end(**make_request(charts={"required": False}, report=without))
        assert run["status"] == "SUCCEEDED"
        assert read_statuses(run) == {"ohlcv": "SUCCEEDED", "charts": "SKIPPED", "report": "SUCCEEDED"}
        charts = run["steps"]["charts"]
        assert charts["error"]["code"] == "TOO_FEW_IMAGES"
        assert charts["outputs"][MANIFEST_OUTPUT] == charts["artifacts"][0]["uri"]
        assert b"## Charts" not in await harness.read_artifact("report", "report.md")


BAD_CHARTS: list[Json] = [
    {"minImages": 4},
    {"minImages": 4, "files": []},
    {"minImages": 2, "requests": [{"id": "days"}]},
    {"minImages": 2, "requests": None, "chartTemplateId": "candles"},
    {"minImages": -1},
    {"requests": [{"id": "days"}, {"id": "days"}]},
]


async def test_invalid_chart_inputs_are_refused(database_url: str, tmp_path: Path) -> None:
    """F2, F12: invalid inputs are refused with 422, also beside inputs that are references, and no run is created."""
    async with open_market(database_url, tmp_path) as harness:
        for inputs in BAD_CHARTS:
            with pytest.raises(Invalid) as refused:
                await harness.create(**make_request(charts={"inputs": inputs}))
            assert (refused.value.code, refused.value.status, refused.value.details["step"]) == (
                "BAD_INPUTS",
                422,
                "charts",
            )
        assert await harness.create(**make_request())


async def test_invalid_chart_inputs_by_reference_fail_the_step(database_url: str, tmp_path: Path) -> None:
    """F12: inputs that become invalid through a reference fail the step with BAD_INPUTS before a worker claims it."""
    async with run_market(database_url, tmp_path) as harness:
        request = make_request(charts={"inputs": {"minImages": "${scope.least}"}, "retry": {"maxAttempts": 3}})
        run = await harness.run_to_end(**{**request, "scope": {**request["scope"], "least": 4}})
        error = read_charts_error(run)
        assert (error["code"], run["steps"]["charts"]["attempts"]) == ("BAD_INPUTS", 0)
        assert "minImages: 4 is greater than the number of requests, 3" in error["message"]
        valid = await harness.run_to_end("r2", **{**request, "scope": {**request["scope"], "least": 3}})
        assert valid["status"] == "SUCCEEDED"


ChartWorker = Callable[[FlowStep], Awaitable[Outputs]]
FALSE_OUTPUTS = {MANIFEST_OUTPUT: "gs://elsewhere/manifest.json", "partial": False, "received": 3, "items": []}


def encode_manifest(*rendered: str, **changes: Any) -> bytes:
    manifest = {
        "requested": [{"id": name} for name in CHARTS],
        "items": [{"id": name, "name": f"{name}.png"} for name in rendered],
        "failures": [{"id": name, "code": "LOST"} for name in CHARTS if name not in rendered],
    }
    return orjson.dumps(manifest | changes)


def make_writer(files: Mapping[str, bytes], unreported: str = "", invented: str = "") -> ChartWorker:
    """Return a worker that writes *files* and always reports success."""

    async def chart(step: FlowStep) -> Outputs:
        for name, data in files.items():
            await step.write(name, data)
        step.artifacts = [*(name for name in step.artifacts if name != unreported), *([invented] if invented else [])]
        return FALSE_OUTPUTS

    return chart


TWO_CHARTS = {"days.png": PNG, "hours.png": PNG}
FALSE_REPORTS: dict[str, tuple[str, ChartWorker]] = {
    "nothing": ("MANIFEST_MISSING", make_writer({})),
    "no manifest": ("MANIFEST_MISSING", make_writer(TWO_CHARTS)),
    "no JSON": ("MANIFEST_INVALID", make_writer({**TWO_CHARTS, MANIFEST: b"{"})),
    "no object": ("MANIFEST_INVALID", make_writer({**TWO_CHARTS, MANIFEST: b"[]"})),
    "too few": ("TOO_FEW_IMAGES", make_writer({**TWO_CHARTS, MANIFEST: encode_manifest("days")})),
    "none": ("TOO_FEW_IMAGES", make_writer({**TWO_CHARTS, MANIFEST: encode_manifest()})),
    "not written": ("ARTIFACT_MISSING", make_writer({"days.png": PNG, MANIFEST: encode_manifest("days", "hours")})),
    "not reported": (
        "ARTIFACT_MISSING",
        make_writer({**TWO_CHARTS, MANIFEST: encode_manifest("days", "hours")}, "hours.png"),
    ),
    "only reported": (
        "ARTIFACT_MISSING",
        make_writer({"days.png": PNG, MANIFEST: encode_manifest("days", "hours")}, invented="hours.png"),
    ),
    "one image twice": (
        "MANIFEST_INVALID",
        make_writer(
            {**TWO_CHARTS, MANIFEST: encode_manifest(items=[{"id": name, "name": "days.png"} for name in CHARTS])}
        ),
    ),
    "fewer requested": (
        "MANIFEST_INVALID",
        make_writer(
            {**TWO_CHARTS, MANIFEST: encode_manifest("days", "hours", requested=[{"id": "days"}, {"id": "hours"}])}
        ),
    ),
}


async def report_falsely(step: FlowStep) -> Outputs:
    return await FALSE_REPORTS[step.scope["case"]][1](step)


async def test_a_success_without_a_valid_manifest_fails(database_url: str, tmp_path: Path) -> None:
    """F12: a success that contradicts its manifest is FAILED; the written files are published for diagnosis."""
    runs = {f"r{n}": case for n, case in enumerate(FALSE_REPORTS)}
    async with run_market(database_url, tmp_path, handlers={CHART_EXPORT: report_falsely}) as harness:
        for run_id, case in runs.items():
            await harness.create(
                run_id, **{**make_request(), "scope": {"symbol": "TIDE", "theme": "dark", "case": case}}
            )
        for run_id, case in runs.items():
            run, code = await harness.wait_for_end(run_id), FALSE_REPORTS[case][0]
            assert read_charts_error(run)["code"] == code, case
            charts = run["steps"]["charts"]
            names = [chart["name"] for chart in charts["artifacts"]]
            assert (MANIFEST in names) == (code != "MANIFEST_MISSING"), case
            uri = harness.storage.make_uri(f"charts/{run_id}/charts/manifest.json") if MANIFEST in names else None
            assert charts["outputs"].get(MANIFEST_OUTPUT) == uri, case
            assert all([await harness.read_artifact("charts", name, run_id) for name in names])


async def test_outputs_are_corrected_by_the_manifest(database_url: str, tmp_path: Path) -> None:
    """F12: the outputs follow the manifest, and a manifest is published even if the worker does not report it."""
    files = {**TWO_CHARTS, MANIFEST: encode_manifest("days", "hours")}
    async with run_market(
        database_url, tmp_path, handlers={CHART_EXPORT: make_writer(files, unreported=MANIFEST)}
    ) as harness:
        charts = (await harness.run_to_end(**make_request()))["steps"]["charts"]
        assert charts["status"] == "SUCCEEDED"
        outputs = charts["outputs"]
        assert (outputs["partial"], outputs["received"], outputs["requested"]) == (True, 2, 3)
        assert outputs[MANIFEST_OUTPUT] == harness.storage.make_uri("charts/r1/charts/manifest.json")
        assert await harness.read_manifest() == (["days", "hours"], {"four-hours": "LOST"})


async def fail_with_manifest(step: FlowStep) -> Outputs:
    for name, data in {**TWO_CHARTS, MANIFEST: encode_manifest("days", "hours")}.items():
        await step.write(name, data)
    raise StepFailed("OUT_OF_PAPER", "there is no paper", {"sheets": 0})


async def crash_with_manifest(step: FlowStep) -> Outputs:
    await step.write(MANIFEST, encode_manifest())
    raise RuntimeError("a bug")


@pytest.mark.parametrize(
    ("handler", "code"), [(fail_with_manifest, "OUT_OF_PAPER"), (crash_with_manifest, "WORKER_ERROR")]
)
async def test_a_failed_attempt_publishes_its_manifest(
    database_url: str, tmp_path: Path, handler: Handler, code: str
) -> None:
    """F12: a reported failure is accepted whatever the manifest says; the manifest is published and in the outputs."""
    async with run_market(database_url, tmp_path, handlers={CHART_EXPORT: handler}) as harness:
        run = await harness.run_to_end(**make_request())
        assert read_charts_error(run)["code"] == code
        uri = harness.storage.make_uri("charts/r1/charts/manifest.json")
        assert run["steps"]["charts"]["outputs"] == {MANIFEST_OUTPUT: uri}
        assert len((await harness.read_manifest())[1]) in (1, 3)


async def test_timed_out_charts_publish_their_manifest(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path
) -> None:
    """F12: an attempt stopped by its `timeout` is FAILED; the manifest lists rendered and missing charts."""
    api.script(never_answer, chart="hours")
    async with run_market(database_url, tmp_path, api, images={"url": api.url}) as harness:
        run = await harness.run_to_end(**make_request(charts={"timeout": 0.5}))
        assert read_charts_error(run)["code"] == "STEP_TIMEOUT"
        items, failures = await harness.read_manifest()
        assert (failures["hours"], sorted([*items, *failures])) == ("STOPPED", CHARTS)


async def test_a_rejected_success_is_retried(database_url: str, tmp_path: Path) -> None:
    """F10, F12: a success that is rejected is retried with `retry`; no file of the first attempt is published."""
    honest, dishonest = make_workers().handlers[CHART_EXPORT], make_writer({"days.png": b"first"})

    async def chart(step: FlowStep) -> Outputs:
        outputs: Outputs = await (dishonest(step) if step.attempt == 1 else honest(step))  # type: ignore[misc]
        return outputs

    async with run_market(database_url, tmp_path, handlers={CHART_EXPORT: chart}) as harness:
        run = await harness.run_to_end(**make_request(charts={"retry": {"maxAttempts": 2, "backoff": 0}}))
        assert (run["status"], run["steps"]["charts"]["attempts"]) == ("SUCCEEDED", 2)
        assert harness.list_published().keys() == PUBLISHED_PATHS


async def test_a_model_writes_the_report(api: ScriptedMarketServer, database_url: str, tmp_path: Path) -> None:
    """F13: an OpenAI-compatible endpoint receives the figures, and its text precedes them in the report."""
    api.script(make_completion("It rose, with a pause in spring."))
    async with run_market(database_url, tmp_path, api, llm={"url": api.url, "model": "small-1"}) as harness:
        run = await harness.run_to_end(**make_request(report={"inputs": {"instructions": "Be brief."}}))
        assert (run["status"], run["steps"]["report"]["outputs"]["writer"]) == ("SUCCEEDED", "small-1")
        report = (await harness.read_artifact("report", "report.md")).decode()
    assert report.startswith("# TIDE, market report\n\nIt rose, with a pause in spring.\n\n_Written by small-1._")
    assert report.count("![") == 3
    [path], [body], [headers] = api.paths, api.bodies, api.headers
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", f"Bearer {TOKEN}")
    content = body["messages"][1]["content"]
    figures = orjson.loads(content.removeprefix("Be brief."))
    candles = parse_candles("TIDE")
    assert [row["timeframe"] for row in figures["timeframes"]] == ["1h", "4h", "1d"]
    assert {row["high"] for row in figures["timeframes"]} == {max(candle[1] for candle in candles)}


@pytest.mark.parametrize(
    ("answer", "code", "attempts"),
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
async def test_failures_of_a_model_fail_the_report(
    api: ScriptedMarketServer,
    database_url: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    answer: Answer,
    code: str,
    attempts: int,
) -> None:
    """F10, F13: each failure has its code, temporary failures are retried, and the token is never published."""
    api.script(answer)
    retry = {"retry": {"maxAttempts": 2, "backoff": 0}}
    timeout = 0.1 if answer is never_answer else 30
    async with run_market(database_url, tmp_path, api, llm={"url": api.url, "timeout": timeout}) as harness:
        run = await harness.run_to_end(**make_request(report=retry))
        report = run["steps"]["report"]
        assert (run["status"], report["status"], report["error"]["code"]) == ("FAILED", "FAILED", code)
        assert (report["attempts"], report["artifacts"]) == (attempts, [])
        assert run["reason"] == "step report failed"
        assert read_statuses(run) == {"ohlcv": "SUCCEEDED", "charts": "SUCCEEDED", "report": "FAILED"}
        assert TOKEN.encode() not in await harness.read_all()
    assert all(headers["Authorization"] == f"Bearer {TOKEN}" for headers in api.headers)
    assert TOKEN not in "".join(capfd.readouterr())


async def test_a_model_recovers_between_attempts(api: ScriptedMarketServer, database_url: str, tmp_path: Path) -> None:
    """F10: a failed attempt is followed by a successful one; the history has the reason of the failure."""
    busy = make_answer("busy", status=503)
    api.script(busy, busy, busy, make_completion("All is well."))
    async with run_market(database_url, tmp_path, api, llm={"url": api.url}) as harness:
        run = await harness.run_to_end(**make_request(report={"retry": {"maxAttempts": 2, "backoff": 0}}))
        report = run["steps"]["report"]
        assert (run["status"], report["attempts"], report["error"]) == ("SUCCEEDED", 2, None)
        assert b"All is well." in await harness.read_artifact("report", "report.md")
        moves = (await harness.views.read_history("r1", (0, 0), 100)).moves
        assert [move.reason for move in moves if (move.source, move.target) == ("RUNNING", "READY")] == [
            f"LLM_UNAVAILABLE: {api.url}/chat/completions answered with status 503: busy"
        ]


async def test_the_token_is_removed_from_the_report(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path
) -> None:
    """F13: a token that the model repeats is not in the report."""
    api.script(make_completion(f"You are {TOKEN}, and prices rose."))
    async with run_market(database_url, tmp_path, api, llm={"url": api.url}) as harness:
        assert (await harness.run_to_end(**make_request()))["status"] == "SUCCEEDED"
        assert TOKEN.encode() not in await harness.read_all()
        assert b"and prices rose." in await harness.read_artifact("report", "report.md")


class DelayedImage:
    """An image answer that is sent when the test releases it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.requested, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self, server: ScriptedMarketServer) -> web.StreamResponse:
        self.requested.set()
        await self.released.wait()
        return await make_answer(self._data)(server)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_worker_without_lease_cannot_publish(
    api: ScriptedMarketServer, database_url: str, tmp_path: Path, clock: ManualClock, is_late: bool
) -> None:
    """F6, F11: a worker that continues after its lease changes nothing, whether or not the next worker has finished."""
    slow, slow_hours, quick = DelayedImage(PNG + b"slow"), DelayedImage(PNG), DelayedImage(PNG)
    slow_hours.released.set()
    api.script(slow, make_answer(PNG + b"quick"), chart="days")
    api.script(slow_hours, quick, chart="hours")
    section: Json = {"images": {"url": api.url}}
    async with open_market(database_url, tmp_path, clock=clock, **section) as harness, AsyncExitStack() as winner:
        async with harness.run_worker(make_workers(api, **section), "slow", concurrency=1):
            await harness.create(**make_request())
            await slow.requested.wait()
            await slow_hours.requested.wait()  # otherwise the delayed answer could go to the winner's request
            clock.advance(LEASE + SECOND)
            assert await harness.engine.reap() == 1
            await winner.enter_async_context(harness.run_worker(make_workers(api, **section), "quick"))
            await quick.requested.wait()
            await becomes(lambda: harness.has_written(PNG + b"quick"), "the winner has written its chart of days")
            if is_late:
                quick.released.set()
                await harness.wait_for_end()
            before = harness.list_published(), await harness.views.read_run("r1")
            slow.released.set()
        assert (harness.list_published(), await harness.views.read_run("r1")) == before
        quick.released.set()
        run = await harness.wait_for_end()
        charts = run["steps"]["charts"]
        assert (run["status"], charts["worker"], charts["attempts"]) == ("SUCCEEDED", "quick", 2)
        assert await harness.read_artifact("charts", "days.png") == PNG + b"quick"
        assert await harness.read_manifest() == (CHARTS, {})
        checksums = {chart["name"]: chart["sha256"] for chart in charts["artifacts"]}
        assert checksums["days.png"] == hashlib.sha256(PNG + b"quick").hexdigest()
    assert len(api.bodies) == 6


@pytest.mark.full
def test_the_example_runs_with_penstock_up(database_url: str, tmp_path: Path) -> None:
    """F13, F18: `penstock up` runs the example; a client creates a run, reads it, and fetches its artifacts over HTTP.

    A shutdown of the server closes open event streams properly and does not wait for their clients.
    """
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "market-report")
    request = {"runId": "tide-1", "flow": FLOW, "scope": {"symbol": "TIDE", "theme": "dark"}}
    env = {"PENSTOCK__DATABASE__URL": database_url}
    with (
        Up(tmp_path, "--config", "examples/market-report/penstock.yaml", env=env) as up,
        httpx.Client(base_url=up.api) as http,
    ):
        assert http.post("/api/v1/flow_runs", json=request).status_code == 201
        until(lambda: http.get("/api/v1/flow_runs/tide-1").json()["status"] in ("SUCCEEDED", "FAILED"), "it ends")
        run = http.get("/api/v1/flow_runs/tide-1").json()
        assert (run["status"], set(read_statuses(run).values())) == ("SUCCEEDED", {"SUCCEEDED"})
        for artifact in run["steps"]["charts"]["artifacts"]:
            response = http.get(f"/api/v1/flow_runs/tide-1/steps/charts/artifacts/{artifact['name']}")
            assert (response.status_code, len(response.content)) == (200, artifact["size"])
            assert hashlib.sha256(response.content).hexdigest() == artifact["sha256"]
        assert http.get("/api/v1/flow_runs/tide-1/steps/charts/artifacts/days.svg").text.startswith("<svg ")
        assert http.post("/api/v1/flow_runs", json=request).status_code == 200
        invalid = http.post("/api/v1/flow_runs", json=make_request(charts={"inputs": {"minImages": 4}}))
        assert (invalid.status_code, invalid.json()["code"]) == (422, "BAD_INPUTS")
        refused = http.post("/api/v1/flow_runs/tide-1/steps/charts/retry")
        assert (refused.status_code, refused.json()["code"]) == (409, "CANNOT_RETRY")
        with http.stream("GET", "/api/v1/flow_runs/events") as stream:
            assert up.stop() == 0
            assert stream.read() is not None  # a broken connection would raise
    assert "Traceback" not in up.log_file.read_text()
