"""A process that reads the published state again and again until it is stopped."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from penstock.ingest.sdk import read_state
from penstock.ingest.state.reader import PublishedState, open_state
from penstock.ingest.tree.documents import hash_content
from penstock.ingest.tree.folder import FolderTree

SUPPLIER = "acme"


@contextmanager
def _open_by_tree(root: Path) -> Iterator[PublishedState]:
    with closing(FolderTree(root)) as tree, open_state(tree, SUPPLIER) as state:
        yield state


def _open_by_sdk(root: Path) -> AbstractContextManager[PublishedState]:
    return read_state(root, SUPPLIER)


READERS = {"open_state": _open_by_tree, "sdk": _open_by_sdk}


def read_once(root: Path, reader: str, last: int) -> int:
    """Read one state, check that it is complete and not older than fence *last*, and return its fence."""
    with READERS[reader](root) as state:
        facts = list(state)
        state.content.seek(0)
        assert hash_content(state.content).sha256 == state.pointer.sha256
    fence = state.pointer.fence
    assert {fact["run_id"] for fact in facts} == {state.pointer.run_id}
    assert {fact["payload"]["price"] for fact in facts} == {fence}
    assert len(facts) == count_facts(fence)
    assert fence >= last, f"{fence} after {last}"
    return fence


def count_facts(fence: int) -> int:
    """Return the number of facts of the state with that fence."""
    return 50 + 37 * (fence % 7)


def read_until_stopped(root: Path, reader: str, pipe: Pipe) -> None:
    """Read until *pipe* has a message; then send the numbers of reads and of states, and the last fence."""
    seen: list[int] = [0]
    reads = 0
    pipe.send("reading")
    while not pipe.poll():
        seen.append(read_once(root, reader, seen[-1]))
        reads += 1
    pipe.send((reads, len(set(seen)) - 1, read_once(root, reader, seen[-1])))
