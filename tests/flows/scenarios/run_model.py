"""Model of a run and its steps in plain Python."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.flows.contract import MAP, FlowRunStatus, StepStatus
from penstock.flows.model import StepReport

S, R = StepStatus, FlowRunStatus
ENDED_STEPS = frozenset({S.SUCCEEDED, S.FAILED, S.SKIPPED, S.CANCELLED})
SATISFIED_STEPS = frozenset({S.SUCCEEDED, S.SKIPPED})
WAITING_STEPS = frozenset({S.PENDING, S.READY})
ENDED_RUNS = frozenset({R.SUCCEEDED, R.FAILED, R.CANCELLED})


class ModelRefusal(Exception):
    """An operation that the status of the run or step does not allow."""


@dataclass(eq=False, repr=False)
class ModelStep:
    """The definition of a step, and its state."""

    name: str
    kind: str
    depends_on: Sequence[str] = ()
    required: bool = True
    max_attempts: int | None = None
    skips_after_skip: bool = False
    when: str | None = None  # the step whose output `v` must be 1
    required_output: str | None = None  # the step whose output `v` is an input of this step
    over: str | Sequence[int] = ()  # the step whose output `list` has the items, or the list itself
    each: "ModelStep | None" = None
    inner_steps: "Mapping[str, ModelStep]" = field(default_factory=dict)
    parent_map: "ModelStep | None" = None
    item: int | None = None

    status: StepStatus = S.PENDING
    fence: int = 0
    attempts: int = 0
    is_claimed: bool = False
    outputs: Mapping[str, Any] = field(default_factory=dict)
    artifact: bytes | None = None
    last_report: StepReport | None = None  # the last accepted report
    sealed: tuple[StepReport, StepStatus, bytes] | None = None
    sub_run: str | None = None  # the name of the inner run

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("name", "kind")}
        fields = ", ".join(f"{name}={value!r}" for name, value in values.items() if value not in (None, 0, {}, (), []))
        return f"{self.kind} {self.name}({fields})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the step in a failure of Hypothesis."""
        printer.text("…" if cycle else repr(self))

    def copy(self, **changes: Any) -> "ModelStep":
        """Return a step with the same definition that has not started."""
        definition = ("name", "kind", "depends_on", "required", "max_attempts", "skips_after_skip", "when")
        more = ("required_output", "over", "each", "inner_steps")
        return ModelStep(**{name: getattr(self, name) for name in (*definition, *more)} | changes)


@dataclass(eq=False, repr=False)
class ModelRun:
    """A run and its steps, including the items of maps."""

    name: str
    steps: dict[str, ModelStep]
    flow: str | None = None
    is_fail_fast: bool = False
    parent: "tuple[ModelRun, ModelStep] | None" = None
    status: FlowRunStatus = R.PENDING
    is_edited: bool = False  # after a skip or retry, the run also waits for items of ended maps
    is_reported: bool = False

    def __repr__(self) -> str:
        return f"{self.name} {self.status}"

    @property
    def declared_steps(self) -> list[ModelStep]:
        """Return the steps of the definition, without items of maps."""
        return [step for step in self.steps.values() if step.parent_map is None]

    @property
    def is_ended_sub_run(self) -> bool:
        """Return whether this is an inner run that has ended."""
        return self.parent is not None and self.status in ENDED_RUNS

    def list_items(self, parent_map: ModelStep) -> list[ModelStep]:
        return [step for step in self.steps.values() if step.parent_map is parent_map]

    def find_predecessors(self, step: ModelStep) -> list[ModelStep]:
        return [self.steps[name] for name in step.depends_on]

    def find_successors(self, steps: Iterable[ModelStep]) -> set[ModelStep]:
        """Return all direct and indirect successors of *steps*."""
        successors, pending = set[ModelStep](), list(steps)
        while pending:
            name = pending.pop().name
            more = [step for step in self.declared_steps if name in step.depends_on and step not in successors]
            successors.update(more)
            pending += more
        return successors

    def must_stop(self, step: ModelStep) -> bool:
        """F7, F9: return whether the worker of a running step is asked to stop."""
        is_ended = self.status is R.CANCELLED or (self.status is R.FAILED and self.is_fail_fast)
        return is_ended or is_map_ended(step)

    def is_never_retried(self, step: ModelStep) -> bool:
        """Return whether a running step gets no further attempt."""
        return self.status is not R.RUNNING or is_map_ended(step)


End = tuple[ModelStep, StepStatus, Mapping[str, Any]]  # a step, its final status, and its outputs


def get_failure_status(step: ModelStep) -> StepStatus:
    return S.FAILED if step.required else S.SKIPPED


def is_map_ended(step: ModelStep) -> bool:
    return step.parent_map is not None and step.parent_map.status is not S.RUNNING


def is_satisfied(steps: Iterable[ModelStep]) -> bool:
    return all(step.status in SATISFIED_STEPS for step in steps)


def is_done(run: ModelRun) -> bool:
    return all(step.status in ENDED_STEPS for step in (run.steps.values() if run.is_edited else run.declared_steps))


def has_new_failure(run: ModelRun, ended: Sequence[ModelStep]) -> bool:
    """F7: return whether a failure among the *ended* steps fails the run."""
    return run.status is R.RUNNING and any(step.status is S.FAILED and step.parent_map is None for step in ended)


def fail_maps(run: ModelRun, ended: Sequence[ModelStep]) -> list[End]:
    """F14: fail each map with a failed item."""
    maps = {step.parent_map for step in ended if step.status is S.FAILED and step.parent_map is not None}
    failed = [step for step in maps if step is not None and step.status is S.RUNNING]
    for step in failed:
        cancel_waiting(run, step)
    return [(step, get_failure_status(step), {}) for step in failed]


def cancel_waiting(run: ModelRun, parent_map: ModelStep | None = None) -> None:
    for step in run.steps.values() if parent_map is None else run.list_items(parent_map):
        if step.status in WAITING_STEPS or (step.status is S.RUNNING and step.kind == MAP):
            step.status = S.CANCELLED


def refuse_after_failure(run: ModelRun, step: ModelStep) -> None:
    if step in run.find_successors(other for other in run.declared_steps if other.status is S.FAILED):
        raise ModelRefusal
