"""R17, R18: what a serving process sees of its pod's memory: one state of it at a time."""

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

Found = tuple[bytes, bytes]  # the place of an item and what lies there
_SPARE = 8


class PageCursor(NamedTuple):
    """Where a page begins: in which version, after which place."""

    mark: VersionStamp
    after: bytes = b""


class VersionChange(NamedTuple):
    """A change of a dictionary that is still remembered, and the keys it touched."""

    since: int
    version: int
    keys: list[bytes]


class MemoryView:
    """The memory as it was at one moment; `renew` moves on to now."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env
        self.txn = env.begin()

    @classmethod
    @contextmanager
    def open(cls, folder: Path, limit: int) -> "Iterator[MemoryView]":
        """The memory in *folder*, which another process writes."""
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

    def renew(self) -> None:
        self.txn.abort()
        self.txn = self._env.begin()

    def shelf(self, target: DictionaryKey) -> DictionaryHeader | None:
        found = self.txn.get(layout.shelf_key(target))
        return None if found is None else layout.decode_shelf(found)

    def get(self, shelf: DictionaryHeader, key: bytes) -> bytes | None:
        """The end of the response for *key*."""
        place = layout.place_of(key)
        found = self.txn.get(layout.items_prefix(shelf.generation) + place)
        return None if found is None else layout.response_of(place, found)

    def at(self, target: DictionaryKey, mark: VersionStamp) -> "PinnedVersion | None":
        """A version that is still known; None when it is gone."""
        shelf = self.shelf(target)
        for generation in (shelf.generation, shelf.before) if shelf else ():
            olds = self._replaced_since(target, generation, mark)
            if olds is not None:
                return PinnedVersion(self.txn, generation, olds)
        return None

    def page(self, target: DictionaryKey, at: PageCursor, limit: int, size: int) -> list[Found] | None:
        """Some items in order, as they were in that version, about *size* bytes and one at least; None when gone."""
        version = self.at(target, at.mark)
        return None if version is None else list(_bounded(islice(version.items(at.after), limit), size))

    def changes(self, shelf: DictionaryHeader, since: int) -> list[VersionChange] | None:
        """What changed after version *since*, step by step; None when that is not remembered, or never was."""
        steps: list[VersionChange] = []
        for version, change in self._log(shelf.generation, since):
            steps.append(VersionChange(change.since.version, version, [key for key, _ in change.values]))
        reaches = steps[0].since <= since if steps else shelf.version == since
        return steps if reaches else None

    @contextmanager
    def all(self, target: DictionaryKey) -> "Iterator[tuple[DictionaryHeader, Iterator[Found]] | None]":
        """Every item of the version there is now, however long that takes and whatever changes meanwhile."""
        with self._env.begin() as txn:
            found = txn.get(layout.shelf_key(target))
            if found is None:
                yield None
                return
            shelf = layout.decode_shelf(found)
            yield shelf, items_after(txn, shelf.generation, b"")

    def _log(self, generation: int, since: int) -> "Iterator[tuple[int, layout.ReplacedItem]]":
        """The changes of a generation after version *since*, the oldest first."""
        prefix = layout.changes_prefix(generation)
        with self.txn.cursor() as cursor:
            found = cursor.set_range(layout.change_key(generation, since + 1))
            while found and cursor.key().startswith(prefix):
                yield layout.number_at_end(cursor.key()), layout.decode_replaced(cursor.value())
                found = cursor.next()

    def _replaced_since(
        self, target: DictionaryKey, generation: int, mark: VersionStamp
    ) -> dict[bytes, bytes | None] | None:
        """What lay where something else lies now; None when that version is gone, or never was in this generation."""
        held = self.txn.get(layout.generation_key(generation))
        if held is None:
            return None
        whose = layout.decode_generation(held)
        steps = list(self._log(generation, mark.version))
        begins = steps[0][1].since if steps else whose.mark
        if (whose.tenant_id, whose.dict_code) != target or begins != mark:
            return None
        olds: dict[bytes, bytes | None] = {}
        for _, change in reversed(steps):  # the oldest has the last word: it replaced what was there then
            olds.update((layout.place_of(key), old) for key, old in change.values)
        return olds


class PinnedVersion:
    """A version as it was, whatever has replaced some of it since."""

    def __init__(self, txn: "lmdb.Transaction[bytes]", generation: int, olds: dict[bytes, bytes | None]) -> None:
        self._txn = txn
        self._generation = generation
        self._olds = olds

    def get(self, place: bytes) -> bytes | None:
        if place in self._olds:
            return self._olds[place]
        return self._txn.get(layout.items_prefix(self._generation) + place)

    def items(self, after: bytes) -> Iterator[Found]:
        """Its items behind a place, in order."""
        was = sorted((place, value) for place, value in self._olds.items() if value is not None and place > after)
        now = items_after(self._txn, self._generation, after)
        return heapq.merge((found for found in now if found[0] not in self._olds), was)


def items_after(txn: "lmdb.Transaction[bytes]", generation: int, after: bytes) -> Iterator[Found]:
    """What lies in a generation behind a place, in order."""
    prefix = layout.items_prefix(generation)
    with txn.cursor() as cursor:
        found = cursor.set_range(prefix + after)
        if found and cursor.key() == prefix + after:
            found = cursor.next()
        while found:
            key, value = cursor.item()
            if not key.startswith(prefix):
                return
            yield key[len(prefix) :], value
            found = cursor.next()


def _bounded(items: Iterator[Found], size: int) -> Iterator[Found]:
    for found in items:
        yield found
        size -= len(found[0]) + len(found[1])
        if size <= 0:
            return
