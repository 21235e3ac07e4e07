"""F15: flows written in Python, with the same model as in YAML."""

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal

from pydantic import ValidationError

from penstock.flows.contract import MAP
from penstock.flows.definition.json_values import ValueReference, of_step
from penstock.flows.definition.spec import FlowSpec, RetryPolicy, ScheduleSpec, StepPolicy, StepSpec, WorkSpec
from penstock.kernel.errors import Invalid
from penstock.kernel.validation import describe_error

item = ValueReference("item")  # within `do` of a map
index = ValueReference("index")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")


class BuiltFlow:
    """A step of a flow being written; others come after it, and refer to its outputs."""

    def __init__(self, step_id: str) -> None:
        self.id = step_id
        self.outputs = of_step(step_id).outputs
        self.status = of_step(step_id).status


class Flow:
    """A flow being written."""

    def __init__(
        self,
        name: str,
        *,
        description: str = "",
        scope: Mapping[str, Any] | None = None,
        policy: StepPolicy | None = None,
        max_active_runs: int | None = None,
        schedule: ScheduleSpec | None = None,
    ) -> None:
        self.name = name
        self.scope = ValueReference("scope")
        self._steps: dict[str, StepSpec] = {}
        self._rest = {
            "description": description,
            "scope": dict(scope or {}),
            "policy": policy or StepPolicy(),
            "max_active_runs": max_active_runs,
            "schedule": schedule,
        }

    def step(
        self,
        step_id: str,
        kind: str,
        *,
        after: Iterable[BuiltFlow | str] = (),
        inputs: Mapping[str, Any] | None = None,
        when: str | ValueReference | None = None,
        on_skip: Literal["run", "skip"] = "run",
        required: bool = True,
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
    ) -> BuiltFlow:
        """Add a step; Invalid when it is none, or its id is taken."""
        about = {"retry": retry, "timeout": timeout, "required": required, "on_skip": on_skip}
        return self._add(step_id, after, when, {"kind": kind, "inputs": dict(inputs or {}), **about})

    def map(
        self,
        step_id: str,
        *,
        over: ValueReference | str | list[Any],
        do: WorkSpec,
        after: Iterable[BuiltFlow | str] = (),
        when: str | ValueReference | None = None,
        on_skip: Literal["run", "skip"] = "run",
        required: bool = True,
    ) -> BuiltFlow:
        """Add a step that does the same with each item of a list, known only once the run is under way."""
        about = {"over": over, "do": do, "required": required, "on_skip": on_skip}
        return self._add(step_id, after, when, {"kind": MAP, **about})

    def spec(self) -> FlowSpec:
        """The flow as it stands; Invalid when it is none."""
        try:
            return FlowSpec.model_validate({"name": self.name, "steps": self._steps, **self._rest})
        except ValidationError as error:
            raise _refused(f"flow {self.name!r}", error) from None

    def _add(
        self, step_id: str, after: Iterable[BuiltFlow | str], when: str | ValueReference | None, about: dict[str, Any]
    ) -> BuiltFlow:
        if step_id in self._steps:
            raise Invalid("DUPLICATE_STEP", f"flow {self.name!r} has a step {step_id!r} already", step=step_id)
        before = [one.id if isinstance(one, BuiltFlow) else one for one in after]
        # In a condition references stand as they are: it is an expression as a whole.
        condition = None if when is None else _REFERENCE.sub(r"\1", str(when))
        try:
            self._steps[step_id] = StepSpec.model_validate({**about, "depends_on": before, "when": condition})
        except ValidationError as error:
            raise _refused(f"step {step_id!r}", error) from None
        return BuiltFlow(step_id)


def _refused(what: str, error: ValidationError) -> Invalid:
    said = [
        ": ".join(filter(None, (".".join(map(str, one["loc"])), describe_error(one))))
        for one in error.errors(include_url=False)
    ]
    return Invalid("BAD_FLOW", f"{what}: {'; '.join(said)}")
