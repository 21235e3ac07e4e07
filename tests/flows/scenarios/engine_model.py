"""Model of the flow engine in plain Python: no database, no counters, every rule evaluates the full state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.flows.contract import FLOW, MAP, FlowRunStatus, StepReportAnswer, StepReportKind, StepStatus
from penstock.flows.model import StepReport
from tests.flows.scenarios.run_model import (
    ENDED_RUNS,
    ENDED_STEPS,
    SATISFIED_STEPS,
    WAITING_STEPS,
    End,
    ModelRefusal,
    ModelRun,
    ModelStep,
    cancel_waiting,
    fail_maps,
    get_failure_status,
    has_new_failure,
    is_done,
    is_satisfied,
    refuse_after_failure,
)

S, R = StepStatus, FlowRunStatus
MAX_LOST = 2


class EngineModel:
    """The state of all runs."""

    def __init__(self) -> None:
        self.runs: dict[str, ModelRun] = {}
        self.limits: dict[str, int] = {}  # F16: the largest number of active runs, by flow

    def steps(self) -> Iterator[tuple[ModelRun, ModelStep]]:
        for run in self.runs.values():
            for step in run.steps.values():
                yield run, step

    def create(self, run: ModelRun) -> None:
        """F2, F16: create a run, and start it unless its flow has reached its limit of running runs."""
        self.runs[run.name] = run
        if run.flow in self.limits and self._count_free_slots(run.flow) < 1:
            return
        self.start_run(run)

    def _count_free_slots(self, flow: str) -> int:
        return self.limits[flow] - sum(run.flow == flow and run.status is R.RUNNING for run in self.runs.values())

    def start_run(self, run: ModelRun) -> None:
        run.status = R.RUNNING
        self._settle(run, [])

    def start_waiting_runs(self) -> None:
        """F16: start waiting runs, oldest first; a run that ends immediately frees capacity for the next call."""
        for flow in self.limits:
            waiting = [run for run in self.runs.values() if run.flow == flow and run.status is R.PENDING]
            for run in waiting[: max(0, self._count_free_slots(flow))]:
                self.start_run(run)

    # Workers.

    def claim(self, run: ModelRun, step: ModelStep) -> None:
        """F4: give a READY step to a worker, under a new fence."""
        assert step.status is S.READY, f"{run.name}/{step.name} is {step.status}"
        step.status, step.is_claimed = S.RUNNING, True
        step.fence += 1
        step.attempts += 1

    def report(
        self, run: ModelRun, step: ModelStep, report: StepReport, artifact: bytes | None, *, dies: bool
    ) -> StepReportAnswer:
        """F5: accept or reject a report; with *dies*, the process dies before it publishes the artifacts."""
        if not (step.is_claimed and step.fence == report.fence):
            return self._answer_late_report(run, step, report)
        target = self._choose_target(run, step, report)
        if (
            artifact is not None
            and target is not S.READY
            and report.outcome in (StepReportKind.SUCCEEDED, StepReportKind.FAILED)
        ):
            step.sealed, step.is_claimed = (report, target, artifact), False
            if not dies:
                self.publish(run, step)
            return StepReportAnswer.SETTLED
        self._end_step(run, step, target, report)
        return StepReportAnswer.SETTLED

    def _answer_late_report(self, run: ModelRun, step: ModelStep, report: StepReport) -> StepReportAnswer:
        if step.sealed is not None and step.fence == report.fence:
            is_same = step.sealed[0] == report
            if is_same:
                self.publish(run, step)
            return StepReportAnswer.UNCHANGED if is_same else StepReportAnswer.CONFLICT
        if step.last_report is not None and step.last_report.fence == report.fence:
            return StepReportAnswer.UNCHANGED if step.last_report == report else StepReportAnswer.CONFLICT
        return StepReportAnswer.SUPERSEDED

    def _choose_target(self, run: ModelRun, step: ModelStep, report: StepReport) -> StepStatus:
        match report.outcome:
            case StepReportKind.SUCCEEDED:
                return S.SUCCEEDED
            case StepReportKind.CANCELLED | StepReportKind.RELEASED:
                return S.CANCELLED if run.is_never_retried(step) else S.READY
        has_attempts_left = step.attempts < (step.max_attempts or 1) and not run.is_never_retried(step)
        return S.READY if has_attempts_left else get_failure_status(step)

    def _end_step(self, run: ModelRun, step: ModelStep, target: StepStatus, report: StepReport) -> None:
        step.last_report, step.is_claimed = report, False
        if report.outcome in (StepReportKind.CANCELLED, StepReportKind.RELEASED) and target is S.READY:
            step.attempts -= 1
        self._settle(run, [(step, target, report.outputs)])

    def publish(self, run: ModelRun, step: ModelStep) -> None:
        """F6: publish the artifact of the accepted report, and end the step."""
        if step.sealed is None:
            return
        report, target, step.artifact = step.sealed
        step.sealed = None
        self._end_step(run, step, target, report)

    def expire(self, lost: Sequence[tuple[ModelRun, ModelStep]]) -> None:
        """F11: make steps with a lost lease READY under a new fence, or end them after their last attempt."""
        for run in {id(run): run for run, _ in lost}.values():
            ends: list[End] = []
            for step in [step for owner, step in lost if owner is run]:
                step.is_claimed = False
                step.fence += 1
                if run.is_never_retried(step):
                    ends.append((step, S.CANCELLED, {}))
                elif step.attempts >= (step.max_attempts or MAX_LOST):
                    ends.append((step, get_failure_status(step), {}))
                else:
                    ends.append((step, S.READY, {}))
            self._settle(run, ends)

    # Operators.

    def cancel(self, run: ModelRun) -> None:
        """F9: cancel a run and its waiting steps."""
        if run.status is R.CANCELLED:
            return
        if run.status in ENDED_RUNS:
            raise ModelRefusal
        run.status = R.CANCELLED
        cancel_waiting(run)

    def retry(self, run: ModelRun, name: str | None) -> None:
        """F10: reopen failed steps, and the steps that were cancelled because of them."""
        if run.status is R.SUCCEEDED or run.is_ended_sub_run:
            raise ModelRefusal
        if name is None:
            requested = {step for step in run.declared_steps if step.status is S.FAILED}
            if not requested and not any(step.status is S.CANCELLED for step in run.declared_steps):
                raise ModelRefusal
        else:
            step = run.steps[name]
            if step.parent_map is not None or step.status not in (S.FAILED, S.CANCELLED, S.SKIPPED):
                raise ModelRefusal
            refuse_after_failure(run, step)
            children = [child for child in run.declared_steps if name in child.depends_on]
            started_children = [
                child for child in children if child.status not in (S.PENDING, S.CANCELLED) or run.list_items(child)
            ]
            if step.status is S.SKIPPED and started_children:
                raise ModelRefusal
            requested = {step}
        self._reopen(run, requested)
        self._settle(run, [])

    def skip(self, run: ModelRun, name: str) -> None:
        """F10: skip a step."""
        step = run.steps[name]
        if step.status is S.SKIPPED:
            return
        if step.parent_map is not None or step.status in (S.RUNNING, S.SUCCEEDED):
            raise ModelRefusal
        if run.status in (R.PENDING, R.CANCELLED) or run.is_ended_sub_run:
            raise ModelRefusal
        if step.status not in WAITING_STEPS:
            refuse_after_failure(run, step)
            self._reopen(run, {step}, is_skipped=True)
        run.is_edited = True
        self._settle(run, [(step, S.SKIPPED, {})])

    def resume(self, old: ModelRun, name: str, new_name: str) -> None:
        """F19: create a run that takes over the finished steps before a step."""
        new = ModelRun(new_name, {}, old.flow, old.is_fail_fast)
        finished: set[str] = set()
        for step in old.declared_steps:
            copy = new.steps[step.name] = step.copy()
            if step.status in SATISFIED_STEPS and step.name != name and finished.issuperset(step.depends_on):
                finished.add(step.name)
                copy.status, copy.outputs, copy.artifact = step.status, step.outputs, step.artifact
        self.create(new)

    def _reopen(self, run: ModelRun, requested: set[ModelStep], *, is_skipped: bool = False) -> None:
        if run.status is R.SUCCEEDED:
            raise ModelRefusal
        failed = {step for step in run.declared_steps if step.status is S.FAILED} - requested
        behind = run.find_successors(failed)
        opened = requested | {step for step in run.declared_steps if step.status is S.CANCELLED and step not in behind}
        maps = opened - requested if is_skipped else opened
        opened |= {
            item for item in run.steps.values() if item.parent_map in maps and item.status in (S.FAILED, S.CANCELLED)
        }
        run.status, run.is_reported, run.is_edited = R.RUNNING, False, True
        for step in opened:
            step.status, step.attempts, step.outputs, step.artifact = S.PENDING, 0, {}, None

    # Inner runs.

    def settle_sub_runs(self, order: Sequence[str]) -> bool:
        """F14: settle all inner runs once; return whether any needed it."""
        unsettled = [run for run in map(self.runs.__getitem__, order) if self._needs_settling(run)]
        for run in unsettled:
            assert run.parent is not None
            if run.status not in ENDED_RUNS:
                self.cancel(run)
                continue
            outer, step = run.parent
            run.is_reported = True
            if step.status is S.RUNNING and step.sub_run == run.name:
                self._settle(outer, [(step, *self._choose_outcome(run, outer, step))])
        return bool(unsettled)

    def _needs_settling(self, run: ModelRun) -> bool:
        if run.parent is None or run.is_reported:
            return False
        outer, step = run.parent
        is_stopped = outer.status is R.CANCELLED or (outer.status is R.FAILED and outer.is_fail_fast)
        return run.status in ENDED_RUNS or step.status is not S.RUNNING or is_stopped

    def _choose_outcome(self, run: ModelRun, outer: ModelRun, step: ModelStep) -> tuple[StepStatus, Mapping[str, Any]]:
        if run.status is R.SUCCEEDED:
            return S.SUCCEEDED, {"runId": run.name}
        if run.status is R.CANCELLED and outer.must_stop(step):
            return S.CANCELLED, {}
        return get_failure_status(step), {}

    # Consequences of ended steps.

    def _settle(self, run: ModelRun, ends: Sequence[End]) -> None:
        """F3, F7, F8: end steps, and apply all consequences, round by round."""
        is_first = True
        while ends or is_first:
            is_first = False
            for step, status, outputs in ends:
                step.status, step.outputs = status, outputs if status in ENDED_STEPS else {}
            if has_new_failure(run, [step for step, _, _ in ends]):
                run.status = R.FAILED
                cancel_waiting(run)
            elif run.status is R.RUNNING and is_done(run):
                run.status = R.FAILED if any(step.status is S.FAILED for step in run.declared_steps) else R.SUCCEEDED
            ends = [*fail_maps(run, [step for step, _, _ in ends]), *self._evaluate_run(run)]

    def _evaluate_run(self, run: ModelRun) -> list[End]:
        if run.status is not R.RUNNING:
            return []
        finished: list[End] = [
            (step, S.SUCCEEDED, {})
            for step in run.declared_steps
            if step.kind == MAP and step.status is S.RUNNING and is_satisfied(run.list_items(step))
        ]
        ready = [
            step
            for step in run.steps.values()
            if step.status is S.PENDING and is_satisfied(run.find_predecessors(step))
        ]
        return finished + [end for step in ready for end in self._evaluate_step(run, step)]

    def _evaluate_step(self, run: ModelRun, step: ModelStep) -> list[End]:
        """F8: skip a step, end it for a missing input, or make it ready."""
        is_after_skip = any(before.status is S.SKIPPED for before in run.find_predecessors(step))
        if (step.skips_after_skip and is_after_skip) or (step.when and run.steps[step.when].outputs.get("v") != 1):
            return [(step, S.SKIPPED, {})]
        if step.kind == MAP:
            return self._expand_map(run, step)
        if step.required_output and "v" not in run.steps[step.required_output].outputs:
            return [(step, get_failure_status(step), {})]
        if step.kind == FLOW:
            self._start_sub_run(run, step)
        else:
            step.status = S.READY
        return []

    def _expand_map(self, run: ModelRun, step: ModelStep) -> list[End]:
        items = run.list_items(step)
        if not items:
            over = run.steps[step.over].outputs.get("list") if isinstance(step.over, str) else step.over
            if over is None:
                return [(step, get_failure_status(step), {})]
            assert step.each is not None
            items = [
                step.each.copy(name=f"{step.name}[{position}]", parent_map=step, item=item)
                for position, item in enumerate(over)
            ]
            run.steps.update({item.name: item for item in items})
        step.status = S.RUNNING
        step.fence += 1
        step.attempts += 1
        for item in items:
            item.status = S.READY if item.status is S.PENDING else item.status
        return [(step, S.SUCCEEDED, {})] if is_satisfied(items) else []

    def _start_sub_run(self, run: ModelRun, step: ModelStep) -> None:
        step.status = S.RUNNING
        step.fence += 1
        step.attempts += 1
        step.sub_run = f"{run.name}~{step.name}" + (f"~{step.fence}" if step.fence > 1 else "")
        steps = {name: inner.copy() for name, inner in step.inner_steps.items()}
        self.create(ModelRun(step.sub_run, steps, parent=(run, step)))
