"""F2, F15: a flow as it is written, in YAML, in JSON or in Python: one model for all three."""

from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from penstock.flows.contract import CODE, NAME
from penstock.flows.definition.json_values import plain
from penstock.kernel.config.sections import Duration

Name = Annotated[str, StringConstraints(pattern=NAME)]
Code = Annotated[str, StringConstraints(pattern=CODE)]
Json = Annotated[dict[str, Any], AfterValidator(plain)]
_LONG = timedelta(days=366)
Expression = Annotated[str, Field(min_length=1, max_length=2_000)]


class SpecModel(BaseModel):
    """What people write: camelCase names, nothing unknown."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class RetryPolicy(SpecModel):
    """F10: how often a step is tried, and how long between; which errors are worth it."""

    max_attempts: int = Field(3, ge=1, le=1_000, description="All attempts, the first among them.")
    backoff: Duration = Field(
        timedelta(seconds=1), le=_LONG, description="After the first failure; then twice as long each time."
    )
    max_backoff: Duration = Field(timedelta(minutes=5), le=_LONG, description="No longer than this.")
    retryable: list[Code] | None = Field(None, description="Only these are tried again.")
    final: list[Code] = Field(default_factory=list, description="These are not.")


class WorkSpec(SpecModel):
    """What a step, or each item of a map, does."""

    kind: Name = Field(description="Who does it.")
    inputs: Json = Field(default_factory=dict, description="May hold ${…} over scope and the outputs of steps before.")
    required: bool = Field(True, description="F7: false turns a failure into SKIPPED.")
    retry: RetryPolicy | None = None
    timeout: Annotated[Duration, Field(gt=timedelta(0), le=_LONG)] | None = Field(None, description="Of one attempt.")


class StepSpec(WorkSpec):
    """One step."""

    depends_on: list[str] = Field(default_factory=list, description="All of them end before it begins.")
    when: Expression | None = Field(None, description="F8: the step is skipped where this is false.")
    on_skip: Literal["run", "skip"] = Field("run", description="F8: what follows from a skipped step before it.")
    over: Annotated[Any, AfterValidator(plain)] = Field(
        None, description="F14, for kind `map`: a list, or ${…} that gives one."
    )
    do: WorkSpec | None = Field(None, description="F14, for kind `map`: what is done with each ${item}.")


class StepPolicy(SpecModel):
    """F7: what a failure does to the others."""

    fail_fast: bool = Field(False, description="Steps under way are told to stop.")


class ScheduleSpec(SpecModel):
    """F16: when a flow runs by itself."""

    cron: Annotated[str, Field(min_length=1, max_length=200)] = Field(description="When, as cron has it.")
    timezone: Annotated[str, Field(max_length=100)] = Field("UTC", description="Whose clock.")
    overlap: bool = Field(False, description="Whether it starts while its last run is under way.")
    catch_up: Literal["none", "last", "all"] = Field("last", description="What of times that passed unseen.")
    scope: Json = Field(default_factory=dict, description="Of runs it starts.")


def _named(steps: Any) -> Any:
    """A list of steps with ids, as the map it stands for; Value error DUPLICATE… names ids that come twice."""
    if not isinstance(steps, list):
        return steps
    named: dict[str, Any] = {}
    for place, step in enumerate(steps):
        if not isinstance(step, dict) or not isinstance(step.get("id"), str):
            raise ValueError(f"step {place} of the list has no `id`")  # noqa: TRY004 - what pydantic understands
        if step["id"] in named:
            raise ValueError(f"step id {step['id']!r} comes twice")
        named[step["id"]] = {name: value for name, value in step.items() if name != "id"}
    return named


Steps = Annotated[dict[Name, StepSpec], BeforeValidator(_named)]


class FlowSpec(SpecModel):
    """A flow: its steps, and how its runs behave."""

    name: Name = Field(description="What it is called.")
    description: str = Field("", max_length=2_000, description="For people.")
    scope: Json = Field(default_factory=dict, description="Defaults; a run's own scope goes before.")
    policy: StepPolicy = StepPolicy()
    steps: Steps = Field(default_factory=dict)
    max_active_runs: int | None = Field(None, ge=1, le=100_000, description="F16: further runs wait as PENDING.")
    schedule: ScheduleSpec | None = None


class RunRequest(SpecModel):
    """F2: what a run is made of: a named flow, or steps given inline."""

    run_id: Name | None = None
    flow: Name | None = None
    steps: Steps | None = None
    scope: Json = Field(default_factory=dict)
    policy: StepPolicy | None = None
