"""Published states for Python programs. A state is complete and verified; a later publication does not change it.

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
    """Open the published state of *supplier* below *root*, a folder or s3://bucket/prefix with *options* of the bucket.

    Raise NotFound STATE_NOT_FOUND before the first publication, and Corrupt STATE_DAMAGED if the hash is wrong.
    """
    with closing(open_tree(str(root), options)) as tree, open_state(tree, supplier) as state:
        yield state
