"""Backends of the ingest tree: a folder, an S3 bucket, and a bucket on a folder."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from penstock.ingest.tree import paths as layout
from penstock.ingest.tree.async_bridge import AsyncBridge
from penstock.ingest.tree.bucket import BucketTree
from penstock.ingest.tree.folder import FolderTree
from penstock.ingest.tree.port import FileTree
from penstock.kernel.storage import Storage
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.storage.objects import ObjectStorage
from tests.services.s3 import S3Bucket

SUPPLIER = "acme"


class TreeBackend(Protocol):
    """A tree, and the actions of other programs on it."""

    tree: FileTree

    def put(self, path: str, content: bytes, age: float = 0) -> None:
        """Write a file as a supplier does, *age* seconds ago."""

    def delete(self, path: str) -> None: ...


def drop(backend: TreeBackend, name: str, content: bytes, age: float = 0) -> None:
    backend.put(f"{layout.make_inbox_path(SUPPLIER)}/{name}", content, age)


def stored_paths(tree: FileTree, folder: str) -> list[str]:
    """Return the paths of the files below *folder*, relative to it."""
    return sorted(file.path.removeprefix(f"{folder}/") for file in tree.list_files(folder))


class FolderBackend:
    """A folder of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree: FileTree = FolderTree(root)

    def put(self, path: str, content: bytes, age: float = 0) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        modified = time.time() - age
        os.utime(file, (modified, modified))

    def delete(self, path: str) -> None:
        (self.root / path).unlink()


class BucketBackend:
    """A bucket; every machine has its own local folder."""

    def __init__(self, storage: Storage, url: str, machines: Path, bridge: AsyncBridge) -> None:
        self.storage = storage
        self._url = url
        self._machines = machines
        self._bridge = bridge
        self._trees: list[BucketTree] = []
        self.tree: FileTree = self.machine()

    def machine(self, storage: Storage | None = None, name: str = "") -> BucketTree:
        """Return the tree of another machine, or of the machine *name*."""
        tree = BucketTree(storage or self.storage, self._url, self._machines / (name or uuid.uuid4().hex))
        self._trees.append(tree)
        return tree

    def put(self, path: str, content: bytes, age: float = 0) -> None:
        self._bridge.call(self.storage.put(path, content))
        if age:
            self._set_time(path, datetime.fromtimestamp(time.time() - age, UTC))

    def delete(self, path: str) -> None:
        self._bridge.call(self.storage.delete(path))

    def close(self) -> None:
        for tree in self._trees:
            tree.close()

    def _set_time(self, path: str, time_of_change: datetime) -> None:
        parts = self.storage.make_uri(path).partition("://")[2]
        if isinstance(self.storage, FolderStorage):
            os.utime(f"/{parts.lstrip('/')}", (time_of_change.timestamp(), time_of_change.timestamp()))
            return
        bucket, _, key = parts.partition("/")
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[bucket].keys[key].last_modified = time_of_change.replace(
            tzinfo=None
        )


@contextmanager
def s3_backend(s3: S3Bucket, machines: Path) -> Iterator[BucketBackend]:
    url = f"{s3.url}/{uuid.uuid4().hex}"
    with (
        closing(AsyncBridge()) as bridge,
        closing(BucketBackend(ObjectStorage(url, s3.options), url, machines, bridge)) as backend,
    ):
        yield backend


@contextmanager
def stored_backend(root: Path, machines: Path) -> Iterator[BucketBackend]:
    """Yield a bucket tree on the storage of a folder: conditional writes without a network."""
    with (
        closing(AsyncBridge()) as bridge,
        closing(BucketBackend(FolderStorage(root), str(root), machines, bridge)) as backend,
    ):
        yield backend
