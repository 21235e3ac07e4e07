"""§12, §16: what a run leaves behind, in an order that a crash at any point does no harm to."""

import io
import os
import platform
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.ingest.model import CurrentPointer, PublicationDiff, RunArtifact, RunManifest, RunStats, alive
from penstock.ingest.run.quality import PreviousState
from penstock.ingest.supplier import Supplier
from penstock.ingest.transform import key_index as indexes
from penstock.ingest.transform.key_index import KeyDifference
from penstock.ingest.transform.ndjson import NdjsonLines, build_changed_lines, encode_lines, parse_facts, read_lines_at
from penstock.ingest.transform.pipeline import ProcessedFile
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import encode_document, hash_content, parse_document
from penstock.ingest.tree.port import FileTree
from penstock.kernel.errors import Corrupt

_LIBRARIES = ("polars", "python-calamine")


class PublishStep(StrEnum):
    """Where a run can be stopped: after each of these it can be killed, and nothing is lost."""

    LOCKED = "locked"
    RECOVERED = "recovered"
    COPIED = "copied"
    SORTED = "sorted"
    STARTED = "started"
    PROCESSED = "processed"
    JUDGED = "judged"
    KEPT = "kept"
    STORED = "stored"
    SWITCHING = "switching"
    SWITCHED = "switched"
    NOTED = "noted"
    ACCEPTED = "accepted"
    MOVED = "moved"


OnStep = Callable[[PublishStep], None]


@dataclass(frozen=True)
class CurrentState:
    """The state that is current when a run begins, with what is told of it."""

    pointer: CurrentPointer
    manifest: dict[str, Any]
    stats: dict[str, Any]

    @property
    def before(self) -> PreviousState:
        facts = self.stats["good_rows"] + self.stats["held_rows"]
        return PreviousState(self.pointer.run_id, facts, alive(self.stats["categories"]))


def current_state(tree: FileTree, supplier: str) -> CurrentState | None:
    """What is published, or None."""
    pointer = tree.read_pointer(supplier)
    if pointer is None:
        return None
    files = (paths.MANIFEST, paths.STATS)
    manifest, stats = (parse_document(tree.read(paths.state(supplier, pointer.run_id, name))) for name in files)
    if "input_sha256" not in manifest or not {"good_rows", "held_rows", "categories"} <= stats.keys():
        hint = "restore it from a backup"
        raise Corrupt(
            "STATE_DAMAGED", f"{' or '.join(files)} of the state {pointer.run_id} is gone or damaged", hint=hint
        )
    return CurrentState(pointer, manifest, stats)


def next_fence(tree: FileTree, supplier: str, current: CurrentState | None, remembered: int) -> int:
    """I11: one more than any before, even when the current state was lost."""
    if current is not None:
        return current.pointer.fence + 1
    noted = [parse_document(tree.read(paths.run(run, paths.MANIFEST))) for run in tree.list_runs(supplier)]
    return 1 + max([remembered, *(int(one.get("fence") or 0) for one in noted)])


def compare(
    tree: FileTree, made: ProcessedFile, supplier: Supplier, name: str, current: CurrentState | None, work: Path
) -> PublicationDiff:
    """I21: what *made* changes against the current state; the keys that change are listed beside the facts."""
    keys = NdjsonLines(work / paths.CHANGED_KEYS)
    with ExitStack() as stack:
        stack.callback(keys.close)
        if current is None:
            return PublicationDiff(added=made.index.count)
        old_facts = stack.enter_context(tree.open(paths.state(name, current.pointer.run_id, paths.FACTS)))
        old = indexes.build_index(old_facts, supplier, work / "index-before")
        found = indexes.compare_indexes(old, made.index)
        made.facts.flush()
        _list_keys(keys, found, old_facts, made.facts.path, supplier)
    counts = {name: sum(map(len, getattr(found, name))) for name in ("added", "removed", "changed")}
    return PublicationDiff(**counts, unchanged=found.unchanged, previous=current.pointer.run_id)


