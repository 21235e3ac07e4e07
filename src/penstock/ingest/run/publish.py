"""§12, §16: the publication of a run, in an order in which a crash at any point does no harm."""

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
from penstock.ingest.model import (
    CurrentPointer,
    PublicationDiff,
    RunArtifact,
    RunManifest,
    RunStats,
    list_filled_categories,
)
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
from penstock.kernel.text import format_time

_LIBRARIES = ("polars", "python-calamine")


class PublishStep(StrEnum):
    """The steps of a run in their order; a run can be killed after each of them without losing anything."""

    LOCKED = "locked"
    RECOVERED = "recovered"
    COPIED = "copied"
    SORTED = "sorted"
    STARTED = "started"
    PROCESSED = "processed"
    CHECKED = "checked"
    ARTIFACTS_STORED = "artifacts_stored"
    STATE_STORED = "state_stored"
    SWITCHING = "switching"
    SWITCHED = "switched"
    RECORDED = "recorded"
    ACCEPTED = "accepted"
    MOVED = "moved"


OnStep = Callable[[PublishStep], None]


@dataclass(frozen=True)
class CurrentState:
    """The published state with its manifest and its statistics."""

    pointer: CurrentPointer
    manifest: dict[str, Any]
    stats: dict[str, Any]

    @property
    def as_previous(self) -> PreviousState:
        """The state as the guards compare a snapshot with it."""
        facts = self.stats["good_rows"] + self.stats["held_rows"]
        return PreviousState(self.pointer.run_id, facts, list_filled_categories(self.stats["categories"]))


def read_current_state(tree: FileTree, supplier: str) -> CurrentState | None:
    """Return the published state of *supplier*; None before the first publication."""
    pointer = tree.read_pointer(supplier)
    if pointer is None:
        return None
    files = (paths.MANIFEST, paths.STATS)
    manifest, stats = (
        parse_document(tree.read(paths.make_state_path(supplier, pointer.run_id, name))) for name in files
    )
    if "input_sha256" not in manifest or not {"good_rows", "held_rows", "categories"} <= stats.keys():
        hint = f"restore {tree.make_uri(paths.make_state_path(supplier, pointer.run_id))} from a backup"
        message = f"{' or '.join(files)} of the state {pointer.run_id} is missing or damaged"
        raise Corrupt("STATE_DAMAGED", message, hint=hint)
    return CurrentState(pointer, manifest, stats)


def compute_fence(tree: FileTree, supplier: str, current: CurrentState | None, last_fence: int) -> int:
    """I11: return a fence above every earlier one, even if the published state was lost."""
    if current is not None:
        return current.pointer.fence + 1
    manifests = [
        parse_document(tree.read(paths.make_run_path(run, paths.MANIFEST))) for run in tree.list_runs(supplier)
    ]
    return 1 + max([last_fence, *(int(manifest.get("fence") or 0) for manifest in manifests)])


def compare_states(
    tree: FileTree, processed: ProcessedFile, supplier: Supplier, name: str, current: CurrentState | None, work: Path
) -> PublicationDiff:
    """I21: return the numbers of facts that *processed* changes, and list the keys of these facts in a file."""
    keys = NdjsonLines(work / paths.CHANGED_KEYS)
    with ExitStack() as stack:
        stack.callback(keys.close)
        if current is None:
            return PublicationDiff(added=processed.index.count)
        old_facts = stack.enter_context(tree.open(paths.make_state_path(name, current.pointer.run_id, paths.FACTS)))
        old = indexes.build_index(old_facts, supplier, work / "index-before")
        difference = indexes.compare_indexes(old, processed.index)
        processed.facts.flush()
        _list_keys(keys, difference, old_facts, processed.facts.path, supplier)
    counts = {kind: sum(map(len, getattr(difference, kind))) for kind in ("added", "removed", "changed")}
    return PublicationDiff(**counts, unchanged=difference.unchanged, previous=current.pointer.run_id)


def _list_keys(keys: NdjsonLines, difference: KeyDifference, old_facts: Any, new: Path, supplier: Supplier) -> None:
    old_facts.seek(0)
    for lines, _ in read_lines_at(old_facts, indexes.merge_positions(difference.removed)):
        keys.write(encode_lines(build_changed_lines("removed", parse_facts(lines, supplier), supplier)))
    for change, positions in (("added", difference.added), ("changed", difference.changed)):
        with new.open("rb") as facts:
            for lines, _ in read_lines_at(facts, indexes.merge_positions(positions)):
                keys.write(encode_lines(build_changed_lines(change, parse_facts(lines, supplier), supplier)))


