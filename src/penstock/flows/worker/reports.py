"""F5: what a worker says of a step: only what can be kept."""

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
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # not after a backslash that is itself meant


def checked_outputs(outputs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """*outputs* as they can be kept, or StepFailed BAD_OUTPUTS."""
    if not outputs:
        return {}
    if not isinstance(outputs, Mapping):
        raise StepFailed("BAD_OUTPUTS", f"outputs have names, {type(outputs).__name__} has none", retryable=False)
    if (trouble := _trouble(outputs)) is not None:
        raise StepFailed("BAD_OUTPUTS", f"the outputs {trouble}", retryable=False)
    return outputs


def _trouble(document: Any) -> str | None:
    """Why *document* cannot be kept: one that cannot would spoil the whole batch it is reported in."""
    try:
        text = orjson.dumps(document)
    except TypeError as error:
        return f"are no JSON: {error}"
    if _NUL.search(text):
        return "hold the character NUL, which no database keeps"
    if len(text) > DOCUMENT_LIMIT:
        return f"have {len(text)} bytes, and at most {DOCUMENT_LIMIT} are kept: write an artifact"
    return None


def said(step: FlowStep, said: StepReportKind, outputs: Mapping[str, Any] | None = None) -> StepReport:
    return StepReport(step.run_id, step.step_id, step.fence, said, outputs or {}, artifacts=tuple(step.artifacts))


def given_back(held: ClaimedStep) -> StepReport:
    return StepReport(held.run_id, held.step_id, held.fence, StepReportKind.RELEASED)


def set_aside(step: FlowStep, error: StepError) -> StepReport:
    """A step that cannot be done now, for no fault of its own."""
    return StepReport(step.run_id, step.step_id, step.fence, StepReportKind.RELEASED, error=_kept(error))


def failed(step: FlowStep, error: StepError, retryable: bool | None = None) -> StepReport:
    """A step that cannot be done."""
    artifacts = tuple(step.artifacts)
    return StepReport(
        step.run_id, step.step_id, step.fence, StepReportKind.FAILED, {}, _kept(error), artifacts, retryable
    )


def _kept(error: StepError) -> StepError:
    """*error* as it can be kept, whatever the handler said."""
    details = error.details
    if (trouble := _trouble(details)) is not None:
        details = {"left_out": f"the details {trouble}"}
    return StepError(make_storable(error.code, CODE_LIMIT), make_storable(error.message, REASON_LIMIT), details)
