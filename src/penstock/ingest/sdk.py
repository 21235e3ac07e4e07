"""Published states for Python programs: one whole state at a time, verified, whatever is published meanwhile.

with read_state("/data", "brinex") as state:
    for fact in state:
        print(state.pointer.run_id, fact["payload"])
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from penstock.ingest.state.reader import PublishedState, open_state
from penstock.ingest.tree.location import open_tree

__all__ = ["PublishedState", "read_state"]


@contextmanager
def read_state(root: str | Path, supplier: str, **options: str) -> Iterator[PublishedState]:
    """The current state of *supplier* below *root*, a folder or s3://bucket/prefix with the *options* of its store.

    NotFound STATE_NOT_FOUND when nothing was published, Corrupt STATE_DAMAGED when it is not what was published.
    """
    with closing(open_tree(str(root), options)) as tree, open_state(tree, supplier) as state:
        yield state
