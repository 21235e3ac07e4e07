"""§17: how readers get a state: the pointer resolved once, the hash verified, and then nothing else but that state."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

from penstock.ingest.model import CurrentPointer, checked_supplier, no_run, supplier_of
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import hash_content, parse_document
from penstock.ingest.tree.port import FileTree
from penstock.kernel.errors import Corrupt, NotFound


@dataclass(frozen=True)
class PublishedState:
    """A published state, open for reading; whatever is published meanwhile, it stays this one."""

    supplier: str
    pointer: CurrentPointer
    content: BinaryIO

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every fact."""
        self.content.seek(0)
        return (orjson.loads(line) for line in self.content)


def current(tree: FileTree, supplier: str) -> CurrentPointer:
    """Which state of *supplier* is current; NotFound STATE_NOT_FOUND when nothing was published."""
    pointer = tree.read_pointer(checked_supplier(supplier))
    if pointer is None:
        hint = f"put a file into {tree.uri(paths.inbox(supplier))}, then `penstock ingest run {supplier}`"
        raise NotFound("STATE_NOT_FOUND", f"nothing was published for {supplier} yet", hint=hint)
    return pointer


@contextmanager
def open_state(tree: FileTree, supplier: str) -> Iterator[PublishedState]:
    """The current state of *supplier*, its hash verified."""
    with _opened(tree, supplier) as (pointer, content):
        found = hash_content(content).sha256
        if found != pointer.sha256:
            hint = "somebody changed it; restore it from a backup, or have the file published anew"
            said = f"the state {pointer.run_id} is damaged: its sha256 is {found}, not {pointer.sha256}"
            raise Corrupt("STATE_DAMAGED", said, hint=hint)
        content.seek(0)
        yield PublishedState(supplier, pointer, content)


@contextmanager
def _opened(tree: FileTree, supplier: str) -> Iterator[tuple[CurrentPointer, BinaryIO]]:
    """The current state; one that was replaced, and removed, since it was looked up is not it any more."""
    with ExitStack() as stack:
        pointer = current(tree, supplier)
        while True:
            try:
                content = stack.enter_context(tree.open(paths.state(supplier, pointer.run_id, paths.FACTS)))
                break
            except NotFound:
                before, pointer = pointer, current(tree, supplier)
                if pointer == before:
                    raise
        yield pointer, content


def manifest_of(tree: FileTree, run_id: str) -> dict[str, Any]:
    """What is remembered of a run; NotFound RUN_NOT_FOUND when nothing is."""
    supplier = supplier_of(run_id)
    content = tree.read(paths.run(run_id, paths.MANIFEST)) or tree.read(paths.state(supplier, run_id, paths.MANIFEST))
    if content is None:
        raise no_run(run_id)
    return parse_document(content)


def stats_of(tree: FileTree, run_id: str) -> dict[str, Any]:
    """§9.4: what became of the rows of a run; nothing when it read none."""
    return parse_document(tree.read(paths.run(run_id, paths.STATS)))


@contextmanager
def open_facts(tree: FileTree, run_id: str) -> Iterator[BinaryIO]:
    """The facts of a run, as its state if it has one, else as its artifacts."""
    supplier = supplier_of(run_id)
    folder = paths.state(supplier, run_id) if run_id in tree.list_states(supplier) else paths.run(run_id)
    with tree.open(f"{folder}/{paths.FACTS}") as content:
        yield content


def quarantined(tree: FileTree, supplier: str) -> Iterator[dict[str, Any]]:
    """The files that were set aside; of the broken ones why, as the run that did it noted."""
    failed = {manifest["moved_to"]: manifest for manifest in _manifests(tree, supplier) if manifest["moved_to"]}
    for found in tree.list_files(f"{paths.QUARANTINE}/{supplier}"):
        run = failed.get(found.path)
        is_duplicate = found.path.startswith(paths.duplicates(supplier))
        why = "accepted before" if is_duplicate else run and run["failure_code"]
        yield {
            "supplier": supplier, "path": found.path, "bytes": found.size, "since": found.since.isoformat(),
            "why": why, "detail": run and run["failure"], "run_id": run and run["run_id"],
        }  # fmt: skip


def _manifests(tree: FileTree, supplier: str) -> Iterator[dict[str, Any]]:
    for run_id in tree.list_runs(supplier):
        if manifest := parse_document(tree.read(paths.run(run_id, paths.MANIFEST))):
            yield manifest


def bad_rows(tree: FileTree, run_id: str) -> Iterator[dict[str, Any]]:
    """§9.3: the bad rows of a run."""
    manifest_of(tree, run_id)
    try:
        with tree.open(paths.run(run_id, paths.BAD)) as content:
            yield from (orjson.loads(line) for line in content)
    except NotFound:
        return  # it failed before a row was read
