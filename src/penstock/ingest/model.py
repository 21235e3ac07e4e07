"""The documents of runs, states and suppliers, and the state machine of a run; pure values without input or output."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from penstock.ingest.contract import SUPPLIER, FailureCode, IngestRunState, IngestRunStatus
from penstock.kernel.clock import Clock
from penstock.kernel.errors import Invalid, NotFound
from penstock.kernel.machine import StateMachine, Transition
from penstock.kernel.text import format_time

_SUPPLIER = re.compile(SUPPLIER)
_RUN_ID = re.compile(rf"(?P<supplier>{SUPPLIER})_\d{{8}}T\d{{6}}Z_[0-9a-f]{{6}}")


RUN = StateMachine(
    "ingest.run",
    IngestRunState,
    initial=IngestRunState.RUNNING,
    moves=[
        Transition("pass", (IngestRunState.RUNNING,), IngestRunState.PASS),
        Transition("fail", (IngestRunState.RUNNING,), IngestRunState.FAIL),
    ],
)


class RunFailed(Exception):
    """The failure of a run, with its code, its message and a hint; the run publishes nothing."""

    def __init__(self, code: FailureCode, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


def make_run_not_found_error(run_id: str) -> NotFound:
    """Return the error for a run that does not exist or was deleted."""
    hint = "`penstock ingest ls` shows the last run of each supplier; old runs are deleted (ingest.retention.runs)"
    return NotFound("RUN_NOT_FOUND", f"there is no run {run_id!r}", hint=hint)


def make_supplier_not_found_error(name: str, suppliers: Sequence[str]) -> NotFound:
    """Return the error for a supplier that has neither an inbox nor a configuration."""
    hint = f"suppliers: {', '.join(suppliers) or 'none yet'}"
    return NotFound("SUPPLIER_NOT_FOUND", f"there is no supplier {name}", hint=hint)


def check_supplier_name(name: str) -> str:
    """Return *name* if it is a valid name of a supplier; otherwise raise Invalid BAD_SUPPLIER."""
    if not _SUPPLIER.fullmatch(name):
        hint = "use 1 to 64 letters, digits, '_' and '-'; the first must be a letter or a digit"
        raise Invalid("BAD_SUPPLIER", f"{name!r} is not a valid name of a supplier", hint=hint)
    return name


def make_run_id(supplier: str, clock: Clock) -> str:
    """I5: return a new id of the form <supplier>_<YYYYMMDDTHHMMSSZ>_<rand6>."""
    return f"{supplier}_{clock.now():%Y%m%dT%H%M%SZ}_{secrets.token_hex(3)}"


def parse_supplier(run_id: str) -> str:
    """Return the supplier of a run; raise NotFound if *run_id* is not a valid id."""
    match = _RUN_ID.fullmatch(run_id)
    if match is None:
        raise make_run_not_found_error(run_id)
    return match["supplier"]


def is_run_of(supplier: str, name: str) -> bool:
    """Return whether *name* is the id of a run of *supplier*."""
    match = _RUN_ID.fullmatch(name)
    return match is not None and match["supplier"] == supplier


@dataclass(frozen=True)
class InboxFile:
    """A file in an inbox. *signature* changes whenever the file does."""

    supplier: str
    name: str
    size: int
    modified_at: datetime
    signature: str
    identity: str | None = None  # a rename does not change it
    changed_at: datetime | None = None  # by the clock of the file system; None: the file is never visible half-written


@dataclass(frozen=True)
class CurrentPointer:
    """I11: a pointer to the published state. Its fence grows with every publication."""

    run_id: str
    sha256: str
    fence: int
    published_at: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id, "sha256": self.sha256, "fence": self.fence, "published_at": self.published_at,
        }  # fmt: skip


@dataclass(frozen=True)
class RunArtifact:
    """The hash and the size of a file that a run has written."""

    sha256: str
    size: int


@dataclass
class RunStats:
    """§9.4: the rows of a file by result, reason and category."""

    good_rows: int = 0
    bad_rows: int = 0
    blank_rows: int = 0
    skipped_rows: int = 0
    held_rows: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    categories: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def bad_ratio(self) -> float:
        """I7: the ratio of bad rows; 0 without rows."""
        total = self.good_rows + self.bad_rows
        return self.bad_rows / total if total else 0.0

    @property
    def facts(self) -> int:
        """The number of facts to publish: good rows, and held facts of an earlier run."""
        return self.good_rows + self.held_rows

    def count(self, category: str | None, good: int, reasons: Mapping[str, int]) -> None:
        """Add rows of a category; *good* is negative for rows that were counted as good and are bad."""
        bad = sum(reasons.values())
        self.good_rows += good
        self.bad_rows += bad
        for reason, number in reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + number
        if category is not None:
            counts = self.categories.setdefault(category, {"good_rows": 0, "bad_rows": 0})
            counts["good_rows"] += good
            counts["bad_rows"] += bad

    def add_held(self, category: str | None, facts: int) -> None:
        """Add facts of an earlier run that replace bad rows."""
        self.held_rows += facts
        if category is not None:
            counts = self.categories.setdefault(category, {"good_rows": 0, "bad_rows": 0})
            counts["held_rows"] = counts.get("held_rows", 0) + facts

    def as_dict(self) -> dict[str, Any]:
        return {
            "total_rows": self.good_rows + self.bad_rows,
            "good_rows": self.good_rows,
            "bad_rows": self.bad_rows,
            "bad_ratio": round(self.bad_ratio, 6),
            "blank_rows": self.blank_rows,
            "skipped_rows": self.skipped_rows,
            "held_rows": self.held_rows,
            "reasons": {code: self.reasons[code] for code in sorted(self.reasons)},
            "categories": self.categories,
        }


def list_filled_categories(categories: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the categories that have facts."""
    return [name for name, rows in categories.items() if rows["good_rows"] + rows.get("held_rows", 0) > 0]


