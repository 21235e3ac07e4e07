"""Documents of the ingest API, in camelCase; manifests, facts and bad rows are quoted as they are in their files."""

from datetime import datetime
from typing import Any

from pydantic import Field

from penstock.ingest.contract import IngestRunState
from penstock.ingest.model import CurrentPointer, PublicationDiff, SupplierStatus
from penstock.kernel.http.schemas import Camel, MoveSchema


class LastRun(Camel):
    """The last run of a supplier that ended."""

    run_id: str
    status: str
    failure_code: str | None
    finished_at: datetime | None


class InboxEntry(Camel):
    """An entry of an inbox that runs ignore."""

    name: str
    kind: str = Field(description="E.g. `folder`, `symbolic link` or `unfinished file`.")
    path: str = Field(description="Location of the entry.")


class SupplierView(Camel):
    """The status of a supplier: its published state, its inbox, and its alerts."""

    supplier: str
    run_id: str | None = Field(description="The run whose state is published; null before the first publication.")
    fence: int | None = Field(description="Grows with every publication.")
    published_at: datetime | None = Field(description="Time of the last publication.")
    age_seconds: float | None = Field(description="Age of the published state in seconds.")
    facts: int | None = Field(description="Facts in the published state.")
    inbox: list[str] = Field(description="Names of the files in the inbox.")
    inbox_path: str = Field(description="Location of the inbox.")
    unfinished: list[str] = Field(description="Files in the inbox with a temporary name; runs ignore them.")
    ignored: list[InboxEntry] = Field(
        description="Entries of the inbox that are not files, and unfinished files that do not change any more."
    )
    broken: int = Field(description="Files in quarantine because their run failed.")
    failed_runs: int = Field(description="Failed runs since the last run that passed.")
    unchanged_files: int = Field(description="Files in a row with the same content as the published file.")
    last_run: LastRun | None = Field(description="The last run that ended.")
    config_path: str = Field(description="Location of the configuration.")
    has_config: bool = Field(description="Whether the configuration of the supplier exists.")
    config_error: str | None = Field(
        description="Why the configuration of the supplier is invalid; null if it is valid."
    )
    undelivered: list[str] = Field(description="Targets that have not received the published state, with the error.")
    alerts: list[str] = Field(description="Active alerts, e.g. `STATE_OLD`.")

    @classmethod
    def from_status(cls, status: SupplierStatus) -> "SupplierView":
        """Return the document of *status*."""
        return cls(**status.as_dict())


class SupplierList(Camel):
    suppliers: list[SupplierView]


class FileMove(Camel):
    """A file that a run moved out of the inbox."""

    file_name: str
    moved_to: str
    reason: str
    moved_at: datetime
    run_id: str | None


class FileMoveList(Camel):
    moves: list[FileMove]


class IngestRun(Camel):
    """A run as it is listed."""

    run_id: str
    supplier: str
    status: IngestRunState
    holder: str | None = Field(description="The process of the run; null if only the folder knows the run.")
    failure_code: str | None
    started_at: datetime | None
    finished_at: datetime | None
    manifest: dict[str, Any] | None = Field(description="The manifest.json of the run; null until the run ends.")


class IngestRunList(Camel):
    runs: list[IngestRun]
    next: str | None


class IngestMove(MoveSchema):
    """A transition of a run's state."""


class IngestRunDetails(IngestRun):
    """A run with the files that it moved and its history."""

    moves: list[FileMove]
    history: list[IngestMove]


class BadRowList(Camel):
    """The first bad rows of a run, and the number of bad rows per reason."""

    run_id: str
    bad_rows: int = Field(description="All bad rows of the run; `rows` has at most `limit` of them.")
    reasons: dict[str, int]
    rows: list[dict[str, Any]] = Field(description="Bad rows as they are in bad.ndjson.")


class QuarantinedFile(Camel):
    """A file in quarantine."""

    supplier: str
    path: str
    bytes: int
    since: datetime
    reason: str | None = Field(description="`accepted before`, or the failure code of the run that rejected the file.")
    detail: str | None = Field(description="The error message of that run.")
    run_id: str | None


class QuarantineList(Camel):
    files: list[QuarantinedFile]
    total: int = Field(description="All files in quarantine; `files` has at most `limit` of them.")


class StateView(Camel):
    """The published state of a supplier, and the manifest of its run."""

    supplier: str
    run_id: str
    sha256: str
    fence: int
    published_at: datetime
    manifest: dict[str, Any]

    @classmethod
    def from_pointer(cls, supplier: str, pointer: CurrentPointer, manifest: dict[str, Any]) -> "StateView":
        """Return the document of the state that *pointer* names."""
        return cls(supplier=supplier, manifest=manifest, **pointer.as_dict())


class ChangedFact(Camel):
    """A fact that a publication added, removed or changed."""

    change: str = Field(description="`added`, `removed` or `changed`.")
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


class StateDiff(Camel):
    """I21: the difference between the facts of two runs of a supplier."""

    supplier: str
    before: str = Field(description="The run that is compared with.")
    after: str
    added: int
    removed: int
    changed: int
    unchanged: int
    shown: list[ChangedFact] = Field(description="The first changes of each kind, at most `limit` of each.")

    @classmethod
    def from_changes(
        cls, supplier: str, before: str, after: str, counts: PublicationDiff, shown: list[dict[str, Any]]
    ) -> "StateDiff":
        """Return the document of a comparison."""
        numbers = {name: getattr(counts, name) for name in ("added", "removed", "changed", "unchanged")}
        facts = [ChangedFact(**fact) for fact in shown]
        return cls(supplier=supplier, before=before, after=after, shown=facts, **numbers)
