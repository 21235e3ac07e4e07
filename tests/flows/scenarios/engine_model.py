"""Model of the flow engine in plain Python: no database, no counters, every rule evaluates the full state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.flows.contract import FLOW, MAP, FlowRunStatus, StepReportAnswer, StepReportKind, StepStatus
from penstock.flows.model import StepReport
from tests.flows.scenarios.run_model import (
    ENDED,
    OVER,
    SATISFIED,
    WAITING,
    End,
    ModelRefusal,
    ModelRun,
    ModelStep,
    cancel_waiting,
    failed_maps,
    given_up,
    has_failed,
    is_done,
    is_satisfied,
    refuse_behind_failure,
)

S, R = StepStatus, FlowRunStatus
MAX_LOST = 2


class EngineModel:
    """All runs."""

    def __init__(self) -> None:
        self.runs: dict[str, ModelRun] = {}
        self.limits: dict[str, int] = {}  # F16: by flow

    def steps(self) -> Iterator[tuple[ModelRun, ModelStep]]:
        for run in self.runs.values():
            for step in run.steps.values():
                yield run, step

    def create(self, run: ModelRun) -> None:
        """F2, F16: a run that begins, unless its flow has enough of them under way."""
        self.runs[run.name] = run
        if run.flow in self.limits and self._room(run.flow) < 1:
            return
        self.begin(run)

    def _room(self, flow: str) -> int:
        return self.limits[flow] - sum(run.flow == flow and run.status is R.RUNNING for run in self.runs.values())

    def begin(self, run: ModelRun) -> None:
        run.status = R.RUNNING
        self._settle(run, [])

    def start_waiting_runs(self) -> None:
        """F16: those that wait begin, oldest first; what ends at once makes capacity for the next time."""
        for flow in self.limits:
            waiting = [run for run in self.runs.values() if run.flow == flow and run.status is R.PENDING]
            for run in waiting[: max(0, self._room(flow))]:
                self.begin(run)

    # Workers.

    def claim(self, run: ModelRun, step: ModelStep) -> None:
        """F4: a READY step is somebody's, under a new fence."""
        assert step.status is S.READY, f"{run.name}/{step.name} is {step.status}"
        step.status, step.is_held = S.RUNNING, True
        step.fence += 1
        step.attempts += 1

    def report(
        self, run: ModelRun, step: ModelStep, said: StepReport, artifact: bytes | None, *, dies: bool
    ) -> StepReportAnswer:
        """F5: what becomes of a report; one that *dies* is believed, and its artifacts not yet published."""
        if not (step.is_held and step.fence == said.fence):
            return self._answer(run, step, said)
        target = self._target(run, step, said)
        if (
            artifact is not None
            and target is not S.READY
            and said.outcome in (StepReportKind.SUCCEEDED, StepReportKind.FAILED)
        ):
            step.sealed, step.is_held = (said, target, artifact), False
            if not dies:
                self.publish(run, step)
            return StepReportAnswer.SETTLED
        self._end(run, step, target, said)
        return StepReportAnswer.SETTLED

    def _answer(self, run: ModelRun, step: ModelStep, said: StepReport) -> StepReportAnswer:
        if step.sealed is not None and step.fence == said.fence:
            is_same = step.sealed[0] == said
            if is_same:
                self.publish(run, step)
            return StepReportAnswer.UNCHANGED if is_same else StepReportAnswer.CONFLICT
        if step.said is not None and step.said.fence == said.fence:
            return StepReportAnswer.UNCHANGED if step.said == said else StepReportAnswer.CONFLICT
        return StepReportAnswer.SUPERSEDED

    def _target(self, run: ModelRun, step: ModelStep, said: StepReport) -> StepStatus:
        match said.outcome:
            case StepReportKind.SUCCEEDED:
                return S.SUCCEEDED
            case StepReportKind.CANCELLED | StepReportKind.RELEASED:
                return S.CANCELLED if run.is_over(step) else S.READY
        is_left = step.attempts < (step.max_attempts or 1) and not run.is_over(step)
        return S.READY if is_left else given_up(step)

    def _end(self, run: ModelRun, step: ModelStep, target: StepStatus, said: StepReport) -> None:
        step.said, step.is_held = said, False
        if said.outcome in (StepReportKind.CANCELLED, StepReportKind.RELEASED) and target is S.READY:
            step.attempts -= 1
        self._settle(run, [(step, target, said.outputs)])

    def publish(self, run: ModelRun, step: ModelStep) -> None:
        """F6: what the report that counts left is the step's."""
        if step.sealed is None:
            return
        said, target, step.artifact = step.sealed
        step.sealed = None
        self._end(run, step, target, said)

    def expire(self, lost: Sequence[tuple[ModelRun, ModelStep]]) -> None:
        """F11: what was lost is READY again under a new fence, or was tried often enough."""
        for run in {id(run): run for run, _ in lost}.values():
            ends: list[End] = []
            for step in [step for of, step in lost if of is run]:
                step.is_held = False
                step.fence += 1
                if run.is_over(step):
                    ends.append((step, S.CANCELLED, {}))
                elif step.attempts >= (step.max_attempts or MAX_LOST):
                    ends.append((step, given_up(step), {}))
                else:
                    ends.append((step, S.READY, {}))
            self._settle(run, ends)

    # People.

    def cancel(self, run: ModelRun) -> None:
        """F9: what waits does not begin."""
        if run.status is R.CANCELLED:
            return
        if run.status in OVER:
            raise ModelRefusal
        run.status = R.CANCELLED
        cancel_waiting(run)

    def retry(self, run: ModelRun, name: str | None) -> None:
        """F10: what failed is done again, with what was cancelled because of it."""
        if run.status is R.SUCCEEDED or run.is_inside_over:
            raise ModelRefusal
        if name is None:
            wanted = {step for step in run.proper if step.status is S.FAILED}
            if not wanted and not any(step.status is S.CANCELLED for step in run.proper):
                raise ModelRefusal
        else:
            step = run.steps[name]
            if step.of_map is not None or step.status not in (S.FAILED, S.CANCELLED, S.SKIPPED):
                raise ModelRefusal
            refuse_behind_failure(run, step)
            children = [child for child in run.proper if name in child.depends_on]
            begun = [child for child in children if child.status not in (S.PENDING, S.CANCELLED) or run.items(child)]
            if step.status is S.SKIPPED and begun:
                raise ModelRefusal
            wanted = {step}
        self._reopen(run, wanted)
        self._settle(run, [])

    def skip(self, run: ModelRun, name: str) -> None:
        """F10: do without a step."""
        step = run.steps[name]
        if step.status is S.SKIPPED:
            return
        if step.of_map is not None or step.status in (S.RUNNING, S.SUCCEEDED):
            raise ModelRefusal
        if run.status in (R.PENDING, R.CANCELLED) or run.is_inside_over:
            raise ModelRefusal
        if step.status not in WAITING:
            refuse_behind_failure(run, step)
            self._reopen(run, {step}, is_skipped=True)
        run.is_touched = True
        self._settle(run, [(step, S.SKIPPED, {})])

    def resume(self, old: ModelRun, name: str, new_name: str) -> None:
        """F19: a new run that takes over what was done before a step."""
        new = ModelRun(new_name, {}, old.flow, old.is_fail_fast)
        kept: set[str] = set()
        for step in old.proper:
            again = new.steps[step.name] = step.copied()
            if step.status in SATISFIED and step.name != name and kept.issuperset(step.depends_on):
                kept.add(step.name)
                again.status, again.outputs, again.artifact = step.status, step.outputs, step.artifact
        self.create(new)

    def _reopen(self, run: ModelRun, wanted: set[ModelStep], *, is_skipped: bool = False) -> None:
        if run.status is R.SUCCEEDED:
            raise ModelRefusal
        failed = {step for step in run.proper if step.status is S.FAILED} - wanted
        behind = run.after(failed)
        opened = wanted | {step for step in run.proper if step.status is S.CANCELLED and step not in behind}
        maps = opened - wanted if is_skipped else opened
        opened |= {
            item for item in run.steps.values() if item.of_map in maps and item.status in (S.FAILED, S.CANCELLED)
        }
        run.status, run.is_reported, run.is_touched = R.RUNNING, False, True
        for step in opened:
            step.status, step.attempts, step.outputs, step.artifact = S.PENDING, 0, {}, None

    # Flows within.

    def settle_sub_runs(self, order: Sequence[str]) -> bool:
        """F14: one look at all runs that are inside; whether there was anything to do."""
        untold = [run for run in map(self.runs.__getitem__, order) if self._is_untold(run)]
        for run in untold:
            assert run.parent is not None
            if run.status not in OVER:
                self.cancel(run)
                continue
            outer, step = run.parent
            run.is_reported = True
            if step.status is S.RUNNING and step.inside == run.name:
                self._settle(outer, [(step, *self._outcome(run, outer, step))])
        return bool(untold)

    def _is_untold(self, run: ModelRun) -> bool:
        if run.parent is None or run.is_reported:
            return False
        outer, step = run.parent
        is_stopped = outer.status is R.CANCELLED or (outer.status is R.FAILED and outer.is_fail_fast)
        return run.status in OVER or step.status is not S.RUNNING or is_stopped

    def _outcome(self, run: ModelRun, outer: ModelRun, step: ModelStep) -> tuple[StepStatus, Mapping[str, Any]]:
        if run.status is R.SUCCEEDED:
            return S.SUCCEEDED, {"runId": run.name}
        if run.status is R.CANCELLED and outer.is_to_stop(step):
            return S.CANCELLED, {}
        return given_up(step), {}

    # What follows.

    def _settle(self, run: ModelRun, ends: Sequence[End]) -> None:
        """F3, F7, F8: steps end, and all that follows, round by round."""
        is_first = True
        while ends or is_first:
            is_first = False
            for step, status, outputs in ends:
                step.status, step.outputs = status, outputs if status in ENDED else {}
            if has_failed(run, [step for step, _, _ in ends]):
                run.status = R.FAILED
                cancel_waiting(run)
            elif run.status is R.RUNNING and is_done(run):
                run.status = R.FAILED if any(step.status is S.FAILED for step in run.proper) else R.SUCCEEDED
            ends = [*failed_maps(run, [step for step, _, _ in ends]), *self._looked_at(run)]

    def _looked_at(self, run: ModelRun) -> list[End]:
        if run.status is not R.RUNNING:
            return []
        finished: list[End] = [
            (step, S.SUCCEEDED, {})
            for step in run.proper
            if step.kind == MAP and step.status is S.RUNNING and is_satisfied(run.items(step))
        ]
        turns = [step for step in run.steps.values() if step.status is S.PENDING and is_satisfied(run.before(step))]
        return finished + [end for step in turns for end in self._judged(run, step)]

    def _judged(self, run: ModelRun, step: ModelStep) -> list[End]:
        """F8: the step is skipped, makes no sense, or has its turn."""
        is_after_skip = any(one.status is S.SKIPPED for one in run.before(step))
        if (step.skips_after_skip and is_after_skip) or (step.when and run.steps[step.when].outputs.get("v") != 1):
            return [(step, S.SKIPPED, {})]
        if step.kind == MAP:
            return self._expanded(run, step)
        if step.needs and "v" not in run.steps[step.needs].outputs:
            return [(step, given_up(step), {})]
        if step.kind == FLOW:
            self._begin_inside(run, step)
        else:
            step.status = S.READY
        return []

    def _expanded(self, run: ModelRun, step: ModelStep) -> list[End]:
        items = run.items(step)
        if not items:
            over = run.steps[step.over].outputs.get("list") if isinstance(step.over, str) else step.over
            if over is None:
                return [(step, given_up(step), {})]
            assert step.each is not None
            items = [
                step.each.copied(name=f"{step.name}[{place}]", of_map=step, item=item)
                for place, item in enumerate(over)
            ]
            run.steps.update({item.name: item for item in items})
        step.status = S.RUNNING
        step.fence += 1
        step.attempts += 1
        for item in items:
            item.status = S.READY if item.status is S.PENDING else item.status
        return [(step, S.SUCCEEDED, {})] if is_satisfied(items) else []

    def _begin_inside(self, run: ModelRun, step: ModelStep) -> None:
        step.status = S.RUNNING
        step.fence += 1
        step.attempts += 1
        step.inside = f"{run.name}~{step.name}" + (f"~{step.fence}" if step.fence > 1 else "")
        steps = {name: one.copied() for name, one in step.within.items()}
        self.create(ModelRun(step.inside, steps, parent=(run, step)))
