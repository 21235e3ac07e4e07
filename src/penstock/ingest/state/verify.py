"""I24: every hash in every manifest against the disk."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.run import ledger
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import hash_content, parse_document
from penstock.ingest.tree.port import FileTree
from penstock.kernel.errors import Conflict, Corrupt, NotFound

_GONE = "it is not there"
_NONE = "it is not what was written there"


@dataclass(frozen=True)
class FileCheck:
    """One file, and what is wrong with it; None when nothing is."""

    path: str
    problem: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(tree: FileTree, suppliers: list[str]) -> Iterator[FileCheck]:
    """Every file that a manifest or a pointer of these *suppliers* vouches for."""
    for supplier in suppliers:
        yield from _current(tree, supplier)
        for run_id in tree.list_states(supplier):
            yield from _state(tree, supplier, run_id)
        under_way = _under_way(tree, supplier)
        for run_id in tree.list_runs(supplier):
            yield from _run(tree, run_id, under_way)


def _current(tree: FileTree, supplier: str) -> Iterator[FileCheck]:
    path = f"{paths.CURRENT}/{supplier}"
    try:
        pointer = tree.read_pointer(supplier)
    except Corrupt as error:
        yield FileCheck(path, error.message)
        return
    if pointer is None:
        return
    yield FileCheck(path, None)
    path = paths.state(supplier, pointer.run_id, paths.MANIFEST)
    sha256 = parse_document(tree.read(path)).get("input_sha256")
    if sha256 is None:
        yield FileCheck(path, _NONE)
    elif tree.read(paths.accepted(supplier, sha256)) is None:
        yield FileCheck(paths.accepted(supplier, sha256), "the current state's file is not marked as accepted")


def _state(tree: FileTree, supplier: str, run_id: str) -> Iterator[FileCheck]:
    path = paths.state(supplier, run_id, paths.FACTS)
    told = tree.read(paths.state(supplier, run_id, paths.POINTER))
    if told is None:
        yield FileCheck(paths.state(supplier, run_id), "there is no pointer.json in it")
        return
    sha256 = parse_document(told).get("sha256")
    if sha256 is None:
        yield FileCheck(paths.state(supplier, run_id, paths.POINTER), _NONE)
    else:
        yield _compared(tree, path, sha256, None)


def _run(tree: FileTree, run_id: str, under_way: str | None) -> Iterator[FileCheck]:
    told = tree.read(paths.run(run_id, paths.MANIFEST))
    if told is None:
        killed = "it has no manifest: it was killed, which the next run notes"
        yield FileCheck(paths.run(run_id), None if run_id == under_way else killed)
        return
    manifest = parse_document(told)
    artifacts = manifest.get("artifacts")
    if artifacts is None:
        yield FileCheck(paths.run(run_id, paths.MANIFEST), _NONE)
        return
    if manifest.get("status") == IngestRunStatus.PASS.value and paths.FACTS not in artifacts:
        yield FileCheck(paths.run(run_id, paths.MANIFEST), "it passed, but names no facts")
    for name, known in artifacts.items():
        yield _compared(tree, paths.run(run_id, name), known["sha256"], known["size"])
    moved, sha256 = manifest.get("moved_to"), manifest.get("input_sha256")
    if moved and sha256:
        checked = _compared(tree, moved, sha256, manifest.get("input_size"))
        # Files go before what is told of them.
        yield FileCheck(moved, None) if checked.problem == _GONE else checked


def _under_way(tree: FileTree, supplier: str) -> str | None:
    """The run somebody works on; one that was killed is named in the ledger too, but holds no lock."""
    try:
        with tree.lock(supplier, "verify"):
            return None
    except Conflict:
        return ledger.load(tree, supplier).running


def _compared(tree: FileTree, path: str, sha256: str, size: int | None) -> FileCheck:
    try:
        with tree.open(path) as content:
            found = hash_content(content)
    except NotFound:
        return FileCheck(path, _GONE)
    if size is not None and found.size != size:
        return FileCheck(path, f"it has {found.size} bytes, not {size}")
    return FileCheck(path, None if found.sha256 == sha256 else f"its sha256 is {found.sha256}, not {sha256}")
