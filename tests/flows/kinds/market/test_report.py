"""F13: reports of the template, or of a model that may fail; and the example flow from candles to report."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from ruamel.yaml import YAML

from penstock.flows.config import FlowsSection
from penstock.flows.contract import CHART_EXPORT
from penstock.flows.definition.spec import FlowSpec
from penstock.flows.kinds.market.candles import Candle, CandleSeries
from penstock.flows.kinds.market.manifest import check_manifest
from penstock.flows.kinds.market.ohlcv import OHLCV_EXPORT
from penstock.flows.kinds.market.report import LLM_REPORT
from penstock.flows.kinds.market.summary import escape_markdown
from penstock.flows.kinds.market.workers import kinds, make_workers
from penstock.flows.step import KindContext, Workers
from penstock.settings import load_settings
from tests.flows.kinds.market.run_step_io import RunStepIO
from tests.flows.market_servers import (
    TOKEN,
    TOKEN_NAME,
    TOKEN_REF,
    Answer,
    ScriptedMarketServer,
    make_answer,
    make_completion,
    market_server,
    never_answer,
)
from tests.support.types import Json

EXAMPLE = Path(__file__).parents[4] / "examples" / "market-report"
BEGIN = datetime(2026, 1, 5, tzinfo=UTC)
DAY = timedelta(days=1)
CANDLES = [
    Candle(BEGIN, 100.0, 112.0, 99.0, 110.0, 1_000.0),
    Candle(BEGIN + DAY, 110.0, 111.0, 80.5, 88.0, 3_000.0),
    Candle(BEGIN + 2 * DAY, 88.0, 100.0, 85.0, 99.0, 2_000.0),
]
FILES = [{"step": "ohlcv", "name": "1d.json", "timeframe": "1d"}]
INPUTS: Json = {"files": FILES, "charts": [{"id": "days", "name": "days.svg", "path": "charts/run-1/charts/days.svg"}]}
TEMPLATE = make_workers(KindContext(FlowsSection()))


@pytest.fixture
def step_io() -> RunStepIO:
    step_io = RunStepIO()
    step_io.artifacts["ohlcv", "1d.json"] = CandleSeries("TIDE", "1d", CANDLES).as_bytes()
    return step_io


@pytest.fixture
async def llm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedMarketServer]:
    monkeypatch.setenv(TOKEN_NAME, TOKEN)
    async with market_server() as server:
        server.script(make_completion("It went up and down."))
        yield server


def make_model_workers(llm: ScriptedMarketServer, **more: Any) -> Workers:
    section = FlowsSection.model_validate({"llm": {"url": llm.url, "model": "small-1", "token": TOKEN_REF, **more}})
    return make_workers(KindContext(section, pause=llm.pause))


def read_report(step_io: RunStepIO) -> str:
    return step_io.artifacts["report", "report.md"].decode()


@pytest.mark.parametrize("price", [0.0, -5.0, 1e300, 5e-324])
async def test_unusual_prices_have_a_report(step_io: RunStepIO, price: float) -> None:
    """F13: undefined percentages are omitted, and the report is written."""
    candles = [Candle(BEGIN + n * DAY, price, price, price, price, 0.0) for n in range(60)]
    step_io.artifacts["ohlcv", "1d.json"] = CandleSeries("", "1d", candles).as_bytes()
    await step_io.run_step(TEMPLATE, LLM_REPORT, INPUTS, "report")
    assert "did not change" in read_report(step_io)


async def test_template_writes_without_a_model(step_io: RunStepIO) -> None:
    """F13: sentences, a table, and charts with paths relative to the report; equal input has equal text."""
    outputs = await step_io.run_step(TEMPLATE, LLM_REPORT, INPUTS, "report")
    assert outputs == {"report": "runs/run-1/report/report.md", "name": "report.md", "writer": "template"}
    text = read_report(step_io)
    assert text.startswith("# TIDE market report\n\nTIDE fell 1.00 % from 5 January 2026 to 7 January 2026: ")
    assert "it opened at 100.0 and closed at **99.0**." in text
    assert (
        "from 80.5 (6 January 2026) to 112.0 (5 January 2026); the largest fall from an earlier close was 20.00 %"
        in text
    )
    assert "2 of 3 candles of 1d rose; the volatility per candle was 24.11 %." in text
    assert (
        "6K in total, 2K per candle; the largest on 6 January 2026 (3K); the last candle had 1.00 times the mean."
        in text
    )
    assert "| Volatility per candle | 24.11 % |" in text
    assert "| Volume | 6K |" in text
    assert "![days](../../../charts/run-1/charts/days.svg)" in text
    await step_io.run_step(TEMPLATE, LLM_REPORT, INPUTS, "again")
    assert step_io.artifacts["again", "report.md"] == step_io.artifacts["report", "report.md"]


async def test_report_without_charts(step_io: RunStepIO) -> None:
    """F13: if the charts were skipped, the report has no charts."""
    await step_io.run_step(TEMPLATE, LLM_REPORT, {"files": FILES, "charts": None}, "report")
    assert "## Charts" not in read_report(step_io)


async def test_model_writes_the_text_only(llm: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: the model receives the figures; the figures and charts below its text are those of Penstock."""
    outputs = await step_io.run_step(
        make_model_workers(llm), LLM_REPORT, {**INPUTS, "instructions": "Be brief."}, "report"
    )
    assert outputs["writer"] == "small-1"
    [asked], [path], [headers] = llm.bodies, llm.paths, llm.headers
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", f"Bearer {TOKEN}")
    assert asked["model"] == "small-1"
    content = asked["messages"][1]["content"]
    assert content.startswith("Be brief.")
    figures = orjson.loads(content.removeprefix("Be brief."))
    assert figures["timeframes"][0]["volume"] == 6_000
    text = read_report(step_io)
    assert "It went up and down.\n\n_Written by small-1._" in text
    assert "| Volume | 6K |" in text
    assert "days.svg" in text


