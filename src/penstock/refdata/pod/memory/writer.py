"""R18, R29: the writer of the memory of a pod: atomic changes, cost proportional to the change, freeing in pieces."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, time

import lmdb
import msgspec

from penstock.kernel.errors import Transient
from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.layout import ITEMS_FILE, READERS, DictionaryHeader, Generation, ReplacedItems
from penstock.refdata.pod.memory.reader import MemoryView
from penstock.refdata.pod.memory.shared_counters import PodCounters

PAGE_RETENTION = 60.0  # seconds for which the pages of a replaced version can still be read
_FREE_BATCH = 5_000
_PRUNE_BATCH = 100


class MemoryWriter:
    """All dictionaries of a pod; every process sees a change atomically."""

    def __init__(self, folder: Path, *, limit: int, page_retention: float = PAGE_RETENTION) -> None:
        self.counters = PodCounters(folder, create=True)
        self._env = lmdb.open(
            str(folder / ITEMS_FILE),
            map_size=layout.map_size(limit),
            subdir=False,
            mode=0o600,
            sync=False,  # the file is removed with the pod
            metasync=False,
            readahead=False,
            max_readers=READERS,
        )
        self.limit = limit
        self._page_retention = page_retention
        self._headers: dict[DictionaryKey, DictionaryHeader] = {}
        self._retired: list[tuple[float, DictionaryKey, int]] = []  # generations to free, and when
        self._last_generation = 0

    def get_header(self, target: DictionaryKey) -> DictionaryHeader | None:
        return self._headers.get(target)

    def get_headers(self) -> Mapping[DictionaryKey, DictionaryHeader]:
        return self._headers

    @property
    def used(self) -> int:
        """Return the bytes used by items and their index."""
        stat = self._env.stat()
        return (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]

    def begin_generation(self) -> int:
        """Return the number of a new, empty generation, which is not visible to readers."""
        self._last_generation += 1
        return self._last_generation

    def fill(self, generation: int, items: Iterable[tuple[str, str]]) -> int:
        """Put items into a generation that is not visible yet; return the number of new keys."""
        prefix = layout.make_items_prefix(generation)
        encoded = [layout.encode_item(key, payload) for key, payload in items]
        with self._write_within_limit() as txn, txn.cursor() as cursor:
            return cursor.putmulti(((prefix + item.stored_key, item.value) for item in encoded), overwrite=False)[1]

    def publish(self, target: DictionaryKey, generation: int, mark: VersionStamp, items: int) -> None:
        """Make a generation visible instead of the previous one, which is freed after the retention of pages."""
        before = self._headers.get(target)
        header = DictionaryHeader(generation, *mark, items, time(), before.generation if before else 0)
        with self._write() as txn:
            self._put(txn, target, header)
        self._set_header(target, header)
        if before is not None:
            self._retire(target, before.generation)

    def change_items(
        self, target: DictionaryKey, mark: VersionStamp, puts: Mapping[str, str], deletes: Sequence[str]
    ) -> list[str]:
        """Change items atomically, and return the keys whose items really changed."""
        before = self._headers[target]
        prefix, replaced, changed, grown = layout.make_items_prefix(before.generation), [], [], 0
        with self._write_within_limit() as txn:
            for key, (stored_key, value) in _encode_changes(puts, deletes):
                old = txn.get(prefix + stored_key)
                if old == value:
                    continue
                _set(txn, prefix + stored_key, value)
                grown += (value is not None) - (old is not None)
                replaced.append((key.encode(), old))
                changed.append(key)
            header = DictionaryHeader(
                before.generation, *mark, before.items + grown, time(), before.previous_generation
            )
            if mark != before.mark:
                change = ReplacedItems(before.mark, monotonic(), replaced)
                txn.put(layout.make_change_key(before.generation, mark.version), layout.encode(change))
                self._prune(txn, before.generation)
            self._put(txn, target, header)
        self._set_header(target, header)
        return changed

    def mark_stale(self, target: DictionaryKey, since: float) -> None:
        """Mark a dictionary as old since *since*, because it cannot be reloaded."""
        header = self._headers.get(target)
        if header is not None and not header.stale_since:
            stale = msgspec.structs.replace(header, stale_since=since)
            with self._write() as txn:
                self._put(txn, target, stale)
            self._set_header(target, stale)

    def has_item(self, target: DictionaryKey, key: str) -> bool:
        """Return whether *key* has an item."""
        header = self._headers[target]
        with self._env.begin() as txn:
            return (
                txn.get(layout.make_items_prefix(header.generation) + layout.make_stored_key(key.encode())) is not None
            )

    def drop(self, target: DictionaryKey) -> None:
        """Remove a dictionary."""
        header = self._headers.get(target)
        if header is not None:
            with self._write() as txn:
                txn.delete(layout.make_header_key(target))
            del self._headers[target]
            self.discard(header.generation)
            self.counters.touch()

    def discard(self, generation: int) -> None:
        """Free a generation as soon as possible."""
        self._retired.append((0.0, DictionaryKey("", ""), generation))

    def free(self) -> bool:
        """Free a piece of the expired generations; return whether there is more to free now."""
        due = [retired for retired in self._retired if retired[0] <= monotonic()]
        if not due:
            return False
        generation = due[0][2]
        remaining = _FREE_BATCH
        with self._write() as txn:
            txn.delete(layout.make_generation_key(generation))  # first: readers must not see half of it
            for prefix in (layout.make_items_prefix(generation), layout.make_changes_prefix(generation)):
                remaining -= _delete(txn, prefix, remaining)
        if remaining:
            self._retired.remove(due[0])
        return not remaining or len(due) > 1

    def open_view(self) -> MemoryView:
        """Return a view of the memory for a reader in this process."""
        return MemoryView(self._env)

    def close(self) -> None:
        self._env.close()
        self.counters.close()

    def _put(self, txn: "lmdb.Transaction[bytes]", target: DictionaryKey, header: DictionaryHeader) -> None:
        owner = Generation(*target, header.mark)
        txn.put(layout.make_generation_key(header.generation), layout.encode(owner))
        txn.put(layout.make_header_key(target), layout.encode(header))

    def _set_header(self, target: DictionaryKey, header: DictionaryHeader) -> None:
        self._headers[target] = header
        self.counters.touch()

    def _retire(self, target: DictionaryKey, generation: int) -> None:
        """Keep the previous generation for its pages, and free the one before it."""
        for index, (_, owner, older) in enumerate(self._retired):
            if owner == target:
                self._retired[index] = (0.0, owner, older)
        self._retired.append((monotonic() + self._page_retention, target, generation))

    def _prune(self, txn: "lmdb.Transaction[bytes]", generation: int) -> None:
        """Delete the replaced items of expired versions."""
        prefix, oldest = layout.make_changes_prefix(generation), monotonic() - self._page_retention
        with txn.cursor() as cursor:
            has_entry = cursor.set_range(prefix)
            for _ in range(_PRUNE_BATCH):
                if not has_entry or not cursor.key().startswith(prefix):
                    return
                if layout.read_replacement_time(cursor.value()) >= oldest:
                    return
                has_entry = cursor.delete()

    @contextmanager
    def _write_within_limit(self) -> "Iterator[lmdb.Transaction[bytes]]":
        """Write unless the limit is reached; the space above the limit is reserved for freeing memory."""
        if self.used >= self.limit:
            raise _make_full_error(f"{self.limit} bytes are used")
        with self._write() as txn:
            yield txn

    @contextmanager
    def _write(self) -> "Iterator[lmdb.Transaction[bytes]]":
        try:
            self._env.reader_check()  # release the pages of readers that were killed
            with self._env.begin(write=True) as txn:
                yield txn
        except lmdb.Error as error:  # a full map, or a full file system
            raise _make_full_error(str(error)) from error


def _make_full_error(reason: str) -> Transient:
    hint = "raise refdata.query.memoryLimitMb, or give refdata.query.memoryDir more space"
    return Transient("MEMORY_FULL", f"the memory of the pod is full: {reason}", hint=hint)


def _encode_changes(
    puts: Mapping[str, str], deletes: Sequence[str]
) -> "Iterator[tuple[str, tuple[bytes, bytes | None]]]":
    for key, payload in puts.items():
        yield key, layout.encode_item(key, payload)
    for key in deletes:
        yield key, (layout.make_stored_key(key.encode()), None)


def _set(txn: "lmdb.Transaction[bytes]", stored_key: bytes, value: bytes | None) -> None:
    if value is None:
        txn.delete(stored_key)
    else:
        txn.put(stored_key, value)


def _delete(txn: "lmdb.Transaction[bytes]", prefix: bytes, limit: int) -> int:
    """Delete at most *limit* keys with *prefix*, and return their number."""
    count = 0
    with txn.cursor() as cursor:
        has_entry = cursor.set_range(prefix)
        while has_entry and count < limit and cursor.key().startswith(prefix):
            has_entry = cursor.delete()
            count += 1
    return count