def _list_keys(keys: NdjsonLines, found: KeyDifference, old_facts: Any, new: Path, supplier: Supplier) -> None:
    old_facts.seek(0)
    for lines, _ in read_lines_at(old_facts, indexes.merge_positions(found.removed)):
        keys.write(encode_lines(build_changed_lines("removed", parse_facts(lines, supplier), supplier)))
    for change, places in (("added", found.added), ("changed", found.changed)):
        with new.open("rb") as facts:
            for lines, _ in read_lines_at(facts, indexes.merge_positions(places)):
                keys.write(encode_lines(build_changed_lines(change, parse_facts(lines, supplier), supplier)))


class Publication:
    """A run that has passed, on its way to being the current state."""

    def __init__(
        self, tree: FileTree, manifest: RunManifest, stats: RunStats, current: CurrentState | None, on_step: OnStep
    ) -> None:
        self._tree = tree
        self._manifest = manifest
        self._stats = stats
        self._seen = current.pointer if current else None
        self._on_step = on_step

    def publish(self, facts: Path, bad: Path, keys: Path, work: Path) -> RunManifest:
        """I11: artifacts, state, switch, manifest, in this order. Failed SUPERSEDED when another was quicker."""
        manifest = self._manifest
        pointer = CurrentPointer(
            manifest.run_id,
            manifest.artifacts[paths.FACTS].sha256,
            manifest.fence or 1,
            manifest.finished_at.isoformat(),
        )
        state = self._state_folder(facts, keys, pointer, work)
        keep_artifacts(self._tree, manifest.run_id, facts, bad, self._stats)
        self._on_step(PublishStep.KEPT)
        self._tree.publish(state, manifest.supplier, manifest.run_id)
        self._on_step(PublishStep.STORED)
        self._on_step(PublishStep.SWITCHING)
        self._tree.switch_pointer(manifest.supplier, pointer, self._seen)
        self._on_step(PublishStep.SWITCHED)
        note(self._tree, manifest)
        self._on_step(PublishStep.NOTED)
        accept(self._tree, manifest.as_dict())
        self._on_step(PublishStep.ACCEPTED)
        return manifest

    def _state_folder(self, facts: Path, keys: Path, pointer: CurrentPointer, work: Path) -> Path:
        folder = work / "state"
        folder.mkdir()
        link(facts, folder / paths.FACTS)
        keys.rename(folder / paths.CHANGED_KEYS)
        small_files = {
            paths.POINTER: pointer.as_dict(),
            paths.MANIFEST: self._manifest.as_dict(),
            paths.STATS: self._stats.as_dict(),
            paths.CHANGES: self._manifest.changes.as_dict() if self._manifest.changes else {},
        }
        for name, content in small_files.items():
            (folder / name).write_bytes(encode_document(content))
        return folder


def keep_artifacts(tree: FileTree, run_id: str, facts: Path, bad: Path, stats: RunStats) -> None:
    """§9: what a run made of its file, published or not."""
    tree.write(paths.run(run_id, paths.STATS), encode_document(stats.as_dict()))
    tree.store(bad, paths.run(run_id, paths.BAD))
    tree.store(facts, paths.run(run_id, paths.FACTS))


def note(tree: FileTree, manifest: RunManifest) -> None:
    """§10: the manifest, which makes a run complete."""
    tree.write(paths.run(manifest.run_id, paths.MANIFEST), encode_document(manifest.as_dict()))


def accept(tree: FileTree, manifest: dict[str, Any]) -> None:
    """I10, §11: this content need not be looked at again."""
    path = paths.accepted(manifest["supplier"], manifest["input_sha256"])
    told = {
        "run_id": manifest["run_id"],
        "accepted_at": manifest["finished_at"],
        "input_filename": manifest["input_filename"],
        "manifest_path": paths.run(manifest["run_id"], paths.MANIFEST),
    }
    tree.write(path, encode_document(told))


def artifacts(made: ProcessedFile) -> dict[str, RunArtifact]:
    """I8: every file of a run with its hash and size."""
    stats = encode_document(made.stats.as_dict())
    return {
        paths.FACTS: made.facts.artifact,
        paths.BAD: made.bad.artifact,
        paths.STATS: hash_content(io.BytesIO(stats)),
    }


def link(source: Path, target: Path) -> None:
    """One file under two names where the disk can do that, else a copy: both are never written again."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@cache
def versions() -> dict[str, str]:
    """What the result may depend on."""
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }
