"""R17, R18: a consistent view of the memory of a pod for a serving process."""

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import lmdb

from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.layout import ITEMS_FILE, READERS, DictionaryHeader

StoredItem = tuple[bytes, bytes]  # the stored key and the value of an item
_SPARE = 8


class PageCursor(NamedTuple):
    """The start of a page: its version, and the stored key before it."""

    mark: VersionStamp
    after: bytes = b""


class VersionChange(NamedTuple):
    """A stored change of a dictionary, and its keys."""

    since: int
    version: int
    keys: list[bytes]


class MemoryView:
    """The memory at one moment; `refresh` moves to the present."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env
        self.txn = env.begin()

    @classmethod
    @contextmanager
    def open(cls, folder: Path, limit: int) -> "Iterator[MemoryView]":
        """Open the memory in *folder*, which another process writes."""
        with lmdb.open(
            str(folder / ITEMS_FILE),
            map_size=layout.map_size(limit),
            subdir=False,
            readonly=True,
            readahead=False,
            max_readers=READERS,
            max_spare_txns=_SPARE,
        ) as env:
            view = cls(env)
            yield view
            view.txn.abort()

    def close(self) -> None:
        self.txn.abort()

    def refresh(self) -> None:
        self.txn.abort()
        self.txn = self._env.begin()

    def read_header(self, target: DictionaryKey) -> DictionaryHeader | None:
        stored = self.txn.get(layout.make_header_key(target))
        return None if stored is None else layout.decode_header(stored)

    def get(self, header: DictionaryHeader, key: bytes) -> bytes | None:
        """Return the end of the response for *key*; None if there is no item."""
        stored_key = layout.make_stored_key(key)
        stored = self.txn.get(layout.make_items_prefix(header.generation) + stored_key)
        return None if stored is None else layout.decode_response(stored_key, stored)

    def find_version(self, target: DictionaryKey, mark: VersionStamp) -> "VersionView | None":
        """Return a stored version; None if it has expired."""
        header = self.read_header(target)
        for generation in (header.generation, header.previous_generation) if header else ():
            replaced = self._read_replaced(target, generation, mark)
            if replaced is not None:
                return VersionView(self.txn, generation, replaced)
        return None

    def read_page(self, target: DictionaryKey, cursor: PageCursor, limit: int, size: int) -> list[StoredItem] | None:
        """Return at least one and about *size* bytes of items of the cursor's version; None if it has expired."""
        version = self.find_version(target, cursor.mark)
        return None if version is None else list(_limit_size(islice(version.iterate_items(cursor.after), limit), size))

    def read_changes(self, header: DictionaryHeader, since: int) -> list[VersionChange] | None:
        """Return the changes after version *since*; None if they have expired or *since* never existed."""
        steps: list[VersionChange] = []
        for version, change in self._read_log(header.generation, since):
            steps.append(VersionChange(change.since.version, version, [key for key, _ in change.values]))
        is_complete = steps[0].since <= since if steps else header.version == since
        return steps if is_complete else None

    @contextmanager
    def open_all(self, target: DictionaryKey) -> "Iterator[tuple[DictionaryHeader, Iterator[StoredItem]] | None]":
        """Yield all items of the current version, in a snapshot of their own that later changes do not affect."""
        with self._env.begin() as txn:
            stored = txn.get(layout.make_header_key(target))
            if stored is None:
                yield None
                return
            header = layout.decode_header(stored)
            yield header, iterate_items(txn, header.generation, b"")

    def _read_log(self, generation: int, since: int) -> "Iterator[tuple[int, layout.ReplacedItems]]":
        """Return the changes of a generation after version *since*, the oldest first."""
        prefix = layout.make_changes_prefix(generation)
        with self.txn.cursor() as cursor:
            has_entry = cursor.set_range(layout.make_change_key(generation, since + 1))
            while has_entry and cursor.key().startswith(prefix):
                yield layout.read_number(cursor.key()), layout.decode_replaced(cursor.value())
                has_entry = cursor.next()

    def _read_replaced(
        self, target: DictionaryKey, generation: int, mark: VersionStamp
    ) -> dict[bytes, bytes | None] | None:
        """Return the items of version *mark* that were replaced since; None if this generation does not have it."""
        stored = self.txn.get(layout.make_generation_key(generation))
        if stored is None:
            return None
        owner = layout.decode_generation(stored)
        steps = list(self._read_log(generation, mark.version))
        first = steps[0][1].since if steps else owner.mark
        if (owner.tenant_id, owner.dict_code) != target or first != mark:
            return None
        replaced: dict[bytes, bytes | None] = {}
        for _, change in reversed(steps):  # the oldest wins: it replaced the item of that version
            replaced.update((layout.make_stored_key(key), old) for key, old in change.values)
        return replaced


class VersionView:
    """A version of a dictionary, with the items that were replaced since."""

    def __init__(self, txn: "lmdb.Transaction[bytes]", generation: int, replaced: dict[bytes, bytes | None]) -> None:
        self._txn = txn
        self._generation = generation
        self._replaced = replaced

    def get(self, stored_key: bytes) -> bytes | None:
        if stored_key in self._replaced:
            return self._replaced[stored_key]
        return self._txn.get(layout.make_items_prefix(self._generation) + stored_key)

    def iterate_items(self, after: bytes) -> Iterator[StoredItem]:
        """Return the items after a stored key, in order."""
        old = sorted((key, value) for key, value in self._replaced.items() if value is not None and key > after)
        current = iterate_items(self._txn, self._generation, after)
        return heapq.merge((item for item in current if item[0] not in self._replaced), old)


def iterate_items(txn: "lmdb.Transaction[bytes]", generation: int, after: bytes) -> Iterator[StoredItem]:
    """Return the items of a generation after a stored key, in order."""
    prefix = layout.make_items_prefix(generation)
    with txn.cursor() as cursor:
        has_entry = cursor.set_range(prefix + after)
        if has_entry and cursor.key() == prefix + after:
            has_entry = cursor.next()
        while has_entry:
            key, value = cursor.item()
            if not key.startswith(prefix):
                return
            yield key[len(prefix) :], value
            has_entry = cursor.next()


def _limit_size(items: Iterator[StoredItem], size: int) -> Iterator[StoredItem]:
    for item in items:
        yield item
        size -= len(item[0]) + len(item[1])
        if size <= 0:
            return
