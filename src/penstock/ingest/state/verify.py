"""I24: the comparison of every hash in every manifest with the files."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.run import ledger
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import hash_content, parse_document
from penstock.ingest.tree.port import FileTree
from penstock.kernel.errors import Conflict, Corrupt, NotFound

_MISSING = "the file is missing"
_CHANGED = "the file differs from what the run has written"


@dataclass(frozen=True)
class FileCheck:
    """A checked file with its problem; None if it is intact."""

    path: str
    problem: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify_suppliers(tree: FileTree, suppliers: list[str]) -> Iterator[FileCheck]:
    """Check every file that a manifest or a pointer of *suppliers* names."""
    for supplier in suppliers:
        yield from _check_pointer(tree, supplier)
        for run_id in tree.list_states(supplier):
            yield from _check_state(tree, supplier, run_id)
        active = _find_active_run(tree, supplier)
        for run_id in tree.list_runs(supplier):
            yield from _check_run(tree, run_id, active)


def _check_pointer(tree: FileTree, supplier: str) -> Iterator[FileCheck]:
    path = f"{paths.CURRENT}/{supplier}"
    try:
        pointer = tree.read_pointer(supplier)
    except Corrupt as error:
        yield FileCheck(path, error.message)
        return
    if pointer is None:
        return
    yield FileCheck(path, None)
    path = paths.make_state_path(supplier, pointer.run_id, paths.MANIFEST)
    sha256 = parse_document(tree.read(path)).get("input_sha256")
    if sha256 is None:
        yield FileCheck(path, _CHANGED)
    elif tree.read(paths.make_accepted_path(supplier, sha256)) is None:
        yield FileCheck(
            paths.make_accepted_path(supplier, sha256), "the file of the published state is not marked as accepted"
        )


def _check_state(tree: FileTree, supplier: str, run_id: str) -> Iterator[FileCheck]:
    path = paths.make_state_path(supplier, run_id, paths.FACTS)
    pointer = tree.read(paths.make_state_path(supplier, run_id, paths.POINTER))
    if pointer is None:
        yield FileCheck(paths.make_state_path(supplier, run_id), "the state has no pointer.json")
        return
    sha256 = parse_document(pointer).get("sha256")
    if sha256 is None:
        yield FileCheck(paths.make_state_path(supplier, run_id, paths.POINTER), _CHANGED)
    else:
        yield _check_file(tree, path, sha256, None)


def _check_run(tree: FileTree, run_id: str, active: str | None) -> Iterator[FileCheck]:
    content = tree.read(paths.make_run_path(run_id, paths.MANIFEST))
    if content is None:
        problem = "the run has no manifest because it was killed; the next run of the supplier writes it"
        yield FileCheck(paths.make_run_path(run_id), None if run_id == active else problem)
        return
    manifest = parse_document(content)
    artifacts = manifest.get("artifacts")
    if artifacts is None:
        yield FileCheck(paths.make_run_path(run_id, paths.MANIFEST), _CHANGED)
        return
    if manifest.get("status") == IngestRunStatus.PASS.value and paths.FACTS not in artifacts:
        yield FileCheck(paths.make_run_path(run_id, paths.MANIFEST), "the run passed, but its manifest names no facts")
    for name, artifact in artifacts.items():
        yield _check_file(tree, paths.make_run_path(run_id, name), artifact["sha256"], artifact["size"])
    moved_to, sha256 = manifest.get("moved_to"), manifest.get("input_sha256")
    if moved_to and sha256:
        check = _check_file(tree, moved_to, sha256, manifest.get("input_size"))
        # Files in quarantine and in the archive expire before the manifests that name them.
        yield FileCheck(moved_to, None) if check.problem == _MISSING else check


def _find_active_run(tree: FileTree, supplier: str) -> str | None:
    """Return the run that holds the lock of *supplier*. The ledger alone may name a run that was killed."""
    try:
        with tree.lock(supplier, "verify"):
            return None
    except Conflict:
        return ledger.load(tree, supplier).running


def _check_file(tree: FileTree, path: str, sha256: str, size: int | None) -> FileCheck:
    try:
        with tree.open(path) as content:
            actual = hash_content(content)
    except NotFound:
        return FileCheck(path, _MISSING)
    if size is not None and actual.size != size:
        return FileCheck(path, f"the file has {actual.size} bytes, not {size}")
    return FileCheck(path, None if actual.sha256 == sha256 else f"its sha256 is {actual.sha256}, not {sha256}")