@pytest.mark.parametrize(
    ("trouble", "code", "tries"),
    [
        (make_answer("no luck", status=500), "LLM_UNAVAILABLE", 3),
        (make_answer(status=429), "LLM_THROTTLED", 3),
        (make_answer(f"who is {TOKEN}?", status=401), "LLM_UNAUTHORIZED", 1),
        (make_answer("no such model", status=404), "LLM_REFUSED", 1),
        (make_answer("not JSON", content_type="text/plain"), "LLM_BAD_ANSWER", 3),
        (make_answer("[]", content_type="application/json"), "LLM_BAD_ANSWER", 3),
        (make_answer('{"choices": []}', content_type="application/json"), "LLM_BAD_ANSWER", 3),
        (make_answer('{"choices": [{"message": null}]}', content_type="application/json"), "LLM_BAD_ANSWER", 3),
        (make_completion(None, "content_filter"), "LLM_BAD_ANSWER", 3),
        (make_completion("  \n"), "LLM_BAD_ANSWER", 3),
        (make_completion("It began well and then", "length"), "LLM_BAD_ANSWER", 3),
        (make_completion("x" * 200_001), "LLM_BAD_ANSWER", 3),
    ],
)
async def test_failed_model_fails_the_step(
    llm: ScriptedMarketServer, step_io: RunStepIO, trouble: Answer, code: str, tries: int
) -> None:
    """F13: each failure has its code; no partial report is written, and the token is not shown."""
    llm.script(trouble)
    error = await step_io.run_failing_step(make_model_workers(llm), LLM_REPORT, INPUTS, "report")
    assert (error.code, error.details) == (code, {"attempts": tries})
    assert len(llm.bodies) == tries
    assert ("report", "report.md") not in step_io.artifacts
    assert TOKEN not in error.message


