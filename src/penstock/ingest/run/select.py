"""§4: the selection of the file to process, and the sorting of the other files of an inbox."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import InboxFile, RunFailed
from penstock.ingest.run.ledger import FileSighting, Ledger
from penstock.ingest.tree import paths
from penstock.ingest.tree.disk import propose_names
from penstock.ingest.tree.port import FileChanged, FileTree

_BEFORE_ALL_TIMES = 0.0  # time of the last change of a file that was complete when it got its name
_CHECK_INTERVAL = 1.0  # seconds between two checks of a file that is not readable yet


@dataclass(frozen=True)
class SelectedFile:
    """The file to process: a private copy, hashed while it was copied."""

    arrival: InboxFile
    sha256: str
    copy: Path


@dataclass(frozen=True)
class ReadableFiles:
    """The files that can be read now, newest first, and the files that may still be written."""

    arrivals: list[InboxFile]
    waiting: list[InboxFile]


def list_readable(tree: FileTree, supplier: str, ledger: Ledger, window: float) -> ReadableFiles:
    """I3: return the files of the inbox; *ledger* remembers when each was seen."""
    now = tree.read_clock()
    arrivals = tree.list_arrivals(supplier)
    before, ledger.seen = ledger.seen, {}
    for arrival in arrivals:
        ledger.seen[arrival.name] = _make_sighting(arrival, before, now)
    finished = [arrival for arrival in arrivals if not paths.is_temporary(arrival.name)]
    ready = [arrival for arrival in finished if _is_readable(arrival, ledger.seen[arrival.name], now, window)]
    ready.sort(
        key=lambda arrival: (-arrival.modified_at.timestamp(), ledger.seen[arrival.name].first_seen, arrival.name)
    )
    return ReadableFiles(ready, [arrival for arrival in finished if arrival not in ready])


def wait_readable(
    tree: FileTree, supplier: str, ledger: Ledger, window: float, should_stop: Callable[[], bool]
) -> ReadableFiles:
    """Wait until a file can be read or the inbox is empty, at most about one window; return the files."""
    deadline = time.monotonic() + window + _CHECK_INTERVAL
    unchanged: dict[str, tuple[str, float]] = {}
    while True:
        files = list_readable(tree, supplier, ledger, window)
        now = time.monotonic()
        # The clock of the tree may be set back, so the monotonic clock of this process counts too.
        for arrival in files.waiting:
            if unchanged.get(arrival.name, ("", 0.0))[0] != arrival.signature:
                unchanged[arrival.name] = (arrival.signature, now)
        stable = [arrival for arrival in files.waiting if now - unchanged[arrival.name][1] >= window]
        if files.arrivals or stable or not files.waiting or now > deadline or should_stop():
            waiting = [arrival for arrival in files.waiting if arrival not in stable]
            return ReadableFiles([*files.arrivals, *stable], waiting)
        time.sleep(min(_CHECK_INTERVAL, max(0.01, window / 20)))


def _make_sighting(arrival: InboxFile, seen: dict[str, FileSighting], now: float) -> FileSighting:
    before = seen.get(arrival.name)
    # A rename from a temporary name means that the supplier has finished the file.
    drafts = (name for name, file in seen.items() if file.identity == arrival.identity and paths.is_temporary(name))
    was_renamed = arrival.identity is not None and any(name.lstrip(".").startswith(arrival.name) for name in drafts)
    if was_renamed:
        return FileSighting(arrival.signature, arrival.identity, now, _BEFORE_ALL_TIMES)
    if before is None or before.identity != arrival.identity:
        return FileSighting(arrival.signature, arrival.identity, now, now)
    if before.signature != arrival.signature or before.since > now:  # changed, or the clock was set back
        return FileSighting(arrival.signature, arrival.identity, min(before.first_seen, now), now)
    return before


def _is_readable(arrival: InboxFile, seen: FileSighting, now: float, window: float) -> bool:
    if arrival.changed_at is None or window == 0:
        return True
    touched = max(arrival.modified_at.timestamp(), arrival.changed_at.timestamp())
    return now - seen.since >= window or now - touched >= window


@dataclass(frozen=True)
class SortedInbox:
    """The files of an inbox: the file to process, duplicates, and files older than the file to process."""

    selected: SelectedFile | None
    duplicates: list[tuple[InboxFile, str]]
    obsolete: list[InboxFile]
    failed: tuple[InboxFile, RunFailed] | None = None  # a file that cannot even be hashed


def sort_inbox(
    tree: FileTree, arrivals: list[InboxFile], is_duplicate: Callable[[str], bool], work: Path
) -> SortedInbox:
    """I2: select the newest unique file; the others are duplicates, or obsolete."""
    (work / "input").mkdir()
    selected: SelectedFile | None = None
    failed: tuple[InboxFile, RunFailed] | None = None
    duplicates: list[tuple[InboxFile, str]] = []
    obsolete: list[InboxFile] = []
    for arrival in arrivals:
        copy = work / "input" / next(propose_names(arrival.name, "")) if selected is None else None
        try:
            sha256 = tree.fetch(arrival, copy)
        except FileChanged:
            _delete(copy)
            continue  # the file is being written after all: the next run takes it
        except RunFailed as error:
            failed = (arrival, error)
            if error.code is FailureCode.FILE_MISSING:
                continue  # deleted by the supplier or taken by another machine; there may be other files
            return SortedInbox(None, duplicates, [], failed)
        if is_duplicate(sha256) or (selected is not None and sha256 == selected.sha256):
            duplicates.append((arrival, sha256))
            _delete(copy)
        elif selected is None and copy is not None:
            selected = SelectedFile(arrival, sha256, copy)
        else:
            obsolete.append(arrival)
    return SortedInbox(selected, duplicates, obsolete, failed if selected is None else None)


def _delete(copy: Path | None) -> None:
    if copy is not None:
        copy.unlink(missing_ok=True)
