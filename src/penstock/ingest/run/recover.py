"""I10, I16: the recovery of a run that was killed, by the next run."""

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
from penstock.kernel.telemetry.build import find_code_commit


def recover_run(tree: FileTree, supplier: str, ledger: Ledger, clock: Clock) -> dict[str, Any] | None:
    """Make the tree consistent with the published state; return the manifest of the run that was killed, if any."""
    current = publish.read_current_state(tree, supplier)
    running = ledger.running
    if current is not None:
        _mark_accepted(tree, supplier, current.manifest)
        if running == current.pointer.run_id:
            return _complete_run(tree, supplier, current.manifest)
    if running is None:
        return None
    manifest = _give_up_run(tree, supplier, ledger, current.pointer if current else None, clock)
    later = publish.read_current_state(tree, supplier)
    if later is not None and later.pointer.run_id == running:
        # The run is alive on another machine, and published during the recovery.
        _write_passed_manifest(tree, later.manifest)
        return later.manifest
    return manifest


def _mark_accepted(tree: FileTree, supplier: str, manifest: dict[str, Any]) -> None:
    marker = parse_document(tree.read(paths.make_accepted_path(supplier, manifest["input_sha256"])))
    # I22: the marker may be of an earlier run with the same content, and would expire too early.
    if marker.get("run_id") != manifest["run_id"]:
        _write_passed_manifest(tree, manifest)
        publish.mark_accepted(tree, manifest)


def _write_passed_manifest(tree: FileTree, manifest: dict[str, Any]) -> None:
    """Write the manifest of a published run, even if another machine has recorded the run as failed."""
    path = paths.make_run_path(manifest["run_id"], paths.MANIFEST)
    if parse_document(tree.read(path)).get("status") != IngestRunStatus.PASS.value:
        tree.write(path, encode_document(manifest))


def _complete_run(tree: FileTree, supplier: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """Complete a run that was killed after its state was published; such a run has passed."""
    _write_passed_manifest(tree, manifest)
    for arrival in tree.list_arrivals(supplier):
        if arrival.name == manifest["input_filename"] and _has_content(tree, arrival, manifest["input_sha256"]):
            return _record_move(tree, manifest, tree.move(arrival, paths.make_archive_path(supplier)))
    return _record_move(tree, manifest, _find_moved_file(tree, paths.make_archive_path(supplier), manifest))


def _record_move(tree: FileTree, manifest: dict[str, Any], moved_to: str | None) -> dict[str, Any]:
    if moved_to is None:
        return manifest
    manifest = {**manifest, "moved_to": moved_to}
    tree.write(paths.make_run_path(manifest["run_id"], paths.MANIFEST), encode_document(manifest))
    return manifest


def _find_moved_file(tree: FileTree, folder: str, manifest: dict[str, Any]) -> str | None:
    """Return the path of a file whose run was killed between the move and the manifest; None if it was not moved."""
    for file in tree.list_files(folder):
        path, _, name = file.path.rpartition("/")
        is_named = name.startswith(manifest["input_filename"] or "/")
        if path == folder and is_named and file.size == manifest["input_size"]:
            with tree.open(file.path) as content:
                if hash_content(content).sha256 == manifest["input_sha256"]:
                    return file.path
    return None


def _has_content(tree: FileTree, arrival: InboxFile, sha256: str) -> bool:
    try:
        return tree.fetch(arrival) == sha256
    except (FileChanged, RunFailed):  # the supplier has replaced or deleted the file
        return False


def _give_up_run(
    tree: FileTree, supplier: str, ledger: Ledger, current: CurrentPointer | None, clock: Clock
) -> dict[str, Any]:
    """Record the failure of a run that was killed before it published; its file is still in the inbox."""
    run_id = ledger.running or ""
    if manifest := parse_document(tree.read(paths.make_run_path(run_id, paths.MANIFEST))):
        is_final = manifest["moved_to"] is not None or manifest["input_sha256"] is None
        moved_to = None if is_final else _find_moved_file(tree, paths.make_broken_path(supplier), manifest)
        return _record_move(tree, manifest, moved_to)
    started = parse_document(tree.read(paths.make_run_path(run_id, paths.STARTED)))
    ledger.record_kill(started.get("input_sha256"))
    now = clock.now()
    message = "the run was killed, or its machine failed, before it published anything"
    interrupted = RunManifest(
        run_id=run_id,
        supplier=supplier,
        input_filename=started.get("input_filename"),
        input_sha256=started.get("input_sha256"),
        started_at=datetime.fromisoformat(started["started_at"]) if "started_at" in started else now,
        finished_at=now,
        status=IngestRunStatus.FAIL,
        failure=RunFailure(FailureCode.INTERRUPTED, message, "no action is needed: the next run processes the file"),
        previous_run=current.run_id if current else None,
        code_commit=find_code_commit(),
        versions=publish.read_versions(),
    )
    publish.write_manifest(tree, interrupted)
    return interrupted.as_dict()
