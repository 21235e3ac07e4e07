"""F5: reports of a worker on its steps, limited to values that the database can store."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from penstock.flows.contract import DOCUMENT_LIMIT, StepReportKind
from penstock.flows.model import ClaimedStep, StepError, StepReport
from penstock.flows.step import FlowStep, StepFailed
from penstock.kernel.tasks.outcome import REASON_LIMIT
from penstock.kernel.text import make_storable

CODE_LIMIT = 64
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # not after an escaped backslash


def check_outputs(outputs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return *outputs* if the database can store them; otherwise raise StepFailed BAD_OUTPUTS."""
    if not outputs:
        return {}
    if not isinstance(outputs, Mapping):
        message = f"the outputs of a step must be a mapping, not {type(outputs).__name__}"
        raise StepFailed("BAD_OUTPUTS", message, retryable=False)
    if (problem := _find_problem(outputs)) is not None:
        raise StepFailed("BAD_OUTPUTS", f"the outputs {problem}", retryable=False)
    return outputs


def _find_problem(document: Any) -> str | None:
    """Return why the database cannot store *document*: it would reject the whole batch of reports."""
    try:
        text = orjson.dumps(document)
    except TypeError as error:
        return f"cannot be encoded as JSON: {error}"
    if _NUL.search(text):
        return "contain the character NUL, which PostgreSQL cannot store"
    if len(text) > DOCUMENT_LIMIT:
        return f"have {len(text)} bytes; the limit is {DOCUMENT_LIMIT}: write an artifact instead"
    return None


def make_report(step: FlowStep, outcome: StepReportKind, outputs: Mapping[str, Any] | None = None) -> StepReport:
    """Return the report of a step without an error."""
    return StepReport(step.run_id, step.step_id, step.fence, outcome, outputs or {}, artifacts=tuple(step.artifacts))


def release(claimed: ClaimedStep) -> StepReport:
    """Return the report of a claimed step that was not started."""
    return StepReport(claimed.run_id, claimed.step_id, claimed.fence, StepReportKind.RELEASED)


def defer(step: FlowStep, error: StepError) -> StepReport:
    """Return the report of a step that cannot run now because a dependency of Penstock is unavailable."""
    return StepReport(step.run_id, step.step_id, step.fence, StepReportKind.RELEASED, error=_make_storable(error))


def fail(step: FlowStep, error: StepError, retryable: bool | None = None) -> StepReport:
    """Return the report of a failed step."""
    artifacts = tuple(step.artifacts)
    return StepReport(
        step.run_id, step.step_id, step.fence, StepReportKind.FAILED, {}, _make_storable(error), artifacts, retryable
    )


def _make_storable(error: StepError) -> StepError:
    """Return *error* with everything replaced that the database cannot store."""
    details = error.details
    if (problem := _find_problem(details)) is not None:
        details = {"left_out": f"the details {problem}"}
    return StepError(make_storable(error.code, CODE_LIMIT), make_storable(error.message, REASON_LIMIT), details)
