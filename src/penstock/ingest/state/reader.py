"""§17: the reading of a published state. The pointer is resolved once, and the hash is verified first."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

from penstock.ingest.model import CurrentPointer, check_supplier_name, make_run_not_found_error, parse_supplier
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import hash_content, parse_document
from penstock.ingest.tree.port import FileTree
from penstock.kernel.errors import Corrupt, NotFound
from penstock.kernel.text import format_time


@dataclass(frozen=True)
class PublishedState:
    """A published state, open for reading. A later publication does not change it."""

    supplier: str
    pointer: CurrentPointer
    content: BinaryIO

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over all facts."""
        self.content.seek(0)
        return (orjson.loads(line) for line in self.content)


def find_pointer(tree: FileTree, supplier: str) -> CurrentPointer:
    """Return the pointer to the published state; NotFound STATE_NOT_FOUND before the first publication."""
    pointer = tree.read_pointer(check_supplier_name(supplier))
    if pointer is None:
        inbox = tree.make_uri(paths.make_inbox_path(supplier))
        hint = f"put a file into {inbox}, then run `penstock ingest run {supplier}`"
        raise NotFound("STATE_NOT_FOUND", f"supplier {supplier} has no published state yet", hint=hint)
    return pointer


@contextmanager
def open_state(tree: FileTree, supplier: str) -> Iterator[PublishedState]:
    """Open the published state of *supplier* after its hash is verified."""
    with _open_current(tree, supplier) as (pointer, content):
        sha256 = hash_content(content).sha256
        if sha256 != pointer.sha256:
            state = tree.make_uri(paths.make_state_path(supplier, pointer.run_id))
            hint = f"restore {state} from a backup, or publish the file again"
            message = f"the state {pointer.run_id} is damaged: its sha256 is {sha256}, not {pointer.sha256}"
            raise Corrupt("STATE_DAMAGED", message, hint=hint)
        content.seek(0)
        yield PublishedState(supplier, pointer, content)


@contextmanager
def _open_current(tree: FileTree, supplier: str) -> Iterator[tuple[CurrentPointer, BinaryIO]]:
    """Open the published state; start again if it was replaced and deleted since its pointer was read."""
    with ExitStack() as stack:
        pointer = find_pointer(tree, supplier)
        while True:
            try:
                content = stack.enter_context(tree.open(paths.make_state_path(supplier, pointer.run_id, paths.FACTS)))
                break
            except NotFound:
                before, pointer = pointer, find_pointer(tree, supplier)
                if pointer == before:
                    raise
        yield pointer, content


def read_manifest(tree: FileTree, run_id: str) -> dict[str, Any]:
    """Return the manifest of a run; NotFound RUN_NOT_FOUND if there is none."""
    supplier = parse_supplier(run_id)
    content = tree.read(paths.make_run_path(run_id, paths.MANIFEST)) or tree.read(
        paths.make_state_path(supplier, run_id, paths.MANIFEST)
    )
    if content is None:
        raise make_run_not_found_error(run_id)
    return parse_document(content)


def read_stats(tree: FileTree, run_id: str) -> dict[str, Any]:
    """§9.4: return the statistics of a run; an empty document if it read no rows."""
    return parse_document(tree.read(paths.make_run_path(run_id, paths.STATS)))


@contextmanager
def open_facts(tree: FileTree, run_id: str) -> Iterator[BinaryIO]:
    """Open the facts of a run: those of its state if it has one, otherwise its artifact."""
    supplier = parse_supplier(run_id)
    folder = (
        paths.make_state_path(supplier, run_id) if run_id in tree.list_states(supplier) else paths.make_run_path(run_id)
    )
    with tree.open(f"{folder}/{paths.FACTS}") as content:
        yield content


def list_quarantine(tree: FileTree, supplier: str) -> Iterator[dict[str, Any]]:
    """Return the files in quarantine; rejected files with the reason and the message of their run."""
    failed = {manifest["moved_to"]: manifest for manifest in _read_manifests(tree, supplier) if manifest["moved_to"]}
    for file in tree.list_files(f"{paths.QUARANTINE}/{supplier}"):
        run = failed.get(file.path)
        is_duplicate = file.path.startswith(paths.make_duplicates_path(supplier))
        yield {
            "supplier": supplier,
            "path": file.path,
            "bytes": file.size,
            "since": format_time(file.since),
            "reason": "accepted before" if is_duplicate else run and run["failure_code"],
            "detail": run and run["failure"],
            "run_id": run and run["run_id"],
        }


def _read_manifests(tree: FileTree, supplier: str) -> Iterator[dict[str, Any]]:
    for run_id in tree.list_runs(supplier):
        if manifest := parse_document(tree.read(paths.make_run_path(run_id, paths.MANIFEST))):
            yield manifest


def read_bad_rows(tree: FileTree, run_id: str) -> Iterator[dict[str, Any]]:
    """§9.3: return the bad rows of a run."""
    read_manifest(tree, run_id)
    try:
        with tree.open(paths.make_run_path(run_id, paths.BAD)) as content:
            yield from (orjson.loads(line) for line in content)
    except NotFound:
        return  # the run failed before it read a row
