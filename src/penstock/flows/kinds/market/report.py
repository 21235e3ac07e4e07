"""F13: `worker_llm_report`: a report on candles and charts, by a model or, without one, by a template."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from yarl import URL

from penstock.flows.config import LlmSection
from penstock.flows.contract import artifact_folder
from penstock.flows.definition.spec import Name, SpecModel
from penstock.flows.kinds.inputs import read
from penstock.flows.kinds.market.candles import CandleFile, CandleSeries, read_series
from penstock.flows.kinds.market.summary import TimeframeSummary, facts_of, picture, plain, summary, table
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.kernel.clock import Clock
from penstock.kernel.errors import NotFound
from penstock.kernel.http.external_api import ApiFailure, ApiResponse, CallFailed, ExternalApi
from penstock.kernel.tasks.backoff import Sleep

LLM_REPORT = "LLM_REPORT"
REPORT = "report.md"
ATTEMPTS = 3
ANSWER_LIMIT = 4_000_000  # bytes
TEXT_LIMIT = 200_000  # characters of what a model writes
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
    """A chart as CHART_EXPORT tells of it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: Name
    path: Annotated[str, StringConstraints(min_length=1, max_length=1_000)]


class ReportInputs(SpecModel):
    """What a step of the kind LLM_REPORT is to do."""

    files: list[CandleFile] = Field(min_length=1, max_length=50)
    charts: list[ChartLink] | None = Field(None, description="None: the report goes without.")
    title: str | None = Field(None, max_length=200)
    instructions: str = Field("", max_length=10_000, description="For the model, besides the figures.")


class ReportModel:
    """An OpenAI-compatible endpoint that writes."""

    def __init__(self, section: LlmSection, url: str, token: str | None, clock: Clock, pause: Sleep) -> None:
        self.name = section.model
        self._url = f"{url.rstrip('/')}/chat/completions"
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        self._api = ExternalApi(clock, section.timeout, ATTEMPTS, ANSWER_LIMIT, headers, token=token, pause=pause)

    async def write(self, figures: Mapping[str, Any], instructions: str) -> str:
        """What the model makes of the *figures*; StepFailed when nothing comes of it."""
        asked = f"{instructions}\n\n{orjson.dumps(figures, option=orjson.OPT_INDENT_2).decode()}".strip()
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]
        try:
            async with self._api.session() as session:
                body = orjson.dumps({"model": self.name, "messages": messages, "stream": False})
                return self._api.mask_secrets(await self._api.call(session, "POST", URL(self._url), _written, body))
        except CallFailed as failed:
            details = {"attempts": failed.attempts}
            raise StepFailed(_CODES[failed.failure], failed.message, details, retryable=failed.is_retryable) from failed


def worker_llm_report(model: ReportModel | None) -> Handler:
    """The worker that has reports written by *model*, or by the template."""

    async def report(step: FlowStep) -> Outputs:
        inputs = read(ReportInputs, step.inputs)
        series = [await _read(step, file) for file in inputs.files]
        facts = [await asyncio.to_thread(facts_of, each) for each in series]
        symbol, main = series[0].symbol, facts[-1]
        text = summary(symbol, main)
        if model is not None:
            figures = {"symbol": symbol, "summary": text, "timeframes": [each.as_dict() for each in facts]}
            text = f"{await model.write(figures, inputs.instructions)}\n\n_Written by {plain(model.name)}._"
        data = _document(step, inputs, symbol, text, facts)
        path = await step.write(REPORT, data)
        await step.log(f"a report of {len(data)} characters by {model.name if model else 'the template'}")
        return {"report": path, "name": REPORT, "writer": model.name if model else "template"}

    return report


async def _read(step: FlowStep, file: CandleFile) -> CandleSeries:
    try:
        series = await asyncio.to_thread(read_series, await step.read(file.step, file.name))
    except NotFound as error:
        raise StepFailed("CANDLES_MISSING", error.message, retryable=False) from error
    except ValueError as error:
        said = f"{file.name} of {file.step}: {error}"
        raise StepFailed("CANDLES_INVALID", said, retryable=False) from error
    if not series.candles:
        raise StepFailed("NO_CANDLES", f"{file.name} of {file.step} has no candles", retryable=False)
    return series


def _document(step: FlowStep, inputs: ReportInputs, symbol: str, text: str, facts: Sequence[TimeframeSummary]) -> str:
    """The report: what was written, then what is certain."""
    place = f"{artifact_folder(step.kind, step.run_id, step.step_id)}/{REPORT}"
    title = plain(inputs.title or f"{symbol} market report".strip())
    parts = [f"# {title}", text, "## Figures", table(facts)]
    if inputs.charts:
        parts += ["## Charts", *(picture(chart.id, chart.path, place) for chart in inputs.charts)]
    return "\n\n".join([*parts, "_Times are UTC; each candle is named by its beginning._"]) + "\n"


def _written(answered: ApiResponse) -> str:
    """What a model wrote; CallFailed when that is nothing, or not all."""
    try:
        choice = orjson.loads(answered.body)["choices"][0]
        text, ending = choice["message"]["content"], choice.get("finish_reason")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        raise CallFailed(ApiFailure.BAD_ANSWER, "the model's answer is no chat completion") from error
    if not isinstance(text, str) or not text.strip():
        raise CallFailed(ApiFailure.BAD_ANSWER, f"the model wrote nothing ({ending})")
    if ending == "length" or len(text) > TEXT_LIMIT:
        raise CallFailed(ApiFailure.BAD_ANSWER, "the model's report is cut off, or too long")
    return text.strip().encode(errors="replace").decode()
