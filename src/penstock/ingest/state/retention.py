"""I12: what is too old goes, and a report says what and why; never the current state, nor what somebody reads."""

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
    """Something that may go."""

    path: str
    size: int
    why: str
    is_gone: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {"path": self.path, "bytes": self.size, "why": self.why, "removed": self.is_gone}


@dataclass(frozen=True)
class RetentionResult:
    """What was found, and whom it was not asked of: a run was under way, or the current state is damaged."""

    found: list[ExpiredEntry]
    busy: list[str]
    damaged: list[str] = field(default_factory=list)


def sweep(
    tree: FileTree, section: IngestRetentionSection, clock: Clock, holder: str, *, is_dry: bool = False
) -> RetentionResult:
    """Remove what is too old for every supplier; with *is_dry* only tell."""
    found: list[ExpiredEntry] = []
    busy: list[str] = []
    damaged: list[str] = []
    for supplier in tree.list_suppliers():
        try:
            with tree.lock(supplier, holder):
                # All is looked at before anything goes, so that one removal does not hide another's reason.
                for old in list(_old(tree, supplier, section, clock.now())):
                    is_gone = not is_dry and tree.remove(old.path)
                    why = old.why if is_dry or is_gone else f"{old.why}; somebody reads it, so it stays"
                    found.append(ExpiredEntry(old.path, old.size, why, is_gone))
        except Conflict:
            busy.append(supplier)
        except (Corrupt, Transient):
            damaged.append(supplier)  # which state must stay is not known, or nothing can be removed
    return RetentionResult(found, busy, damaged)


def _old(tree: FileTree, supplier: str, section: IngestRetentionSection, now: datetime) -> Iterator[ExpiredEntry]:
    current = tree.read_pointer(supplier)
    yield from _files(tree, f"{paths.QUARANTINE}/{supplier}", section.quarantine, now)
    yield from _files(tree, paths.archive(supplier), section.archive, now)
    yield from _accepted(tree, supplier, section.accepted_runs, now, current)
    yield from _drafts(tree, supplier, section.diag, now)
    # Before the runs: what became of a run tells when its state may go.
    yield from _states(tree, supplier, timedelta(hours=section.state_retention_hours), now, current)
    yield from _runs(tree, supplier, section, now, current)


def _files(tree: FileTree, folder: str, age: timedelta, now: datetime) -> Iterator[ExpiredEntry]:
    for file in tree.list_files(folder):
        if now - file.since > age:
            yield ExpiredEntry(file.path, file.size, f"there for more than {_days(age)}")


def _accepted(
    tree: FileTree, supplier: str, age: timedelta, now: datetime, current: CurrentPointer | None
) -> Iterator[ExpiredEntry]:
    kept = None
    if current is not None:
        # Found by its content: a run that was killed after the switch has not renewed the mark an earlier run left.
        manifest = _json(tree, paths.state(supplier, current.run_id, paths.MANIFEST))
        if "input_sha256" not in manifest:
            return  # the state is damaged: which mark must stay is not known
        kept = paths.accepted(supplier, manifest["input_sha256"])
    for file in tree.list_files(f"{paths.ACCEPTED}/{supplier}"):
        if file.path != kept and now - file.since > age and not _is_draft(file):
            yield ExpiredEntry(file.path, file.size, f"accepted more than {_days(age)} ago")


def _drafts(tree: FileTree, supplier: str, age: timedelta, now: datetime) -> Iterator[ExpiredEntry]:
    """What was being written when somebody was killed."""
    for folder in (f"{paths.ACCEPTED}/{supplier}", paths.LEDGERS):
        for file in tree.list_files(folder):
            if _is_draft(file) and now - file.since > age:
                yield ExpiredEntry(file.path, file.size, f"begun more than {_days(age)} ago and never finished")


def _is_draft(found: StoredFile) -> bool:
    return paths.is_temporary(found.path.rpartition("/")[2])


def _runs(
    tree: FileTree, supplier: str, section: IngestRetentionSection, now: datetime, current: CurrentPointer | None
) -> Iterator[ExpiredEntry]:
    for run_id in tree.list_runs(supplier):
        files = list(tree.list_files(paths.run(run_id)))
        if not files or (current is not None and run_id == current.run_id):
            continue
        age = now - max(file.since for file in files)
        if age > section.runs:
            yield ExpiredEntry(paths.run(run_id), _size(files), f"ended more than {_days(section.runs)} ago")
        elif diag := [file for file in files if "/diag/" in file.path and now - file.since > section.diag]:
            yield ExpiredEntry(paths.run(run_id, "diag"), _size(diag), f"kept for {_days(section.diag)}")


def _states(
    tree: FileTree, supplier: str, age: timedelta, now: datetime, current: CurrentPointer | None
) -> Iterator[ExpiredEntry]:
    """A state goes so long after the next one became current; one that never became current, after it was made."""
    states = {
        run_id: _json(tree, paths.state(supplier, run_id, paths.POINTER)) for run_id in tree.list_states(supplier)
    }
    passed = {run_id: one for run_id, one in states.items() if one and _has_passed(tree, run_id, current)}
    for run_id in states:
        if current is not None and run_id == current.run_id:
            continue
        files = list(tree.list_files(paths.state(supplier, run_id)))
        if run_id in passed:
            later = [one for one in passed.values() if one["fence"] > passed[run_id]["fence"]]
            replaced = min((datetime.fromisoformat(one["published_at"]) for one in later), default=now)
            # The clock may have been wrong, but nothing is replaced before it is published.
            replaced = max(replaced, datetime.fromisoformat(passed[run_id]["published_at"]))
            why = f"replaced more than {_hours(age)} ago"
        else:
            replaced, why = (
                max((file.since for file in files), default=now),
                f"never published, for more than {_hours(age)}",
            )
        if now - replaced > age:
            yield ExpiredEntry(paths.state(supplier, run_id), _size(files), why)


def _has_passed(tree: FileTree, run_id: str, current: CurrentPointer | None) -> bool:
    if current is not None and run_id == current.run_id:
        return True
    told = _json(tree, paths.run(run_id, paths.MANIFEST))
    return (
        not told or told.get("status") == IngestRunStatus.PASS.value
    )  # a run that is gone had passed, or its state would be


def _json(tree: FileTree, path: str) -> dict[str, Any]:
    return parse_document(tree.read(path))


def _size(files: list[StoredFile]) -> int:
    return sum(file.size for file in files)


def _days(age: timedelta) -> str:
    return f"{age / timedelta(days=1):g} days"


def _hours(age: timedelta) -> str:
    return f"{age / timedelta(hours=1):g} hours"
