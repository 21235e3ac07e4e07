"""What the API says of ingest."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from penstock.ingest.contract import IngestRunState
from penstock.kernel.http.schemas import MoveSchema


class SupplierView(BaseModel):
    """Where a supplier stands."""

    supplier: str
    run_id: str | None = Field(description="The run whose state is current.")
    fence: int | None
    published_at: datetime | None
    age_seconds: float | None
    facts: int | None
    inbox: list[str]
    unfinished: list[str]
    broken: int
    fails: int = Field(description="Runs that failed since the last that passed.")
    equal_shas: int = Field(description="Files in a row that were the same as the current one.")
    last: dict[str, Any] | None
    config: str | None = Field(description="What is wrong with the configuration.")
    undelivered: list[str] = Field(description="Targets that were not told of the current state, and why.")
    alerts: list[str]


class SupplierList(BaseModel):
    suppliers: list[SupplierView]


class FileMove(BaseModel):
    """A file that went somewhere."""

    file_name: str
    moved_to: str
    why: str
    moved_at: datetime
    run_id: str | None


class FileMoveList(BaseModel):
    moves: list[FileMove]


class IngestRun(BaseModel):
    """A run as it is listed."""

    run_id: str
    supplier: str
    status: IngestRunState
    holder: str
    failure_code: str | None
    started_at: datetime
    finished_at: datetime | None
    manifest: dict[str, Any] | None = Field(description="Once it has ended.")


class IngestRunList(BaseModel):
    runs: list[IngestRun]
    next: str | None


class IngestMove(MoveSchema):
    """One move of a run's state."""


class IngestRunDetails(IngestRun):
    """A run with all that is known of it."""

    moves: list[FileMove]
    history: list[IngestMove]


class BadRowList(BaseModel):
    run_id: str
    bad_rows: int
    reasons: dict[str, int]
    rows: list[dict[str, Any]]


class StateView(BaseModel):
    """Which state is current, and where it comes from."""

    supplier: str
    run_id: str
    sha256: str
    fence: int
    published_at: datetime
    manifest: dict[str, Any]
