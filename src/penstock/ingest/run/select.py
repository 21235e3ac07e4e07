"""§4: which file of an inbox is next, and where the others go."""

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

_LONG_AGO = 0.0  # since when a file has not changed that was finished when it got its name
_LOOK = 1.0  # seconds between two looks at a file that is not ready


@dataclass(frozen=True)
class SelectedFile:
    """The file to process: a private copy of it, hashed while it was copied."""

    arrival: InboxFile
    sha256: str
    copy: Path


@dataclass(frozen=True)
class ReadableFiles:
    """The files that can be read now, the newest first, and those that may still be written."""

    arrivals: list[InboxFile]
    waiting: list[InboxFile]


def look(tree: FileTree, supplier: str, ledger: Ledger, window: float) -> ReadableFiles:
    """I3: what is in the inbox; *ledger* remembers what was seen."""
    now = tree.now()
    found = tree.list_arrivals(supplier)
    before, ledger.seen = ledger.seen, {}
    for one in found:
        ledger.seen[one.name] = _sighted(one, before, now)
    finished = [one for one in found if not paths.is_temporary(one.name)]
    ready = [one for one in finished if _is_ready(one, ledger.seen[one.name], now, window)]
    ready.sort(key=lambda one: (-one.modified_at.timestamp(), ledger.seen[one.name].first_seen, one.name))
    return ReadableFiles(ready, [one for one in finished if one not in ready])


def wait(tree: FileTree, supplier: str, ledger: Ledger, window: float, stop: Callable[[], bool]) -> ReadableFiles:
    """What `look` tells once something is ready, or nothing is there any more; at most about one window."""
    deadline = time.monotonic() + window + _LOOK
    watched: dict[str, tuple[str, float]] = {}
    while True:
        found = look(tree, supplier, ledger, window)
        now = time.monotonic()
        # Beside the tree's clock, which may be set back, our own.
        for one in found.waiting:
            if watched.get(one.name, ("", 0.0))[0] != one.signature:
                watched[one.name] = (one.signature, now)
        calm = [one for one in found.waiting if now - watched[one.name][1] >= window]
        if found.arrivals or calm or not found.waiting or now > deadline or stop():
            return ReadableFiles([*found.arrivals, *calm], [one for one in found.waiting if one not in calm])
        time.sleep(min(_LOOK, max(0.01, window / 20)))


def _sighted(arrival: InboxFile, known: dict[str, FileSighting], now: float) -> FileSighting:
    before = known.get(arrival.name)
    # Seen under a name that said it was not finished: whoever renames has finished.
    drafts = (name for name, one in known.items() if one.identity == arrival.identity and paths.is_temporary(name))
    was_renamed = arrival.identity is not None and any(name.lstrip(".").startswith(arrival.name) for name in drafts)
    if was_renamed:
        return FileSighting(arrival.signature, arrival.identity, now, _LONG_AGO)
    if before is None or before.identity != arrival.identity:
        return FileSighting(arrival.signature, arrival.identity, now, now)
    if before.signature != arrival.signature or before.since > now:  # changed, or the clock was set back
        return FileSighting(arrival.signature, arrival.identity, min(before.first_seen, now), now)
    return before


def _is_ready(arrival: InboxFile, seen: FileSighting, now: float, window: float) -> bool:
    if arrival.changed_at is None or window == 0:
        return True
    touched = max(arrival.modified_at.timestamp(), arrival.changed_at.timestamp())
    return now - seen.since >= window or now - touched >= window


@dataclass(frozen=True)
class SortedInbox:
    """What an inbox holds: the file to process, and which others go where."""

    chosen: SelectedFile | None
    duplicates: list[tuple[InboxFile, str]]
    obsolete: list[InboxFile]
    failed: tuple[InboxFile, RunFailed] | None = None  # one that cannot even be hashed


def sort(tree: FileTree, ready: list[InboxFile], is_known: Callable[[str], bool], work: Path) -> SortedInbox:
    """I2: the newest unique file wins; what is known, or the same as it, is a duplicate; the rest is obsolete."""
    (work / "input").mkdir()
    chosen: SelectedFile | None = None
    failed: tuple[InboxFile, RunFailed] | None = None
    duplicates: list[tuple[InboxFile, str]] = []
    obsolete: list[InboxFile] = []
    for arrival in ready:
        copy = work / "input" / next(propose_names(arrival.name, "")) if chosen is None else None
        try:
            sha256 = tree.fetch(arrival, copy)
        except FileChanged:
            _forget(copy)
            continue  # it is being written after all: next time
        except RunFailed as error:
            failed = (arrival, error)
            if error.code is FailureCode.FILE_MISSING:
                continue  # taken back, or another machine was quicker; perhaps there are others
            return SortedInbox(None, duplicates, [], failed)
        if is_known(sha256) or (chosen is not None and sha256 == chosen.sha256):
            duplicates.append((arrival, sha256))
            _forget(copy)
        elif chosen is None and copy is not None:
            chosen = SelectedFile(arrival, sha256, copy)
        else:
            obsolete.append(arrival)
    return SortedInbox(chosen, duplicates, obsolete, failed if chosen is None else None)


def _forget(copy: Path | None) -> None:
    if copy is not None:
        copy.unlink(missing_ok=True)
