"""R18, R29: the memory of a pod, written by one process: atomic swaps, changes in O(changes), freeing in pieces."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, time

import lmdb
import msgspec

from penstock.kernel.errors import Transient
from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.layout import ITEMS_FILE, READERS, DictionaryHeader, Generation, ReplacedItem
from penstock.refdata.pod.memory.reader import MemoryView
from penstock.refdata.pod.memory.shared_counters import PodCounters

PAGES_FOR = 60.0  # seconds that whoever reads page by page finds the version it began with
_FREED_AT_ONCE = 5_000
_PRUNED_AT_ONCE = 100


class MemoryWriter:
    """All dictionaries of a pod. What is written is seen by every process at once, and as a whole."""

    def __init__(self, folder: Path, *, limit: int, pages_for: float = PAGES_FOR) -> None:
        self.state = PodCounters(folder, makes=True)
        self._env = lmdb.open(
            str(folder / ITEMS_FILE),
            map_size=layout.map_size(limit),
            subdir=False,
            mode=0o600,
            sync=False,  # it is gone with the pod anyway
            metasync=False,
            readahead=False,
            max_readers=READERS,
        )
        self.limit = limit
        self._pages_for = pages_for
        self._shelves: dict[DictionaryKey, DictionaryHeader] = {}
        self._retired: list[tuple[float, DictionaryKey, int]] = []  # generations to be freed, and when
        self._last_generation = 0

    def shelf(self, target: DictionaryKey) -> DictionaryHeader | None:
        return self._shelves.get(target)

    def shelves(self) -> Mapping[DictionaryKey, DictionaryHeader]:
        return self._shelves

    @property
    def used(self) -> int:
        """Bytes that items take, and what leads to them."""
        stat = self._env.stat()
        return (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]

    def begin(self) -> int:
        """A new generation, empty and read by nobody."""
        self._last_generation += 1
        return self._last_generation

    def fill(self, generation: int, items: Iterable[tuple[str, str]]) -> int:
        """Put items into a generation that nobody reads yet; how many were new in it."""
        prefix = layout.items_prefix(generation)
        rows = [layout.row_of(key, payload) for key, payload in items]
        with self._growing() as txn, txn.cursor() as cursor:
            return cursor.putmulti(((prefix + row.place, row.value) for row in rows), overwrite=False)[1]

    def publish(self, target: DictionaryKey, generation: int, mark: VersionStamp, items: int) -> None:
        """Let readers see a generation in the place of the one before, which is freed when nobody pages through it."""
        before = self._shelves.get(target)
        shelf = DictionaryHeader(generation, *mark, items, time(), before.generation if before else 0)
        with self._writing() as txn:
            self._put(txn, target, shelf)
        self._shelved(target, shelf)
        if before is not None:
            self._retire(target, before.generation)

    def change(
        self, target: DictionaryKey, mark: VersionStamp, puts: Mapping[str, str], deletes: Sequence[str]
    ) -> list[str]:
        """Let readers see a few items changed, all at once; which of them really are."""
        before = self._shelves[target]
        prefix, replaced, changed, grown = layout.items_prefix(before.generation), [], [], 0
        with self._growing() as txn:
            for key, row in _rows(puts, deletes):
                place, value = row
                old = txn.get(prefix + place)
                if old == value:
                    continue
                _set(txn, prefix + place, value)
                grown += (value is not None) - (old is not None)
                replaced.append((key.encode(), old))
                changed.append(key)
            shelf = DictionaryHeader(before.generation, *mark, before.items + grown, time(), before.before)
            if mark != before.mark:
                change = ReplacedItem(before.mark, monotonic(), replaced)
                txn.put(layout.change_key(before.generation, mark.version), layout.encode(change))
                self._prune(txn, before.generation)
            self._put(txn, target, shelf)
        self._shelved(target, shelf)
        return changed

    def mark_stale(self, target: DictionaryKey, since: float) -> None:
        """Have readers told that a dictionary cannot be loaded anew."""
        shelf = self._shelves.get(target)
        if shelf is not None and not shelf.stale_since:
            stale = msgspec.structs.replace(shelf, stale_since=since)
            with self._writing() as txn:
                self._put(txn, target, stale)
            self._shelved(target, stale)

    def has(self, target: DictionaryKey, key: str) -> bool:
        """Whether there is an item of *key* now."""
        shelf = self._shelves[target]
        with self._env.begin() as txn:
            return txn.get(layout.items_prefix(shelf.generation) + layout.place_of(key.encode())) is not None

    def drop(self, target: DictionaryKey) -> None:
        """Have a dictionary no more."""
        shelf = self._shelves.get(target)
        if shelf is not None:
            with self._writing() as txn:
                txn.delete(layout.shelf_key(target))
            del self._shelves[target]
            self.discard(shelf.generation)
            self.state.touch()

    def discard(self, generation: int) -> None:
        """Have a generation freed as soon as may be."""
        self._retired.append((0.0, DictionaryKey("", ""), generation))

    def free(self) -> bool:
        """Free a piece of what nobody reads any more; whether there is more to free now."""
        due = [one for one in self._retired if one[0] <= monotonic()]
        if not due:
            return False
        generation = due[0][2]
        left = _FREED_AT_ONCE
        with self._writing() as txn:
            txn.delete(layout.generation_key(generation))  # first: nobody may page through half of it
            for prefix in (layout.items_prefix(generation), layout.changes_prefix(generation)):
                left -= _delete(txn, prefix, left)
        if left:
            self._retired.remove(due[0])
        return not left or len(due) > 1

    def view(self) -> MemoryView:
        """What a reader sees, in this process."""
        return MemoryView(self._env)

    def close(self) -> None:
        self._env.close()
        self.state.close()

    def _put(self, txn: "lmdb.Transaction[bytes]", target: DictionaryKey, shelf: DictionaryHeader) -> None:
        whose = Generation(*target, shelf.mark)
        txn.put(layout.generation_key(shelf.generation), layout.encode(whose))
        txn.put(layout.shelf_key(target), layout.encode(shelf))

    def _shelved(self, target: DictionaryKey, shelf: DictionaryHeader) -> None:
        self._shelves[target] = shelf
        self.state.touch()

    def _retire(self, target: DictionaryKey, generation: int) -> None:
        """Keep one generation of those before for a while, for its pages, and no more than one."""
        for index, (_, whose, older) in enumerate(self._retired):
            if whose == target:
                self._retired[index] = (0.0, whose, older)
        self._retired.append((monotonic() + self._pages_for, target, generation))

    def _prune(self, txn: "lmdb.Transaction[bytes]", generation: int) -> None:
        """Forget what was replaced too long ago for any page."""
        prefix, oldest = layout.changes_prefix(generation), monotonic() - self._pages_for
        with txn.cursor() as cursor:
            found = cursor.set_range(prefix)
            for _ in range(_PRUNED_AT_ONCE):
                if not found or not cursor.key().startswith(prefix):
                    return
                if layout.replaced_at(cursor.value()) >= oldest:
                    return
                found = cursor.delete()

    @contextmanager
    def _growing(self) -> "Iterator[lmdb.Transaction[bytes]]":
        """As `_writing`, but not beyond the limit: what is above it is for those who make room."""
        if self.used >= self.limit:
            raise _full(f"it has its {self.limit} bytes")
        with self._writing() as txn:
            yield txn

    @contextmanager
    def _writing(self) -> "Iterator[lmdb.Transaction[bytes]]":
        try:
            self._env.reader_check()  # a process that was killed reads no more, and must hold nothing
            with self._env.begin(write=True) as txn:
                yield txn
        except lmdb.Error as error:  # a full map, or a full file system
            raise _full(str(error)) from error


def _full(why: str) -> Transient:
    hint = "raise refdata.query.memoryLimitMb, or give refdata.query.memoryDir more room"
    return Transient("MEMORY_FULL", f"the pod's memory takes no more: {why}", hint=hint)


def _rows(puts: Mapping[str, str], deletes: Sequence[str]) -> "Iterator[tuple[str, tuple[bytes, bytes | None]]]":
    for key, payload in puts.items():
        yield key, layout.row_of(key, payload)
    for key in deletes:
        yield key, (layout.place_of(key.encode()), None)


def _set(txn: "lmdb.Transaction[bytes]", place: bytes, value: bytes | None) -> None:
    if value is None:
        txn.delete(place)
    else:
        txn.put(place, value)


def _delete(txn: "lmdb.Transaction[bytes]", prefix: bytes, limit: int) -> int:
    """Delete what begins with *prefix*, *limit* at most; how many."""
    count = 0
    with txn.cursor() as cursor:
        found = cursor.set_range(prefix)
        while found and count < limit and cursor.key().startswith(prefix):
            found = cursor.delete()
            count += 1
    return count
