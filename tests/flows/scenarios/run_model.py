"""Model of a run and its steps in plain Python."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.flows.contract import MAP, FlowRunStatus, StepStatus
from penstock.flows.model import StepReport

S, R = StepStatus, FlowRunStatus
ENDED = frozenset({S.SUCCEEDED, S.FAILED, S.SKIPPED, S.CANCELLED})
SATISFIED = frozenset({S.SUCCEEDED, S.SKIPPED})
WAITING = frozenset({S.PENDING, S.READY})
OVER = frozenset({R.SUCCEEDED, R.FAILED, R.CANCELLED})


class ModelRefusal(Exception):
    """It cannot be done as things stand."""


@dataclass(eq=False, repr=False)
class ModelStep:
    """A step, as it was written and as it stands."""

    name: str
    kind: str
    depends_on: Sequence[str] = ()
    required: bool = True
    max_attempts: int | None = None
    skips_after_skip: bool = False
    when: str | None = None  # the step whose `v` must be 1
    needs: str | None = None  # the step whose `v` must be there
    over: str | Sequence[int] = ()  # the step whose `list` it goes over, or the list
    each: "ModelStep | None" = None
    within: "Mapping[str, ModelStep]" = field(default_factory=dict)
    of_map: "ModelStep | None" = None
    item: int | None = None

    status: StepStatus = S.PENDING
    fence: int = 0
    attempts: int = 0
    is_held: bool = False
    outputs: Mapping[str, Any] = field(default_factory=dict)
    artifact: bytes | None = None
    said: StepReport | None = None  # the last report that was believed
    sealed: tuple[StepReport, StepStatus, bytes] | None = None
    inside: str | None = None  # the run within

    def __repr__(self) -> str:
        about = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("name", "kind")}
        told = ", ".join(f"{name}={value!r}" for name, value in about.items() if value not in (None, 0, {}, (), []))
        return f"{self.kind} {self.name}({told})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints it."""
        printer.text("…" if cycle else repr(self))

    def copied(self, **changes: Any) -> "ModelStep":
        """The same as it was written, not begun."""
        written = ("name", "kind", "depends_on", "required", "max_attempts", "skips_after_skip", "when", "needs")
        more = ("over", "each", "within")
        return ModelStep(**{name: getattr(self, name) for name in (*written, *more)} | changes)


@dataclass(eq=False, repr=False)
class ModelRun:
    """A run and its steps, items of maps among them."""

    name: str
    steps: dict[str, ModelStep]
    flow: str | None = None
    is_fail_fast: bool = False
    parent: "tuple[ModelRun, ModelStep] | None" = None
    status: FlowRunStatus = R.PENDING
    is_touched: bool = False  # somebody skipped or retried: it waits for items of maps that are over, too
    is_reported: bool = False

    def __repr__(self) -> str:
        return f"{self.name} {self.status}"

    @property
    def proper(self) -> list[ModelStep]:
        """The steps that are no items."""
        return [step for step in self.steps.values() if step.of_map is None]

    @property
    def is_inside_over(self) -> bool:
        """Whether it was the inside of a step, and has ended."""
        return self.parent is not None and self.status in OVER

    def items(self, of_map: ModelStep) -> list[ModelStep]:
        return [step for step in self.steps.values() if step.of_map is of_map]

    def before(self, step: ModelStep) -> list[ModelStep]:
        return [self.steps[name] for name in step.depends_on]

    def after(self, some: Iterable[ModelStep]) -> set[ModelStep]:
        """All that comes after *some*, however far."""
        found, ahead = set[ModelStep](), list(some)
        while ahead:
            name = ahead.pop().name
            more = [step for step in self.proper if name in step.depends_on and step not in found]
            found.update(more)
            ahead += more
        return found

    def is_to_stop(self, step: ModelStep) -> bool:
        """F7, F9: whether a step under way is told to stop."""
        is_ended = self.status is R.CANCELLED or (self.status is R.FAILED and self.is_fail_fast)
        return is_ended or map_is_over(step)

    def is_over(self, step: ModelStep) -> bool:
        """Whether a step under way is not begun again."""
        return self.status is not R.RUNNING or map_is_over(step)


End = tuple[ModelStep, StepStatus, Mapping[str, Any]]  # with its outputs


def given_up(step: ModelStep) -> StepStatus:
    return S.FAILED if step.required else S.SKIPPED


def map_is_over(step: ModelStep) -> bool:
    return step.of_map is not None and step.of_map.status is not S.RUNNING


def is_satisfied(steps: Iterable[ModelStep]) -> bool:
    return all(step.status in SATISFIED for step in steps)


def is_done(run: ModelRun) -> bool:
    return all(step.status in ENDED for step in (run.steps.values() if run.is_touched else run.proper))


def has_failed(run: ModelRun, ended: Sequence[ModelStep]) -> bool:
    """F7: one failure is enough."""
    return run.status is R.RUNNING and any(step.status is S.FAILED and step.of_map is None for step in ended)


def failed_maps(run: ModelRun, ended: Sequence[ModelStep]) -> list[End]:
    """F14: with an item its map has failed."""
    maps = {step.of_map for step in ended if step.status is S.FAILED and step.of_map is not None}
    failed = [step for step in maps if step is not None and step.status is S.RUNNING]
    for step in failed:
        cancel_waiting(run, step)
    return [(step, given_up(step), {}) for step in failed]


def cancel_waiting(run: ModelRun, of_map: ModelStep | None = None) -> None:
    for step in run.steps.values() if of_map is None else run.items(of_map):
        if step.status in WAITING or (step.status is S.RUNNING and step.kind == MAP):
            step.status = S.CANCELLED


def refuse_behind_failure(run: ModelRun, step: ModelStep) -> None:
    if step in run.after(one for one in run.proper if one.status is S.FAILED):
        raise ModelRefusal
