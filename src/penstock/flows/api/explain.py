"""F18: explain in words why a step has its status, and how to change it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.flows.contract import FLOW, MAP, FlowRunStatus, StepStatus
from penstock.flows.model import UPSTREAM_FAILED
from penstock.kernel.text import format_duration

AHEAD_LIMIT = 1_000  # steps ahead in the queue are counted up to here
_NAMED = 5  # dependencies that are named; further ones are counted


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The state of a step, its run and its queue."""

    run_id: str
    step_id: str
    kind: str
    status: StepStatus
    due_at: datetime
    attempts: int = 0
    worker: str | None = None
    reason: str | None = None
    error: Mapping[str, Any] | None = None
    lease_until: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    is_sealed: bool = False
    sub_run: str | None = None
    run_status: FlowRunStatus = FlowRunStatus.RUNNING
    run_reason: str | None = None
    flow: str | None = None
    unmet: Sequence[tuple[str, str]] = ()  # the unmet dependencies with their status
    items: tuple[int, int] = (0, 0)  # of a map: all items, and the ended items
    busy: int = 0  # running steps of its kind
    ahead: int = 0  # steps of its kind ahead of it in the queue
    limit: int | None = None  # F16: the limit of running steps of its kind
    active: int = 0  # active runs of its flow
    max_active_runs: int | None = None


@dataclass(frozen=True, slots=True)
class StepExplanation:
    """F18: the reason for the status of a step, and a hint how to change it."""

    why: str
    hint: str | None = None


def explain(step: StepFacts, now: datetime) -> StepExplanation:
    """F18: explain why *step* waits, runs, or how it ended."""
    match step.status:
        case StepStatus.PENDING:
            return _explain_pending(step)
        case StepStatus.READY:
            return _explain_ready(step, now)
        case StepStatus.RUNNING:
            return _explain_running(step, now)
        case _:
            return _explain_ended(step, now)


def _explain_pending(step: StepFacts) -> StepExplanation:
    if step.run_status is FlowRunStatus.PENDING:
        limit = "" if step.max_active_runs is None else f", and `maxActiveRuns` is {step.max_active_runs}"
        why = f"the run has not started: {_count(step.active, 'run', f'of flow {step.flow}')} active{limit}"
        return StepExplanation(why, "it starts when one of them ends; or increase `maxActiveRuns` of the flow")
    if step.unmet:
        named = ", ".join(f"{name} ({status})" for name, status in step.unmet[:_NAMED])
        more = f" and {len(step.unmet) - _NAMED} more" if len(step.unmet) > _NAMED else ""
        return StepExplanation(
            f"it waits for {named}{more}", f"`penstock flow show {step.run_id} --why {shlex.quote(step.unmet[0][0])}`"
        )
    return StepExplanation("all its dependencies have ended: it becomes READY now", "ask again in a moment")


def _explain_ready(step: StepFacts, now: datetime) -> StepExplanation:
    if step.due_at > now:
        failed = f"attempt {step.attempts} did not succeed{_format_reason(step.reason)}"
        why = f"it will be retried in {format_duration(step.due_at - now)}; {failed}"
        return StepExplanation(why, "its `retry.backoff` sets the delay")
    if step.limit is not None and step.busy >= step.limit:
        why = f"{_count(step.busy, 'step', f'of kind {step.kind}')} running, and the limit is {step.limit}"
        return StepExplanation(why, f"it starts when one of them ends; or increase `flows.limits.{step.kind}`")
    kind = f"of kind {step.kind}"
    queue = f"{_count(step.ahead, 'step', kind, AHEAD_LIMIT)} ahead of it, {_count(step.busy, 'step', kind)} running"
    failed = f"; attempt {step.attempts} did not succeed{_format_reason(step.reason)}" if step.attempts else ""
    why = f"it has waited for a worker for {format_duration(now - step.due_at)}; {queue}{failed}"
    hint = None
    if not step.busy:
        hint = f"start a worker: `penstock work flows --kinds {step.kind}`, or your own worker for this kind"
    return StepExplanation(why, hint)


def _explain_running(step: StepFacts, now: datetime) -> StepExplanation:
    if step.kind == MAP:
        items, ended = step.items
        return StepExplanation(f"{ended} of its {items} items have ended", None)
    if step.kind == FLOW:
        return StepExplanation(f"it waits for run {step.sub_run}", f"`penstock flow show {step.sub_run}`")
    age = format_duration(now - (step.started_at or now))
    start = f"{step.worker} started it {age} ago (attempt {step.attempts})"
    if step.is_sealed or step.lease_until is None:
        return StepExplanation(f"{start} and completed it: its artifacts are being published", None)
    if step.lease_until < now:
        why = f"{start}, and its lease expired {format_duration(now - step.lease_until)} ago"
        return StepExplanation(why, "it becomes READY again within seconds; if not, check `penstock status`")
    run = "" if step.run_status is FlowRunStatus.RUNNING else f"; the run is {step.run_status}"
    return StepExplanation(f"{start}; its lease expires in {format_duration(step.lease_until - now)}{run}", None)


def _explain_ended(step: StepFacts, now: datetime) -> StepExplanation:
    ago = f"{format_duration(now - step.finished_at)} ago" if step.finished_at else "at an unknown time"
    error = f"{step.error['code']}: {step.error['message']}" if step.error else None
    name = shlex.quote(step.step_id)
    retry = f"`penstock flow retry {step.run_id} {name}`"
    match step.status:
        case StepStatus.SUCCEEDED:
            return StepExplanation(f"it succeeded {ago}{_format_reason(step.reason)}")
        case StepStatus.FAILED:
            hint = f"fix the cause, then {retry}; or skip it: `penstock flow skip {step.run_id} {name}`"
            return StepExplanation(f"it failed {ago}, attempt {step.attempts}{_format_reason(error)}", hint)
        case StepStatus.SKIPPED:
            why = "; ".join(part for part in (step.reason, error) if part)
            if step.run_status is FlowRunStatus.SUCCEEDED:
                retry = f"`penstock flow run --resume {step.run_id} --from {name}`"
            return StepExplanation(f"it was skipped {ago}{_format_reason(why)}", f"to execute it, run {retry}")
    reason = step.run_reason if step.reason == UPSTREAM_FAILED else step.reason
    return StepExplanation(
        f"it was cancelled {ago}{_format_reason(reason)}", f"to execute it, run `penstock flow retry {step.run_id}`"
    )


def _format_reason(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def _count(number: int, noun: str, owner: str, limit: int | None = None) -> str:
    if limit is not None and number >= limit:
        return f"{limit} or more {noun}s {owner} are"
    return f"1 {noun} {owner} is" if number == 1 else f"{number or 'no'} {noun}s {owner} are"