@dataclass(frozen=True)
class PublicationDiff:
    """I21: the numbers of facts that differ from the state before."""

    added: int = 0
    removed: int = 0
    changed: int = 0
    unchanged: int = 0
    previous: str | None = None

    def as_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("added", "removed", "changed", "unchanged")}
        return {"previous": self.previous, **counts}


@dataclass(frozen=True)
class RunFailure:
    """The failure of a run as its manifest has it."""

    code: FailureCode
    message: str
    hint: str | None = None


@dataclass(frozen=True)
class RunManifest:
    """§10: the permanent record of a run that ended."""

    run_id: str
    supplier: str
    input_filename: str | None
    input_sha256: str | None
    started_at: datetime
    finished_at: datetime
    status: IngestRunStatus
    code_commit: str
    versions: Mapping[str, str]
    good_rows: int = 0
    bad_rows: int = 0
    input_size: int | None = None
    failure: RunFailure | None = None
    config_sha256: str | None = None
    artifacts: Mapping[str, RunArtifact] = field(default_factory=dict)
    previous_run: str | None = None
    fence: int | None = None
    changes: PublicationDiff | None = None
    key: Sequence[str] = ()
    moved_to: str | None = None

    def as_dict(self) -> dict[str, Any]:
        failure = self.failure
        return {
            "run_id": self.run_id,
            "supplier": self.supplier,
            "input_filename": self.input_filename,
            "input_sha256": self.input_sha256,
            "input_size": self.input_size,
            "started_at": format_time(self.started_at),
            "finished_at": format_time(self.finished_at),
            "good_rows": self.good_rows,
            "bad_rows": self.bad_rows,
            "status": self.status.value,
            "failure_code": failure.code.value if failure else None,
            "failure": failure.message if failure else None,
            "hint": failure.hint if failure else None,
            "moved_to": self.moved_to,
            "config_sha256": self.config_sha256,
            "artifacts": {name: asdict(artifact) for name, artifact in self.artifacts.items()},
            "previous_run": self.previous_run,
            "fence": self.fence,
            "key": list(self.key),
            "changes": self.changes.as_dict() if self.changes else None,
            "code_commit": self.code_commit,
            "versions": dict(self.versions),
        }


class DeliveryStatus(StrEnum):
    """The status of a delivery: DELIVERED and REFUSED are final, PENDING is retried."""

    DELIVERED = "DELIVERED"
    REFUSED = "REFUSED"
    PENDING = "PENDING"


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """I23: the result of one delivery of the state of *run_id* to a target."""

    status: DeliveryStatus
    run_id: str
    code: str | None = None
    error: str | None = None
    retry_at: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "status": self.status.value,
            "runId": self.run_id,
            "code": self.code,
            "error": self.error,
            "retryAt": self.retry_at,
        }

    def __str__(self) -> str:
        if self.status is DeliveryStatus.DELIVERED:
            return "delivered"
        retry = f"; next attempt at {self.retry_at}" if self.retry_at else ""
        return f"{self.status.value.lower()}: {self.code}: {self.error}{retry}"


class IngestAlert(StrEnum):
    """I13: the conditions of a supplier that need an operator."""

    STATE_OLD = "STATE_OLD"
    STATE_MISSING = "STATE_MISSING"
    SAME_FILE_AGAIN = "SAME_FILE_AGAIN"
    REPEATED_FAIL = "REPEATED_FAIL"
    CONFIG_BROKEN = "CONFIG_BROKEN"
    UNDELIVERED = "UNDELIVERED"


@dataclass(frozen=True)
class IgnoredEntry:
    """An entry of an inbox that runs ignore, e.g. a folder; *path* is its location."""

    name: str
    kind: str
    path: str


@dataclass(frozen=True)
class SupplierStatus:
    """The status of a supplier: its published state, its inbox, its last run and its alerts."""

    supplier: str
    run_id: str | None
    fence: int | None
    published_at: datetime | None
    age_seconds: float | None
    facts: int | None
    inbox: list[str]
    inbox_path: str
    unfinished: list[str]
    ignored: list[IgnoredEntry]
    broken: int
    failed_runs: int
    unchanged_files: int
    last_run: Mapping[str, Any] | None
    config_path: str
    has_config: bool
    config_error: str | None
    undelivered: list[str]
    alerts: list[IngestAlert]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "published_at": self.published_at and format_time(self.published_at)}
