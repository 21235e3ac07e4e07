"""The log of runs and steps: each change is logged once, after its transaction has committed."""

import structlog

from penstock.flows.contract import FlowRunStatus, StepStatus
from penstock.flows.model import EndedStep, RunChange, StepSettlement

_log = structlog.get_logger()


def log_changes(settlement: StepSettlement) -> None:
    """Log the started runs, the failed and retried steps, and the ended runs of a committed settlement."""
    for run in settlement.started:
        _log.info("flow_run_started", run=run.run_id, flow=run.flow)
    for step in settlement.ended:
        _log_step(step)
    for run in settlement.runs:
        _log_ended_run(run, settlement)


def _log_step(step: EndedStep) -> None:
    fields = {"run": step.run_id, "step": step.name, "kind": step.kind, "attempt": step.attempt}
    if step.status is StepStatus.READY and step.error is None:
        _log.debug("flow_step_released", **fields, reason=step.reason)
    elif step.status is StepStatus.READY:
        _log.info("flow_step_retried", **fields, reason=step.reason)
    elif step.status in (StepStatus.FAILED, StepStatus.SKIPPED) and step.error is not None:
        _log.warning("flow_step_failed", **fields, code=step.error["code"], error=step.error["message"])


def _log_ended_run(run: RunChange, settlement: StepSettlement) -> None:
    seconds = None if run.duration is None else round(run.duration.total_seconds(), 3)
    fields = {"run": run.run_id, "flow": run.flow, "seconds": seconds}
    if run.status is FlowRunStatus.SUCCEEDED:
        _log.info("flow_run_succeeded", **fields)
    elif run.status is FlowRunStatus.CANCELLED:
        _log.warning("flow_run_cancelled", **fields, reason=run.reason)
    else:
        _log.warning("flow_run_failed", **fields, reason=run.reason, code=_find_error_code(run, settlement))


def _find_error_code(run: RunChange, settlement: StepSettlement) -> str | None:
    """Return the error code of the first failed step of the run; None after a repair, which reads no steps."""
    errors = (step.error for step in settlement.ended if step.run_id == run.run_id and step.status is StepStatus.FAILED)
    return next((error["code"] for error in errors if error is not None), None)