class Publication:
    """The publication of a run that has passed the checks."""

    def __init__(
        self, tree: FileTree, manifest: RunManifest, stats: RunStats, current: CurrentState | None, on_step: OnStep
    ) -> None:
        self._tree = tree
        self._manifest = manifest
        self._stats = stats
        self._seen = current.pointer if current else None
        self._on_step = on_step

    def publish(self, facts: Path, bad: Path, keys: Path, work: Path) -> RunManifest:
        """I11: write artifacts and state, switch the pointer, write the manifest, in this order.

        Raise RunFailed SUPERSEDED if another run has published meanwhile.
        """
        manifest = self._manifest
        pointer = CurrentPointer(
            manifest.run_id,
            manifest.artifacts[paths.FACTS].sha256,
            manifest.fence or 1,
            format_time(manifest.finished_at),
        )
        state = self._make_state_folder(facts, keys, pointer, work)
        store_artifacts(self._tree, manifest.run_id, facts, bad, self._stats)
        self._on_step(PublishStep.ARTIFACTS_STORED)
        self._tree.publish(state, manifest.supplier, manifest.run_id)
        self._on_step(PublishStep.STATE_STORED)
        self._on_step(PublishStep.SWITCHING)
        self._tree.switch_pointer(manifest.supplier, pointer, self._seen)
        self._on_step(PublishStep.SWITCHED)
        write_manifest(self._tree, manifest)
        self._on_step(PublishStep.RECORDED)
        mark_accepted(self._tree, manifest.as_dict())
        self._on_step(PublishStep.ACCEPTED)
        return manifest

    def _make_state_folder(self, facts: Path, keys: Path, pointer: CurrentPointer, work: Path) -> Path:
        folder = work / "state"
        folder.mkdir()
        link_file(facts, folder / paths.FACTS)
        keys.rename(folder / paths.CHANGED_KEYS)
        documents = {
            paths.POINTER: pointer.as_dict(),
            paths.MANIFEST: self._manifest.as_dict(),
            paths.STATS: self._stats.as_dict(),
            paths.CHANGES: self._manifest.changes.as_dict() if self._manifest.changes else {},
        }
        for name, content in documents.items():
            (folder / name).write_bytes(encode_document(content))
        return folder


def store_artifacts(tree: FileTree, run_id: str, facts: Path, bad: Path, stats: RunStats) -> None:
    """§9: store facts, bad rows and statistics of a run, whether it is published or not."""
    tree.write(paths.make_run_path(run_id, paths.STATS), encode_document(stats.as_dict()))
    tree.store(bad, paths.make_run_path(run_id, paths.BAD))
    tree.store(facts, paths.make_run_path(run_id, paths.FACTS))


def write_manifest(tree: FileTree, manifest: RunManifest) -> None:
    """§10: write the manifest, which makes a run complete."""
    tree.write(paths.make_run_path(manifest.run_id, paths.MANIFEST), encode_document(manifest.as_dict()))


def mark_accepted(tree: FileTree, manifest: dict[str, Any]) -> None:
    """I10, §11: mark the content of a published file, so that it is recognized as a duplicate."""
    path = paths.make_accepted_path(manifest["supplier"], manifest["input_sha256"])
    marker = {
        "run_id": manifest["run_id"],
        "accepted_at": manifest["finished_at"],
        "input_filename": manifest["input_filename"],
        "manifest_path": paths.make_run_path(manifest["run_id"], paths.MANIFEST),
    }
    tree.write(path, encode_document(marker))


def describe_artifacts(processed: ProcessedFile) -> dict[str, RunArtifact]:
    """I8: return the hash and the size of every file of a run."""
    stats = encode_document(processed.stats.as_dict())
    return {
        paths.FACTS: processed.facts.artifact,
        paths.BAD: processed.bad.artifact,
        paths.STATS: hash_content(io.BytesIO(stats)),
    }


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name; copy it if the disk has no hard links. Neither file is ever changed."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@cache
def read_versions() -> dict[str, str]:
    """Return the versions of the programs on which the result may depend."""
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }
