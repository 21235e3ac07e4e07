"""F18: why a step is where it is, in words, and what would move it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.flows.contract import FLOW, MAP, FlowRunStatus, StepStatus
from penstock.flows.model import UPSTREAM_FAILED
from penstock.kernel.text import format_duration

AHEAD_LIMIT = 1_000  # nobody counts further
_NAMED = 5  # steps that are named; the others are counted


@dataclass(frozen=True, slots=True)
class StepFacts:
    """All that is known of a step and what is around it."""

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
    inner_run: str | None = None
    run_status: FlowRunStatus = FlowRunStatus.RUNNING
    run_reason: str | None = None
    flow: str | None = None
    unmet: Sequence[tuple[str, str]] = ()  # what it waits for, and how that stands
    items: tuple[int, int] = (0, 0)  # of a map: all, and those that have ended
    busy: int = 0  # steps of its kind under way
    ahead: int = 0  # steps of its kind that come before it
    limit: int | None = None  # F16: how many of its kind may be under way
    active: int = 0  # runs of its flow under way
    max_active_runs: int | None = None


@dataclass(frozen=True, slots=True)
class StepExplanation:
    """In words, and what would move it."""

    why: str
    hint: str | None = None


def explain(step: StepFacts, now: datetime) -> StepExplanation:
    """F18: why *step* is not running, or is still running, or how it ended."""
    match step.status:
        case StepStatus.PENDING:
            return _pending(step)
        case StepStatus.READY:
            return _ready(step, now)
        case StepStatus.RUNNING:
            return _running(step, now)
        case _:
            return _ended(step, now)


def _pending(step: StepFacts) -> StepExplanation:
    if step.run_status is FlowRunStatus.PENDING:
        most = "as many as there may be" if step.max_active_runs is None else f"at most {step.max_active_runs} may be"
        why = f"the run has not begun: {_several(step.active, 'run', f'of flow {step.flow}')} under way, {most}"
        return StepExplanation(why, "it begins when one of them ends; `maxActiveRuns` of the flow says how many may")
    if step.unmet:
        named = ", ".join(f"{name} ({status})" for name, status in step.unmet[:_NAMED])
        more = f" and {len(step.unmet) - _NAMED} more" if len(step.unmet) > _NAMED else ""
        return StepExplanation(f"it waits for {named}{more}", f"ask why {step.unmet[0][0]} has not ended")
    return StepExplanation("all it waits for is there: its turn comes now", "ask again in a moment")


def _ready(step: StepFacts, now: datetime) -> StepExplanation:
    if step.due_at > now:
        tried = f"attempt {step.attempts} did not succeed{_because(step.reason)}"
        return StepExplanation(
            f"it is tried again in {format_duration(step.due_at - now)}; {tried}", "its `retry.backoff` says when"
        )
    if step.limit is not None and step.busy >= step.limit:
        why = f"{_several(step.busy, 'step', f'of kind {step.kind}')} under way, and no more than {step.limit} may be"
        return StepExplanation(
            why, f"it begins when one of them ends; flows.limits says how many {step.kind} there may be"
        )
    of = f"of kind {step.kind}"
    queue = f"{_several(step.ahead, 'step', of, AHEAD_LIMIT)} before it, {_several(step.busy, 'step', of)} under way"
    again = f"; attempt {step.attempts} did not succeed{_because(step.reason)}" if step.attempts else ""
    why = f"nobody has claimed it for {format_duration(now - step.due_at)}; {queue}{again}"
    hint = None
    if not step.busy:
        hint = f"does anybody work on {step.kind}? `penstock work flows --kinds {step.kind}`, or a worker of your own"
    return StepExplanation(why, hint)


def _running(step: StepFacts, now: datetime) -> StepExplanation:
    if step.kind == MAP:
        items, ended = step.items
        return StepExplanation(f"{ended} of its {items} items have ended", None)
    if step.kind == FLOW:
        return StepExplanation(f"it waits for run {step.inner_run}", f"`penstock flow show {step.inner_run}`")
    began = f"{step.worker} began it {format_duration(now - (step.started_at or now))} ago (attempt {step.attempts})"
    if step.is_sealed or step.lease_until is None:
        return StepExplanation(f"{began} and has done it: what it left is being published", None)
    if step.lease_until < now:
        why = f"{began}, and its lease ran out {format_duration(now - step.lease_until)} ago"
        return StepExplanation(why, "it is soon taken back, and handed out again")
    told = "" if step.run_status is FlowRunStatus.RUNNING else f"; the run is {step.run_status}"
    return StepExplanation(f"{began}, and holds it for another {format_duration(step.lease_until - now)}{told}", None)


def _ended(step: StepFacts, now: datetime) -> StepExplanation:
    ago = f"{format_duration(now - step.finished_at)} ago" if step.finished_at else "some time ago"
    error = f"{step.error['code']}: {step.error['message']}" if step.error else None
    again = f"`penstock flow retry {step.run_id} {step.step_id}`"
    match step.status:
        case StepStatus.SUCCEEDED:
            return StepExplanation(f"it succeeded {ago}{_because(step.reason)}")
        case StepStatus.FAILED:
            hint = f"mend the cause, then {again}; or do without it: `penstock flow skip`"
            return StepExplanation(f"it failed {ago}, attempt {step.attempts}{_because(error)}", hint)
        case StepStatus.SKIPPED:
            why = "; ".join(part for part in (step.reason, error) if part)
            if step.run_status is FlowRunStatus.SUCCEEDED:
                again = f"`penstock flow run --resume {step.run_id} --from {step.step_id}`: a new run"
            return StepExplanation(f"it was skipped {ago}{_because(why)}", f"{again} gives it its turn after all")
    reason = step.run_reason if step.reason == UPSTREAM_FAILED else step.reason
    return StepExplanation(
        f"it was cancelled {ago}{_because(reason)}", f"`penstock flow retry {step.run_id}` takes it up"
    )


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def _several(number: int, what: str, of: str, limit: int | None = None) -> str:
    if limit is not None and number >= limit:
        return f"{limit} {what}s {of} or more are"
    return f"1 {what} {of} is" if number == 1 else f"{number or 'no'} {what}s {of} are"
