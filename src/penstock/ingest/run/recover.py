"""I10, I16: what a run that was killed left undone is done by the next one."""

from datetime import datetime
from typing import Any

from penstock.ingest.contract import FailureCode, IngestRunStatus
from penstock.ingest.model import CurrentPointer, InboxFile, RunFailed, RunFailure, RunManifest
from penstock.ingest.run import publish
from penstock.ingest.run.ledger import Ledger
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import encode_document, hash_content, parse_document
from penstock.ingest.tree.port import FileChanged, FileTree
from penstock.kernel.clock import Clock
from penstock.kernel.telemetry.build import code_commit


def recover(tree: FileTree, supplier: str, known: Ledger, clock: Clock) -> dict[str, Any] | None:
    """Bring everything in line with the current state, which alone is the truth; how a run ended that was killed."""
    current = publish.current_state(tree, supplier)
    was_running = known.running
    if current is not None:
        _accept(tree, supplier, current.manifest)
        if was_running == current.pointer.run_id:
            return _complete(tree, supplier, current.manifest)
    if was_running is None:
        return None
    ended = _give_up(tree, supplier, known, current.pointer if current else None, clock)
    later = publish.current_state(tree, supplier)
    if later is not None and later.pointer.run_id == was_running:
        # It lives, on another machine, and published while we gave it up.
        _note(tree, later.manifest)
        return later.manifest
    return ended


def _accept(tree: FileTree, supplier: str, manifest: dict[str, Any]) -> None:
    marked = parse_document(tree.read(paths.accepted(supplier, manifest["input_sha256"])))
    # I22: it may have been accepted before, by a run whose mark grows old.
    if marked.get("run_id") != manifest["run_id"]:
        _note(tree, manifest)
        publish.accept(tree, manifest)


def _note(tree: FileTree, manifest: dict[str, Any]) -> None:
    """What is current has passed, even if another machine gave its run up."""
    path = paths.run(manifest["run_id"], paths.MANIFEST)
    if parse_document(tree.read(path)).get("status") != IngestRunStatus.PASS.value:
        tree.write(path, encode_document(manifest))


def _complete(tree: FileTree, supplier: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """A run whose state is current has passed, whatever came after the switch."""
    _note(tree, manifest)
    for arrival in tree.list_arrivals(supplier):
        if arrival.name == manifest["input_filename"] and _is_it(tree, arrival, manifest["input_sha256"]):
            return _noted_move(tree, manifest, tree.move(arrival, paths.archive(supplier)))
    return _noted_move(tree, manifest, _moved_before(tree, paths.archive(supplier), manifest))


def _noted_move(tree: FileTree, manifest: dict[str, Any], moved_to: str | None) -> dict[str, Any]:
    if moved_to is None:
        return manifest
    manifest = {**manifest, "moved_to": moved_to}
    tree.write(paths.run(manifest["run_id"], paths.MANIFEST), encode_document(manifest))
    return manifest


def _moved_before(tree: FileTree, folder: str, manifest: dict[str, Any]) -> str | None:
    """Where a file went whose run was killed before it could note that."""
    for found in tree.list_files(folder):
        path, _, name = found.path.rpartition("/")
        is_named = name.startswith(manifest["input_filename"] or "/")
        if path == folder and is_named and found.size == manifest["input_size"]:
            with tree.open(found.path) as content:
                if hash_content(content).sha256 == manifest["input_sha256"]:
                    return found.path
    return None


def _is_it(tree: FileTree, arrival: InboxFile, sha256: str) -> bool:
    try:
        return tree.fetch(arrival) == sha256
    except (FileChanged, RunFailed):  # written anew, or gone
        return False


def _give_up(
    tree: FileTree, supplier: str, known: Ledger, current: CurrentPointer | None, clock: Clock
) -> dict[str, Any]:
    """A run that was killed before the switch has published nothing; its file is where it was."""
    run_id = known.running or ""
    if noted := parse_document(tree.read(paths.run(run_id, paths.MANIFEST))):
        was_moved = noted["moved_to"] is not None or noted["input_sha256"] is None
        return noted if was_moved else _noted_move(tree, noted, _moved_before(tree, paths.broken(supplier), noted))
    started = parse_document(tree.read(paths.run(run_id, paths.STARTED)))
    known.note_kill(started.get("input_sha256"))
    now = clock.now()
    said = "the run was killed, or the machine went down, before it published anything"
    manifest = RunManifest(
        run_id=run_id,
        supplier=supplier,
        input_filename=started.get("input_filename"),
        input_sha256=started.get("input_sha256"),
        started_at=datetime.fromisoformat(started["started_at"]) if "started_at" in started else now,
        finished_at=now,
        status=IngestRunStatus.FAIL,
        failure=RunFailure(FailureCode.INTERRUPTED, said, "nothing is to be done: the next run takes the file again"),
        previous_run=current.run_id if current else None,
        code_commit=code_commit(),
        versions=publish.versions(),
    )
    publish.note(tree, manifest)
    return manifest.as_dict()
