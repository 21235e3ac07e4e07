"""I12: the deletion of expired files, with a report. The published state and files that are being read stay."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from penstock.ingest.config import IngestRetentionSection
from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.model import CurrentPointer
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import parse_document
from penstock.ingest.tree.port import FileTree, StoredFile
from penstock.kernel.clock import Clock
from penstock.kernel.errors import Conflict, Corrupt, Transient


@dataclass(frozen=True)
class ExpiredEntry:
    """A file or a folder that has expired."""

    path: str
    size: int
    reason: str
    is_deleted: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {"path": self.path, "bytes": self.size, "reason": self.reason, "deleted": self.is_deleted}


@dataclass(frozen=True)
class RetentionResult:
    """The expired entries, and the suppliers that were skipped: *busy* with a run, or with a *damaged* state."""

    expired: list[ExpiredEntry]
    busy: list[str]
    damaged: list[str] = field(default_factory=list)


def delete_expired(
    tree: FileTree, section: IngestRetentionSection, clock: Clock, holder: str, *, is_dry: bool = False
) -> RetentionResult:
    """Delete the expired files of all suppliers; with *is_dry*, only report them."""
    expired: list[ExpiredEntry] = []
    busy: list[str] = []
    damaged: list[str] = []
    for supplier in tree.list_suppliers():
        try:
            with tree.lock(supplier, holder):
                # List all before the first deletion: the age of one entry may depend on another entry.
                for entry in list(_list_expired(tree, supplier, section, clock.now())):
                    is_deleted = not is_dry and tree.remove(entry.path)
                    reason = entry.reason if is_dry or is_deleted else f"{entry.reason}; not deleted: it is being read"
                    expired.append(ExpiredEntry(entry.path, entry.size, reason, is_deleted))
        except Conflict:
            busy.append(supplier)
        except (Corrupt, Transient):
            damaged.append(supplier)  # the published state is unknown, or nothing can be deleted
    return RetentionResult(expired, busy, damaged)


def _list_expired(
    tree: FileTree, supplier: str, section: IngestRetentionSection, now: datetime
) -> Iterator[ExpiredEntry]:
    current = tree.read_pointer(supplier)
    yield from _list_files(tree, f"{paths.QUARANTINE}/{supplier}", section.quarantine, now)
    yield from _list_files(tree, paths.make_archive_path(supplier), section.archive, now)
    yield from _list_markers(tree, supplier, section.accepted_runs, now, current)
    yield from _list_drafts(tree, supplier, section.diag, now)
    # Before the runs: the manifest of a run determines when its state expires.
    yield from _list_states(tree, supplier, timedelta(hours=section.state_retention_hours), now, current)
    yield from _list_runs(tree, supplier, section, now, current)


def _list_files(tree: FileTree, folder: str, age: timedelta, now: datetime) -> Iterator[ExpiredEntry]:
    for file in tree.list_files(folder):
        if now - file.since > age:
            yield ExpiredEntry(file.path, file.size, f"stored for more than {_format_days(age)}")


def _list_markers(
    tree: FileTree, supplier: str, age: timedelta, now: datetime, current: CurrentPointer | None
) -> Iterator[ExpiredEntry]:
    current_marker = None
    if current is not None:
        # By content: a run that was killed after the switch has not replaced the marker of an earlier run.
        manifest = _read_json(tree, paths.make_state_path(supplier, current.run_id, paths.MANIFEST))
        if "input_sha256" not in manifest:
            return  # the state is damaged, so the marker that must stay is unknown
        current_marker = paths.make_accepted_path(supplier, manifest["input_sha256"])
    for file in tree.list_files(f"{paths.ACCEPTED}/{supplier}"):
        if file.path != current_marker and now - file.since > age and not _is_draft(file):
            yield ExpiredEntry(file.path, file.size, f"accepted more than {_format_days(age)} ago")


def _list_drafts(tree: FileTree, supplier: str, age: timedelta, now: datetime) -> Iterator[ExpiredEntry]:
    """List files that were being written when their process was killed."""
    for folder in (f"{paths.ACCEPTED}/{supplier}", paths.LEDGERS):
        for file in tree.list_files(folder):
            if _is_draft(file) and now - file.since > age:
                yield ExpiredEntry(
                    file.path, file.size, f"started more than {_format_days(age)} ago and never finished"
                )


def _is_draft(file: StoredFile) -> bool:
    return paths.is_temporary(file.path.rpartition("/")[2])


def _list_runs(
    tree: FileTree, supplier: str, section: IngestRetentionSection, now: datetime, current: CurrentPointer | None
) -> Iterator[ExpiredEntry]:
    for run_id in tree.list_runs(supplier):
        files = list(tree.list_files(paths.make_run_path(run_id)))
        if not files or (current is not None and run_id == current.run_id):
            continue
        age = now - max(file.since for file in files)
        if age > section.runs:
            yield ExpiredEntry(
                paths.make_run_path(run_id), _sum_sizes(files), f"ended more than {_format_days(section.runs)} ago"
            )
        elif diag := [file for file in files if "/diag/" in file.path and now - file.since > section.diag]:
            yield ExpiredEntry(
                paths.make_run_path(run_id, "diag"),
                _sum_sizes(diag),
                f"diagnostic files older than {_format_days(section.diag)}",
            )


def _list_states(
    tree: FileTree, supplier: str, age: timedelta, now: datetime, current: CurrentPointer | None
) -> Iterator[ExpiredEntry]:
    """List states that were replaced longer than *age* ago, and states that were never published."""
    states = {
        run_id: _read_json(tree, paths.make_state_path(supplier, run_id, paths.POINTER))
        for run_id in tree.list_states(supplier)
    }
    passed = {run_id: pointer for run_id, pointer in states.items() if pointer and _has_passed(tree, run_id, current)}
    for run_id in states:
        if current is not None and run_id == current.run_id:
            continue
        files = list(tree.list_files(paths.make_state_path(supplier, run_id)))
        if run_id in passed:
            later = [pointer for pointer in passed.values() if pointer["fence"] > passed[run_id]["fence"]]
            replaced = min((datetime.fromisoformat(pointer["published_at"]) for pointer in later), default=now)
            # The clock may have been wrong, but no state is replaced before it is published.
            replaced = max(replaced, datetime.fromisoformat(passed[run_id]["published_at"]))
            reason = f"replaced more than {_format_hours(age)} ago"
        else:
            replaced, reason = (
                max((file.since for file in files), default=now),
                f"not published for more than {_format_hours(age)}",
            )
        if now - replaced > age:
            yield ExpiredEntry(paths.make_state_path(supplier, run_id), _sum_sizes(files), reason)


def _has_passed(tree: FileTree, run_id: str, current: CurrentPointer | None) -> bool:
    if current is not None and run_id == current.run_id:
        return True
    manifest = _read_json(tree, paths.make_run_path(run_id, paths.MANIFEST))
    # A run whose files are deleted had passed; otherwise its state would be deleted too.
    return not manifest or manifest.get("status") == IngestRunStatus.PASS.value


def _read_json(tree: FileTree, path: str) -> dict[str, Any]:
    return parse_document(tree.read(path))


def _sum_sizes(files: list[StoredFile]) -> int:
    return sum(file.size for file in files)


def _format_days(age: timedelta) -> str:
    return f"{age / timedelta(days=1):g} days"


def _format_hours(age: timedelta) -> str:
    return f"{age / timedelta(hours=1):g} hours"