async def test_temporary_failures_of_the_model_are_retried(llm: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: a temporary failure is retried, after the delay in the response."""
    llm.script(make_answer(status=503, Retry_After="9"), make_answer("{"), make_completion("All is well."))
    await step_io.run_step(make_model_workers(llm), LLM_REPORT, INPUTS, "report")
    assert "All is well." in read_report(step_io)
    assert llm.pauses[0] == 9.0


async def test_missing_response_times_out(llm: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: LLM_TIMEOUT after `timeout`."""
    llm.script(never_answer)
    error = await step_io.run_failing_step(make_model_workers(llm, timeout=0.1), LLM_REPORT, INPUTS, "report")
    assert error.code == "LLM_TIMEOUT"
    assert "0.1 s" in error.message


async def test_closed_port_is_unavailable(llm: ScriptedMarketServer, step_io: RunStepIO) -> None:
    """F13: a closed port is LLM_UNAVAILABLE."""
    error = await step_io.run_failing_step(
        make_model_workers(llm, url="http://127.0.0.1:1/v1"), LLM_REPORT, INPUTS, "report"
    )
    assert error.code == "LLM_UNAVAILABLE"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (None, "CANDLES_MISSING"),
        (b"{", "CANDLES_INVALID"),
        (b'{"symbol": "A", "timeframe": "1d", "candles": []}', "NO_CANDLES"),
    ],
)
async def test_unreadable_candles_fail_the_step(step_io: RunStepIO, data: bytes | None, code: str) -> None:
    """F13: without candles there is no report."""
    del step_io.artifacts["ohlcv", "1d.json"]
    if data is not None:
        step_io.artifacts["ohlcv", "1d.json"] = data
    assert (await step_io.run_failing_step(TEMPLATE, LLM_REPORT, INPUTS, "report")).code == code


async def test_markdown_in_texts_is_escaped(step_io: RunStepIO) -> None:
    """F13: symbols, titles and paths are text."""
    step_io.artifacts["ohlcv", "1d.json"] = CandleSeries("<b>|x|\n# y", "1d", CANDLES).as_bytes()
    charts = [{"id": "a", "path": "charts/run-1/c/a) ![x](http.svg"}]
    await step_io.run_step(TEMPLATE, LLM_REPORT, {"files": FILES, "charts": charts}, "report")
    assert read_report(step_io).splitlines()[0] == r"# \<b\>\|x\| \# y market report"
    assert "a%29%20%21%5Bx%5D%28http.svg)" in read_report(step_io)
    assert escape_markdown("a*b_c") == r"a\*b\_c"


def flow() -> FlowSpec:
    return FlowSpec.model_validate(YAML(typ="safe").load(EXAMPLE / "flows" / "market-report.yaml"))


def fill_references(value: Any, known: dict[str, Any]) -> Any:
    """Return inputs of the example with their references resolved."""
    if isinstance(value, str):
        whole = known.get(value)
        for name, found in known.items():
            value = value.replace(name, str(found)) if isinstance(value, str) else value
        return value if whole is None else whole
    if isinstance(value, dict):
        return {name: fill_references(inner, known) for name, inner in value.items()}
    return [fill_references(inner, known) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("symbol", ["TIDE", "EMBER"])
async def test_example_needs_no_internet(step_io: RunStepIO, symbol: str) -> None:
    """F13: `market-report` produces a report with three charts from the file of candles."""
    workers, steps = make_workers(KindContext(FlowsSection(files=EXAMPLE))), flow().steps
    known: dict[str, Any] = {"${scope.symbol}": symbol, "${scope.theme}": "dark"}
    exported = await step_io.run_step(workers, OHLCV_EXPORT, fill_references(steps["ohlcv"].inputs, known), "ohlcv")
    known["${steps.ohlcv.outputs.files}"] = exported["files"]
    assert exported["rejected"]["count"] == (3 if symbol == "TIDE" else 0)
    inputs = fill_references(steps["charts"].inputs, known)
    charts = await step_io.run_step(workers, CHART_EXPORT, inputs, "charts")
    known["${steps.charts.outputs.items}"] = charts["items"]
    assert (charts["received"], charts["partial"]) == (3, False)
    names = [name for step, name in step_io.artifacts if step == "charts"]
    assert check_manifest(step_io.artifacts["charts", "manifest.json"], inputs, names) == {
        "requested": 3,
        "received": 3,
        "partial": False,
    }
    await step_io.run_step(workers, LLM_REPORT, fill_references(steps["report"].inputs, known), "report")
    text = read_report(step_io)
    assert text.startswith(f"# {symbol}, market report")
    assert text.count("![") == 3


def test_example_files_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """F15: the flow and the configuration are valid, and so are the inputs before a run."""
    spec = flow()
    assert list(spec.steps) == ["ohlcv", "charts", "report"]
    for step in spec.steps.values():
        kinds.input_checks[step.kind](step.inputs)
    monkeypatch.chdir(EXAMPLE.parents[1])
    flows = load_settings(EXAMPLE / "penstock.yaml", {}).flows
    assert flows.folder is not None
    assert (flows.folder / "market-report.yaml").is_file()
    assert flows.files is not None
    assert (flows.files / "candles.csv").is_file()
