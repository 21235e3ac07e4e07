"""F2, F15: the definition of a flow; YAML, JSON and Python use the same model."""

from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from penstock.flows.contract import CODE, NAME
from penstock.flows.definition.json_values import to_json
from penstock.kernel.config.sections import Duration

Name = Annotated[str, StringConstraints(pattern=NAME)]
Code = Annotated[str, StringConstraints(pattern=CODE)]
Json = Annotated[dict[str, Any], AfterValidator(to_json)]
_MAX_DURATION = timedelta(days=366)
Expression = Annotated[str, Field(min_length=1, max_length=2_000)]


class SpecModel(BaseModel):
    """A base model of definitions, with camelCase names; an unknown key is an error."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class RetryPolicy(SpecModel):
    """F10: retries of a step: number of attempts, delays, and the errors that are retried."""

    max_attempts: int = Field(3, ge=1, le=1_000, description="Maximum number of attempts, including the first one.")
    backoff: Duration = Field(
        timedelta(seconds=1),
        le=_MAX_DURATION,
        description="Delay after the first failed attempt. It doubles with each further attempt.",
    )
    max_backoff: Duration = Field(
        timedelta(minutes=5), le=_MAX_DURATION, description="Maximum delay between two attempts."
    )
    retryable: list[Code] | None = Field(
        None, description="Error codes that are retried. Default: all codes except `final`."
    )
    final: list[Code] = Field(default_factory=list, description="Error codes that are never retried.")


class WorkSpec(SpecModel):
    """The work of a step, or of each item of a map."""

    kind: Name = Field(description="Kind of the step. It determines which worker executes the step.")
    inputs: Json = Field(
        default_factory=dict, description="Inputs as JSON. `${…}` refers to the scope and to outputs of earlier steps."
    )
    required: bool = Field(True, description="F7: if false, a failed step is SKIPPED, and the run continues.")
    retry: RetryPolicy | None = Field(None, description="F10: retries after errors. Default: errors are final.")
    timeout: Annotated[Duration, Field(gt=timedelta(0), le=_MAX_DURATION)] | None = Field(
        None, description="Maximum duration of one attempt. Default: no limit."
    )


class StepSpec(WorkSpec):
    """A step of a flow."""

    depends_on: list[str] = Field(default_factory=list, description="Steps that must end before this step starts.")
    when: Expression | None = Field(None, description="F8: condition; the step is skipped if it is false.")
    on_skip: Literal["run", "skip"] = Field(
        "run", description="F8: `skip` also skips this step if a dependency was skipped."
    )
    over: Annotated[Any, AfterValidator(to_json)] = Field(
        None, description="F14, for kind `map`: a list, or a `${…}` reference to a list."
    )
    do: WorkSpec | None = Field(None, description="F14, for kind `map`: the work for each `${item}`.")


class FailurePolicy(SpecModel):
    """F7: the effect of a failed step on the other steps of its run."""

    fail_fast: bool = Field(False, description="If true, a failed step also stops the running steps.")


class ScheduleSpec(SpecModel):
    """F16: the schedule of a flow."""

    cron: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        description="Cron expression with five fields: minute, hour, day of month, month, day of week."
    )
    timezone: Annotated[str, Field(max_length=100)] = Field(
        "UTC", description="IANA time zone of the cron expression, e.g. Europe/Berlin."
    )
    overlap: bool = Field(
        False, description="If true, a run starts even if the previous scheduled run is still active."
    )
    catch_up: Literal["none", "last", "all"] = Field(
        "last", description="Missed times that get a run: none, the last one, or all."
    )
    scope: Json = Field(default_factory=dict, description="Scope of the scheduled runs.")


def _index_steps(steps: Any) -> Any:
    """Convert a list of steps with ids to a map; raise ValueError for a missing or repeated id."""
    if not isinstance(steps, list):
        return steps
    indexed: dict[str, Any] = {}
    for number, step in enumerate(steps):
        if not isinstance(step, dict) or not isinstance(step.get("id"), str):
            raise ValueError(f"step {number} of the list has no `id`")  # noqa: TRY004 - pydantic needs a ValueError
        if step["id"] in indexed:
            raise ValueError(f"two steps have the id {step['id']!r}")
        indexed[step["id"]] = {name: value for name, value in step.items() if name != "id"}
    return indexed


Steps = Annotated[dict[Name, StepSpec], BeforeValidator(_index_steps)]


class FlowSpec(SpecModel):
    """A flow: its steps, its schedule, and the rules for its runs."""

    name: Name = Field(description="Name of the flow.")
    description: str = Field("", max_length=2_000, description="Description for operators.")
    scope: Json = Field(default_factory=dict, description="Default scope. Values in the scope of a run have priority.")
    policy: FailurePolicy = Field(FailurePolicy(), description="F7: the effect of a failed step on the run.")
    steps: Steps = Field(default_factory=dict, description="Steps by id, or a list of steps with an `id`.")
    max_active_runs: int | None = Field(
        None, ge=1, le=100_000, description="F16: maximum number of active runs; further runs are PENDING."
    )
    schedule: ScheduleSpec | None = Field(None, description="F16: schedule of the flow. Default: none.")


class RunRequest(SpecModel):
    """F2: a request for a run of a named flow, or of inline steps."""

    run_id: Name | None = Field(None, description="Id of the run; makes the request repeatable. Default: a new id.")
    flow: Name | None = Field(None, description="Name of a flow. Either `flow` or `steps` is required.")
    steps: Steps | None = Field(None, description="Inline steps, by id or as a list.")
    scope: Json = Field(default_factory=dict, description="Scope of the run; has priority over the scope of the flow.")
    policy: FailurePolicy | None = Field(None, description="F7: replaces the policy of the flow.")
