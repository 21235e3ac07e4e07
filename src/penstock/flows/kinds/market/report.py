"""F13: `worker_llm_report`: a report on candles and charts, written by a language model or by a template."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from yarl import URL

from penstock.flows.config import LlmSection
from penstock.flows.contract import make_artifact_folder
from penstock.flows.definition.spec import Name, SpecModel
from penstock.flows.kinds.inputs import read_inputs
from penstock.flows.kinds.market.candles import CandleFile, CandleSeries, read_series
from penstock.flows.kinds.market.summary import (
    TimeframeSummary,
    compute_summary,
    describe_summary,
    escape_markdown,
    link_chart,
    make_table,
)
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.kernel.clock import Clock
from penstock.kernel.errors import NotFound
from penstock.kernel.http.external_api import ApiFailure, ApiResponse, CallFailed, ExternalApi
from penstock.kernel.tasks.backoff import Sleep

LLM_REPORT = "LLM_REPORT"
REPORT = "report.md"
ATTEMPTS = 3
ANSWER_LIMIT = 4_000_000  # bytes
TEXT_LIMIT = 200_000  # characters of the text of a model
_SYSTEM = (
    "You write short, sober market reports in Markdown, for readers who know markets. Use nothing but the figures you "
    "are given; they are exact. Say what they show and what is remarkable. No headings, no tables, no advice."
)
_CODES = {
    ApiFailure.TIMEOUT: "LLM_TIMEOUT",
    ApiFailure.UNREACHABLE: "LLM_UNAVAILABLE",
    ApiFailure.ERROR: "LLM_UNAVAILABLE",
    ApiFailure.THROTTLED: "LLM_THROTTLED",
    ApiFailure.UNAUTHORIZED: "LLM_UNAUTHORIZED",
    ApiFailure.MOVED: "LLM_REFUSED",
    ApiFailure.REFUSED: "LLM_REFUSED",
    ApiFailure.TOO_LARGE: "LLM_BAD_ANSWER",
    ApiFailure.BAD_ANSWER: "LLM_BAD_ANSWER",
}


class ChartLink(BaseModel):
    """A chart in the outputs of CHART_EXPORT."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: Name
    path: Annotated[str, StringConstraints(min_length=1, max_length=1_000)]


class ReportInputs(SpecModel):
    """The inputs of an LLM_REPORT step."""

    files: list[CandleFile] = Field(min_length=1, max_length=50)
    charts: list[ChartLink] | None = Field(None, description="Charts of the report; without them it has no charts.")
    title: str | None = Field(None, max_length=200)
    instructions: str = Field("", max_length=10_000, description="Instructions for the model, sent with the figures.")


class ReportModel:
    """A client of an OpenAI-compatible endpoint that writes reports."""

    def __init__(self, section: LlmSection, url: str, token: str | None, clock: Clock, pause: Sleep) -> None:
        self.name = section.model
        self._url = f"{url.rstrip('/')}/chat/completions"
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        self._api = ExternalApi(clock, section.timeout, ATTEMPTS, ANSWER_LIMIT, headers, token=token, pause=pause)

    async def write(self, figures: Mapping[str, Any], instructions: str) -> str:
        """Return the text of the model on the *figures*; StepFailed if the call fails."""
        prompt = f"{instructions}\n\n{orjson.dumps(figures, option=orjson.OPT_INDENT_2).decode()}".strip()
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": prompt}]
        try:
            async with self._api.open_session() as session:
                body = orjson.dumps({"model": self.name, "messages": messages, "stream": False})
                return self._api.mask_secrets(await self._api.call(session, "POST", URL(self._url), _parse_text, body))
        except CallFailed as failed:
            details = {"attempts": failed.attempts}
            raise StepFailed(_CODES[failed.failure], failed.message, details, retryable=failed.is_retryable) from failed


def worker_llm_report(model: ReportModel | None) -> Handler:
    """Return the handler of steps that write reports, with *model* or with the template."""

    async def report(step: FlowStep) -> Outputs:
        inputs = read_inputs(ReportInputs, step.inputs)
        series = [await _read_file(step, file) for file in inputs.files]
        summaries = [await asyncio.to_thread(compute_summary, timeframe) for timeframe in series]
        symbol = series[0].symbol
        text = describe_summary(symbol, summaries[-1])
        if model is not None:
            timeframes = [summary.as_dict() for summary in summaries]
            figures = {"symbol": symbol, "summary": text, "timeframes": timeframes}
            text = f"{await model.write(figures, inputs.instructions)}\n\n_Written by {escape_markdown(model.name)}._"
        data = _make_report(step, inputs, symbol, text, summaries)
        path = await step.write(REPORT, data)
        await step.log(f"report with {len(data)} characters, written by {model.name if model else 'the template'}")
        return {"report": path, "name": REPORT, "writer": model.name if model else "template"}

    return report


async def _read_file(step: FlowStep, file: CandleFile) -> CandleSeries:
    try:
        series = await asyncio.to_thread(read_series, await step.read(file.step, file.name))
    except NotFound as error:
        raise StepFailed("CANDLES_MISSING", error.message, retryable=False) from error
    except ValueError as error:
        message = f"{file.name} of step {file.step}: {error}"
        raise StepFailed("CANDLES_INVALID", message, retryable=False) from error
    if not series.candles:
        raise StepFailed("NO_CANDLES", f"{file.name} of step {file.step} has no candles", retryable=False)
    return series


def _make_report(
    step: FlowStep, inputs: ReportInputs, symbol: str, text: str, summaries: Sequence[TimeframeSummary]
) -> str:
    """Return the report: the text, the figures, and links to the charts."""
    path = f"{make_artifact_folder(step.kind, step.run_id, step.step_id)}/{REPORT}"
    title = escape_markdown(inputs.title or f"{symbol} market report".strip())
    parts = [f"# {title}", text, "## Figures", make_table(summaries)]
    if inputs.charts:
        parts += ["## Charts", *(link_chart(chart.id, chart.path, path) for chart in inputs.charts)]
    return "\n\n".join([*parts, "_Times are in UTC; the time of a candle is its start._"]) + "\n"


def _parse_text(response: ApiResponse) -> str:
    """Return the text of a chat completion; CallFailed if it is missing or incomplete."""
    try:
        choice = orjson.loads(response.body)["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        raise CallFailed(ApiFailure.BAD_ANSWER, "the response of the model is not a chat completion") from error
    if not isinstance(text, str) or not text.strip():
        raise CallFailed(ApiFailure.BAD_ANSWER, f"the response of the model has no text (finish_reason: {reason})")
    if reason == "length" or len(text) > TEXT_LIMIT:
        raise CallFailed(ApiFailure.BAD_ANSWER, "the report of the model is truncated, or too long")
    return text.strip().encode(errors="replace").decode()
