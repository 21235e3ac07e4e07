"""Settings of the section `flows`."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import Field

from penstock.kernel.config.loader import SecretRef, Section
from penstock.kernel.config.sections import DatabaseSection, Duration, Url


class HttpSecret(Section):
    """A secret header value, and the URLs that may receive it."""

    value: SecretRef = Field(description="Value of the header, as a reference: env:NAME or file:/path.")
    to: list[Url] = Field(min_length=1, description="URL prefixes that may receive the value.")


class HttpSection(Section):
    """URLs and secrets that steps of kind `http` can use."""

    allow: list[Url] = Field(
        default_factory=list,
        description="URL prefixes that steps of kind `http` may request, e.g. https://api.example.com/v1/. "
        "Default: none.",
    )
    secrets: dict[str, HttpSecret] = Field(
        default_factory=dict, description="Secret header values by name; a step names them in `secretHeaders`."
    )


class ImagesSection(Section):
    """Rendering of charts: the built-in renderer, or an HTTP image API."""

    url: Url | None = Field(
        None, description="URL of an image API; it gets one POST request per chart. Default: the built-in renderer."
    )
    token: SecretRef | None = Field(None, description="Bearer token for the image API, as env:NAME or file:/path.")
    timeout: Duration = Field(timedelta(seconds=30), description="Timeout of a request to the image API.")
    attempts: int = Field(3, ge=1, le=20, description="Number of requests to the image API before a chart fails.")


class LlmSection(Section):
    """Writing of reports: a template, or an OpenAI-compatible endpoint."""

    url: Url | None = Field(
        None,
        description="Base URL of an OpenAI-compatible endpoint, including /v1, e.g. http://127.0.0.1:11434/v1. "
        "Default: reports are written from a template.",
    )
    model: str = Field("default", description="Name of the model in requests to the endpoint.")
    token: SecretRef | None = Field(None, description="Bearer token for the endpoint, as env:NAME or file:/path.")
    timeout: Duration = Field(timedelta(seconds=60), description="Timeout of a request for a report.")


class WorkSection(Section):
    """Concurrency of the built-in workers."""

    concurrency: int = Field(32, ge=1, le=10_000, description="Number of steps that one process executes concurrently.")
    waiting: int = Field(
        100,
        ge=1,
        le=10_000,
        description="Number of additional steps per process that wait for another part, e.g. of kind `ingest.run`.",
    )


class FlowsSection(Section):
    """Flows: graphs of steps, executed by workers."""

    folder: Path | None = Field(
        None, description="Folder of flow files (*.yaml, *.yml). A changed file is loaded again within a second."
    )
    modules: list[str] = Field(
        default_factory=list, description="Python modules that define flows or workers; imported at start."
    )
    files: Path | None = Field(None, description="Folder of candle files that OHLCV_EXPORT may read. Default: none.")
    database: DatabaseSection | None = Field(
        None, description="Database that steps may query, read-only, e.g. for OHLCV_EXPORT. Default: none."
    )
    lease: Annotated[Duration, Field(ge=timedelta(seconds=1), le=timedelta(days=1))] = Field(
        timedelta(seconds=60), description="Duration of a lease if the claim does not set `leaseSeconds`."
    )
    max_lost: int = Field(
        5, ge=1, description="F11: number of expired leases before a step without `retry` fails with LEASE_EXPIRED."
    )
    limits: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="F16: maximum number of running steps by kind, over all processes. Default: no limit.",
    )
    python: list[str] = Field(
        default_factory=list, description="Python packages and modules whose functions steps of kind `python` may call."
    )
    http: HttpSection = HttpSection()
    images: ImagesSection = ImagesSection()
    llm: LlmSection = LlmSection()
    work: WorkSection = WorkSection()
    retention: Duration = Field(
        timedelta(days=90), description="Time after which ended runs are deleted, with their logs and artifacts."
    )
