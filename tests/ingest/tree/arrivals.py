"""Files in the inbox and stored states for tests of the tree."""

import hashlib

from penstock.ingest.model import CurrentPointer, InboxFile
from penstock.ingest.tree import paths
from penstock.ingest.tree.port import FileTree
from tests.ingest.tree_backends import SUPPLIER, TreeBackend, drop

INBOX = paths.make_inbox_path(SUPPLIER)
BROKEN = paths.make_broken_path(SUPPLIER)


def arrived(backend: TreeBackend, name: str = "price.csv", content: bytes = b"content") -> InboxFile:
    drop(backend, name, content)
    return arrival(backend.tree, name)


def arrival(tree: FileTree, name: str) -> InboxFile:
    [found] = [arrival for arrival in tree.list_arrivals(SUPPLIER) if arrival.name == name]
    return found


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def published(backend: TreeBackend, run_id: str, fence: int = 1) -> CurrentPointer:
    """Store a state that is not current yet, and return its pointer."""
    pointer = CurrentPointer(run_id, sha256(run_id.encode()), fence, "2026-01-01T00:00:00+00:00")
    with backend.tree.open_work_folder(SUPPLIER, run_id) as work:
        state_folder = work / "state"
        state_folder.mkdir()
        (state_folder / paths.FACTS).write_bytes(run_id.encode())
        (state_folder / paths.POINTER).write_text(
            f'{{"run_id": "{run_id}", "sha256": "{pointer.sha256}", "fence": {fence},'
            f' "published_at": "{pointer.published_at}"}}'
        )
        backend.tree.publish(state_folder, SUPPLIER, run_id)
    return pointer
