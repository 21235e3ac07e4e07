"""Pure: what a run is called, what it leaves behind, and how its quality is judged."""

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
    """The run publishes nothing: a value that ends it, with its code and a sentence for people."""

    def __init__(self, code: FailureCode, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


def no_run(run_id: str) -> NotFound:
    """What is said of a run nobody knows, or knows any more."""
    hint = "it may be under way, or too old; `penstock ingest ls` shows the last, <supplier>_<time>_<rand6>"
    return NotFound("RUN_NOT_FOUND", f"there is no run {run_id!r}", hint=hint)


def no_supplier(name: str, known: Sequence[str]) -> NotFound:
    """What is said of a supplier that has neither an inbox nor a configuration."""
    hint = f"known are: {', '.join(known) or 'none yet'}"
    return NotFound("SUPPLIER_NOT_FOUND", f"there is no supplier {name}", hint=hint)


def checked_supplier(name: str) -> str:
    """*name* itself when it can name a supplier; else Invalid BAD_SUPPLIER."""
    if not _SUPPLIER.fullmatch(name):
        hint = "letters, digits, '_' and '-', at most 64 of them"
        raise Invalid("BAD_SUPPLIER", f"{name!r} cannot name a supplier", hint=hint)
    return name


def new_run_id(supplier: str, clock: Clock) -> str:
    """I5: <supplier>_<YYYYMMDDTHHMMSSZ>_<rand6>."""
    return f"{supplier}_{clock.now():%Y%m%dT%H%M%SZ}_{secrets.token_hex(3)}"


def supplier_of(run_id: str) -> str:
    """Whose run it is; NotFound when nothing can be called that."""
    found = _RUN_ID.fullmatch(run_id)
    if found is None:
        raise no_run(run_id)
    return found["supplier"]


def is_run_of(supplier: str, name: str) -> bool:
    """Whether a run of *supplier* is called that."""
    found = _RUN_ID.fullmatch(name)
    return found is not None and found["supplier"] == supplier


@dataclass(frozen=True)
class InboxFile:
    """A file in an inbox. *signature* changes whenever the file does."""

    supplier: str
    name: str
    size: int
    modified_at: datetime
    signature: str
    identity: str | None = None  # stays when the file is renamed
    changed_at: datetime | None = None  # by the file system's own clock; None: it cannot be seen half-written


@dataclass(frozen=True)
class CurrentPointer:
    """I11: which state is the current one. The fence only grows."""

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
    """A file a run left behind."""

    sha256: str
    size: int


@dataclass
class RunStats:
    """§9.4: what became of the rows of a file."""

    good_rows: int = 0
    bad_rows: int = 0
    blank_rows: int = 0
    skipped_rows: int = 0
    held_rows: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    categories: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def bad_ratio(self) -> float:
        """I7: no rows at all are no bad rows."""
        total = self.good_rows + self.bad_rows
        return self.bad_rows / total if total else 0.0

    @property
    def facts(self) -> int:
        """How many facts are published: what was good, and what is held."""
        return self.good_rows + self.held_rows

    def count(self, category: str | None, good: int, reasons: Mapping[str, int]) -> None:
        """Add what became of some rows; a row once good that turns out bad takes a good one away."""
        bad = sum(reasons.values())
        self.good_rows += good
        self.bad_rows += bad
        for reason, number in reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + number
        if category is not None:
            seen = self.categories.setdefault(category, {"good_rows": 0, "bad_rows": 0})
            seen["good_rows"] += good
            seen["bad_rows"] += bad

    def hold(self, category: str | None, facts: int) -> None:
        """Add facts of an earlier run that stay."""
        self.held_rows += facts
        if category is not None:
            seen = self.categories.setdefault(category, {"good_rows": 0, "bad_rows": 0})
            seen["held_rows"] = seen.get("held_rows", 0) + facts

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


def alive(categories: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The categories that have facts."""
    return [name for name, rows in categories.items() if rows["good_rows"] + rows.get("held_rows", 0) > 0]


@dataclass(frozen=True)
class PublicationDiff:
    """I21: what a publication changed against the one before it."""

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
    """Why a run published nothing, as its manifest tells it."""

    code: FailureCode
    message: str
    hint: str | None = None


@dataclass(frozen=True)
class RunManifest:
    """§10: what is remembered of a run."""

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
            "started_at": self.started_at.isoformat(),
            "finished_at": self.finished_at.isoformat(),
            "good_rows": self.good_rows,
            "bad_rows": self.bad_rows,
            "status": self.status.value,
            "failure_code": failure.code.value if failure else None,
            "failure": failure.message if failure else None,
            "hint": failure.hint if failure else None,
            "moved_to": self.moved_to,
            "config_sha256": self.config_sha256,
            "artifacts": {name: {"sha256": one.sha256, "size": one.size} for name, one in self.artifacts.items()},
            "previous_run": self.previous_run,
            "fence": self.fence,
            "key": list(self.key),
            "changes": self.changes.as_dict() if self.changes else None,
            "code_commit": self.code_commit,
            "versions": dict(self.versions),
        }


class IngestAlert(StrEnum):
    """I13: what somebody should look at."""

    STATE_OLD = "STATE_OLD"
    STATE_MISSING = "STATE_MISSING"
    SAME_FILE_AGAIN = "SAME_FILE_AGAIN"
    REPEATED_FAIL = "REPEATED_FAIL"
    CONFIG_BROKEN = "CONFIG_BROKEN"
    UNDELIVERED = "UNDELIVERED"


@dataclass(frozen=True)
class SupplierStatus:
    """One supplier."""

    supplier: str
    run_id: str | None
    fence: int | None
    published_at: datetime | None
    age_seconds: float | None
    facts: int | None
    inbox: list[str]
    unfinished: list[str]
    broken: int
    fails: int
    equal_shas: int
    last: Mapping[str, Any] | None
    config: str | None
    undelivered: list[str]
    alerts: list[IngestAlert]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
