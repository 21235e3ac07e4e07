"""F15: flows written in Python, with the same model as in YAML."""

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal

from pydantic import ValidationError

from penstock.flows.contract import MAP
from penstock.flows.definition.json_values import ValueReference, make_step_reference
from penstock.flows.definition.spec import FailurePolicy, FlowSpec, RetryPolicy, ScheduleSpec, StepSpec, WorkSpec
from penstock.kernel.errors import Invalid
from penstock.kernel.validation import describe_error

item = ValueReference("item")  # in `do` of a map
index = ValueReference("index")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")


class StepReference:
    """A reference to a step of a `Flow`: later steps name it in `after`, and use its outputs."""

    def __init__(self, step_id: str) -> None:
        self.id = step_id
        self.outputs = make_step_reference(step_id).outputs
        self.status = make_step_reference(step_id).status


class Flow:
    """A flow that is built in Python."""

    def __init__(
        self,
        name: str,
        *,
        description: str = "",
        scope: Mapping[str, Any] | None = None,
        policy: FailurePolicy | None = None,
        max_active_runs: int | None = None,
        schedule: ScheduleSpec | None = None,
    ) -> None:
        self.name = name
        self.scope = ValueReference("scope")
        self._steps: dict[str, StepSpec] = {}
        self._options = {
            "description": description,
            "scope": dict(scope or {}),
            "policy": policy or FailurePolicy(),
            "max_active_runs": max_active_runs,
            "schedule": schedule,
        }

    def step(
        self,
        step_id: str,
        kind: str,
        *,
        after: Iterable[StepReference | str] = (),
        inputs: Mapping[str, Any] | None = None,
        when: str | ValueReference | None = None,
        on_skip: Literal["run", "skip"] = "run",
        required: bool = True,
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
    ) -> StepReference:
        """Add a step; raise Invalid if it is not valid or its id exists."""
        options = {"retry": retry, "timeout": timeout, "required": required, "on_skip": on_skip}
        return self._add(step_id, after, when, {"kind": kind, "inputs": dict(inputs or {}), **options})

    def map(
        self,
        step_id: str,
        *,
        over: ValueReference | str | list[Any],
        do: WorkSpec,
        after: Iterable[StepReference | str] = (),
        when: str | ValueReference | None = None,
        on_skip: Literal["run", "skip"] = "run",
        required: bool = True,
    ) -> StepReference:
        """Add a map: a step that executes `do` for each item of a list, which may be an output of an earlier step."""
        options = {"over": over, "do": do, "required": required, "on_skip": on_skip}
        return self._add(step_id, after, when, {"kind": MAP, **options})

    def spec(self) -> FlowSpec:
        """Return the flow with the steps added so far; raise Invalid if it is not valid."""
        try:
            return FlowSpec.model_validate({"name": self.name, "steps": self._steps, **self._options})
        except ValidationError as error:
            raise _make_flow_error(f"flow {self.name!r}", error) from None

    def _add(
        self,
        step_id: str,
        after: Iterable[StepReference | str],
        when: str | ValueReference | None,
        options: dict[str, Any],
    ) -> StepReference:
        if step_id in self._steps:
            raise Invalid("DUPLICATE_STEP", f"flow {self.name!r} already has a step {step_id!r}", step=step_id)
        before = [step.id if isinstance(step, StepReference) else step for step in after]
        # A condition is an expression as a whole: its references have no ${ and }.
        condition = None if when is None else _REFERENCE.sub(r"\1", str(when))
        try:
            self._steps[step_id] = StepSpec.model_validate({**options, "depends_on": before, "when": condition})
        except ValidationError as error:
            raise _make_flow_error(f"step {step_id!r}", error) from None
        return StepReference(step_id)


def _make_flow_error(subject: str, error: ValidationError) -> Invalid:
    problems = [
        ": ".join(filter(None, (".".join(map(str, detail["loc"])), describe_error(detail))))
        for detail in error.errors(include_url=False)
    ]
    return Invalid("BAD_FLOW", f"{subject}: {'; '.join(problems)}")
