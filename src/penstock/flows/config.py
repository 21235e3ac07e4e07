"""The `flows` section of penstock.yaml."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import Field

from penstock.kernel.config.loader import SecretRef, Section
from penstock.kernel.config.sections import DatabaseSection, Duration, Url


class HttpSecret(Section):
    """The value of a header, and who may be told it."""

    value: SecretRef = Field(description="The value of a header.")
    to: list[Url] = Field(min_length=1, description="Beginnings of URLs.")


class HttpSection(Section):
    """What steps of the kind `http` may reach."""

    allow: list[Url] = Field(default_factory=list, description="Beginnings of URLs, e.g. https://api.example.com/v1/")
    secrets: dict[str, HttpSecret] = Field(default_factory=dict, description="Steps name them.")


class ImagesSection(Section):
    """Where charts are drawn: here, unless an HTTP image API is given."""

    url: Url | None = Field(None, description="Asked with one POST per chart.")
    token: SecretRef | None = Field(None, description="Sent as a bearer.")
    timeout: Duration = Field(timedelta(seconds=30), description="For one picture.")
    attempts: int = Field(3, ge=1, le=20, description="Tries of one picture.")


class LlmSection(Section):
    """Who writes reports: a template, unless an OpenAI-compatible endpoint is given."""

    url: Url | None = Field(None, description="Up to and with /v1, e.g. http://127.0.0.1:11434/v1")
    model: str = Field("default", description="Which model is asked for.")
    token: SecretRef | None = Field(None, description="Sent as a bearer.")
    timeout: Duration = Field(timedelta(seconds=60), description="For one report.")


class WorkSection(Section):
    """How the built-in workers work."""

    concurrency: int = Field(32, ge=1, le=10_000, description="Steps one process has under way.")
    waiting: int = Field(100, ge=1, le=10_000, description="Besides, steps that only wait for another part.")


class FlowsSection(Section):
    """Flows: DAGs of steps run by workers."""

    folder: Path | None = Field(None, description="Flows as *.yaml; read again when they change.")
    modules: list[str] = Field(default_factory=list, description="Python modules that define flows or workers.")
    files: Path | None = Field(None, description="The folder OHLCV_EXPORT may read candles from.")
    database: DatabaseSection | None = Field(None, description="The database it may ask, as one who can only read.")
    lease: Annotated[Duration, Field(ge=timedelta(seconds=1), le=timedelta(days=1))] = Field(
        timedelta(seconds=60), description="How long a claim holds a step when it does not say."
    )
    max_lost: int = Field(5, ge=1, description="F11: attempts of a step without `retry` whose workers died.")
    limits: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, description="F16: steps of a kind under way, in all processes together."
    )
    python: list[str] = Field(default_factory=list, description="Modules whose functions the kind `python` may call.")
    http: HttpSection = HttpSection()
    images: ImagesSection = ImagesSection()
    llm: LlmSection = LlmSection()
    work: WorkSection = WorkSection()
    retention: Duration = Field(timedelta(days=90), description="How long runs and their artifacts are kept.")
