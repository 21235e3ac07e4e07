"""The keys of a snapshot: stored on disk as hashes and compared in parts, so that memory stays bounded."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import polars as pl

from penstock.ingest.supplier import Supplier
from penstock.ingest.transform.ndjson import hash_keys, parse_facts, read_lines

PART = 250_000  # keys that are compared together
_BUCKETS = 16  # keys are stored by bucket of their hash: a part needs the files of a single bucket
_KEY = ["a", "b"]
_SCHEMA = {"a": pl.UInt64, "b": pl.UInt64, "r": pl.UInt64, "at": pl.Int64}


class KeyIndex:
    """The keys of facts: two hashes of the key, a hash of the content, and the position of the fact in its file.

    New keys are buffered in memory; an index of a single part is never written to disk.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._buffer = pl.DataFrame(schema=_SCHEMA)
        self._spilled = 0
        self.count = 0

    def add(self, keys: pl.DataFrame) -> None:
        if keys.is_empty():
            return
        placed = keys.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("at") + self.count)
        self._buffer = self._buffer.vstack(placed)
        self.count += keys.height
        if self._buffer.height > PART:
            self._spill()

    def read_part(self, number: int, of: int) -> pl.DataFrame:
        """Return the keys of part *number* of *of* parts; a key is in the same part of every index."""
        if of == 1:
            return self._buffer
        finer, bucket = divmod(number, _BUCKETS)
        in_part = (_compute_bucket() == bucket) & (pl.col("a") // _BUCKETS % (of // _BUCKETS) == finer)
        files = (self._make_path(bucket, spilled) for spilled in range(self._spilled))
        stored = (pl.read_ipc(file) for file in files if file.exists())
        return pl.concat([*(keys.filter(in_part) for keys in stored), self._buffer.filter(in_part)])

    def _spill(self) -> None:
        for (bucket,), keys in self._buffer.group_by(_compute_bucket()):
            keys.select(list(_SCHEMA)).write_ipc(self._make_path(int(bucket), self._spilled))
        self._spilled += 1
        self._buffer = self._buffer.clear()

    def _make_path(self, bucket: int, spilled: int) -> Path:
        return self._folder / f"{bucket:02d}-{spilled:06d}.arrow"


@dataclass
class KeyDifference:
    """I21: the positions of added and changed facts (among the new facts) and of removed facts (among the old)."""

    added: list[pl.Series] = field(default_factory=list)
    changed: list[pl.Series] = field(default_factory=list)
    removed: list[pl.Series] = field(default_factory=list)
    unchanged: int = 0


def build_index(content: BinaryIO, supplier: Supplier, folder: Path) -> KeyIndex:
    """Return the index of published facts."""
    index = KeyIndex(folder)
    for lines in read_lines(content):
        index.add(hash_keys(parse_facts(lines, supplier), supplier))
    return index


def find_repeated(index: KeyIndex, *, keeps_last: bool) -> pl.Series:
    """Return the positions of facts that repeat the key of the first fact, or of the last."""
    positions = [pl.Series("at", [], pl.Int64)]
    for part in _read_parts(index):
        # Few facts share the first hash, so only these are compared by both.
        suspects = part.filter(pl.col("a").is_duplicated()).sort("at", descending=keeps_last)
        positions.append(suspects.filter(~pl.struct(_KEY).is_first_distinct())["at"])
    return pl.concat(positions).sort()


def compare_indexes(old: KeyIndex, new: KeyIndex) -> KeyDifference:
    """Compare the facts of *old* and *new*: by their content first, then by their key.

    A fact that occurs twice counts as two facts, at any positions.
    """
    difference = KeyDifference()
    parts = _count_parts(max(old.count, new.count))
    for number in range(parts):
        before, after = old.read_part(number, parts), new.read_part(number, parts)
        old_rest, new_rest = _match_pairs(before, after, [*_KEY, "r"])
        removed, added = _match_pairs(old_rest, new_rest, _KEY)
        difference.added.append(added["at"])
        difference.removed.append(removed["at"])
        difference.changed.append(new_rest.join(added, on="at", how="anti")["at"])
        difference.unchanged += after.height - new_rest.height
    return difference


def _match_pairs(before: pl.DataFrame, after: pl.DataFrame, same: list[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return both frames without the rows that are equal in the columns *same*, matched in order."""
    if not all(keys["a"].is_unique().all() for keys in (before, after)):
        # Two ranks are far faster than a count over groups.
        occurrence = (pl.struct(same).rank("ordinal") - pl.struct(same).rank("min")).alias("occurrence")
        before, after = (keys.sort("at").with_columns(occurrence) for keys in (before, after))
        same = [*same, "occurrence"]
    old_rest, new_rest = before.join(after, on=same, how="anti"), after.join(before, on=same, how="anti")
    return old_rest.select(list(_SCHEMA)), new_rest.select(list(_SCHEMA))


def find_positions(keys: pl.DataFrame, index: KeyIndex) -> pl.Series:
    """Return the positions of the facts whose key is among *keys*."""
    return merge_positions([part.join(keys, on=_KEY, how="semi")["at"] for part in _read_parts(index)])


def merge_positions(positions: list[pl.Series]) -> pl.Series:
    """Return all *positions* in a sorted series."""
    return pl.concat(positions or [pl.Series("at", [], pl.Int64)]).sort()


def find_positions_to_hold(bad: KeyIndex, old: KeyIndex, new: KeyIndex) -> pl.Series:
    """I20: return the positions in *old* of the facts whose rows are bad now and whose keys *new* does not contain."""
    positions = [pl.Series("at", [], pl.Int64)]
    parts = _count_parts(max(old.count, new.count))
    for number in range(parts):
        missing = bad.read_part(number, parts).join(new.read_part(number, parts), on=_KEY, how="anti")
        positions.append(old.read_part(number, parts).join(missing, on=_KEY, how="semi")["at"])
    return pl.concat(positions).sort()


def _read_parts(index: KeyIndex) -> Iterator[pl.DataFrame]:
    parts = _count_parts(index.count)
    for number in range(parts):
        yield index.read_part(number, parts)


def _count_parts(keys: int) -> int:
    return 1 if keys <= PART else -(-keys // (PART * _BUCKETS)) * _BUCKETS


def _compute_bucket() -> pl.Expr:
    return pl.col("a") % _BUCKETS
