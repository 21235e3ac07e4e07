"""A reader in a process of its own: reads the current state again and again, until it is told to stop."""

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
def _opened(root: Path) -> Iterator[PublishedState]:
    with closing(FolderTree(root)) as tree, open_state(tree, SUPPLIER) as state:
        yield state


def _by_sdk(root: Path) -> AbstractContextManager[PublishedState]:
    return read_state(root, SUPPLIER)


WAYS = {"open_state": _opened, "sdk": _by_sdk}


def read_once(root: Path, way: str, last: int) -> int:
    """One whole state, which is not before *last*; its fence. Every fact tells the number and how many there are."""
    with WAYS[way](root) as state:
        facts = list(state)
        state.content.seek(0)
        assert hash_content(state.content).sha256 == state.pointer.sha256
    fence = state.pointer.fence
    assert {fact["run_id"] for fact in facts} == {state.pointer.run_id}
    assert {fact["payload"]["price"] for fact in facts} == {fence}
    assert len(facts) == count_of(fence)
    assert fence >= last, f"{fence} after {last}"
    return fence


def count_of(fence: int) -> int:
    """How many facts the state with that fence has."""
    return 50 + 37 * (fence % 7)


def read_on(root: Path, way: str, pipe: Pipe) -> None:
    """Read until something comes through *pipe*; then tell how many states were seen, and which was the last."""
    seen: list[int] = [0]
    reads = 0
    pipe.send("reading")
    while not pipe.poll():
        seen.append(read_once(root, way, seen[-1]))
        reads += 1
    pipe.send((reads, len(set(seen)) - 1, read_once(root, way, seen[-1])))
