"""Which keys a snapshot has: on disk as hashes, compared in parts, so that memory stays bounded at any size."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import polars as pl

from penstock.ingest.supplier import Supplier
from penstock.ingest.transform.ndjson import hash_keys, parse_facts, read_lines

PART = 250_000  # keys looked at together
_FAN = 16  # kinds of files, by the hash of the key: to look at a part only one kind is read
_KEY = ["a", "b"]
_SCHEMA = {"a": pl.UInt64, "b": pl.UInt64, "r": pl.UInt64, "at": pl.Int64}


class KeyIndex:
    """The keys of some facts: two hashes of the key, one of the content, and the fact's place in its file.

    The last ones wait in memory; an index of one part is never on disk.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._waiting = pl.DataFrame(schema=_SCHEMA)
        self._spilled = 0
        self.count = 0

    def add(self, keys: pl.DataFrame) -> None:
        if keys.is_empty():
            return
        placed = keys.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("at") + self.count)
        self._waiting = self._waiting.vstack(placed)
        self.count += keys.height
        if self._waiting.height > PART:
            self._spill()

    def part(self, number: int, of: int) -> pl.DataFrame:
        """The keys of one of *of* parts, as many as `_count` says; every key is in the same part of every index."""
        if of == 1:
            return self._waiting
        finer, kind = divmod(number, _FAN)
        is_here = (_kind() == kind) & (pl.col("a") // _FAN % (of // _FAN) == finer)
        files = (self._file(kind, spilled) for spilled in range(self._spilled))
        found = (pl.read_ipc(file) for file in files if file.exists())
        return pl.concat([*(keys.filter(is_here) for keys in found), self._waiting.filter(is_here)])

    def _spill(self) -> None:
        for (kind,), keys in self._waiting.group_by(_kind()):
            keys.select(list(_SCHEMA)).write_ipc(self._file(int(kind), self._spilled))
        self._spilled += 1
        self._waiting = self._waiting.clear()

    def _file(self, kind: int, spilled: int) -> Path:
        return self._folder / f"{kind:02d}-{spilled:06d}.arrow"


@dataclass
class KeyDifference:
    """I21: the places of what is new or changed (in the new facts), and of what is gone (in the old ones)."""

    added: list[pl.Series] = field(default_factory=list)
    changed: list[pl.Series] = field(default_factory=list)
    removed: list[pl.Series] = field(default_factory=list)
    unchanged: int = 0


def build_index(content: BinaryIO, supplier: Supplier, folder: Path) -> KeyIndex:
    """The index of facts that were published before."""
    index = KeyIndex(folder)
    for lines in read_lines(content):
        index.add(hash_keys(parse_facts(lines, supplier), supplier))
    return index


def find_repeated(index: KeyIndex, *, keeps_last: bool) -> pl.Series:
    """The places of facts whose key another fact has that is kept."""
    found = [pl.Series("at", [], pl.Int64)]
    for part in _parts(index):
        # Few share even one hash, so that only they are looked at closely.
        suspects = part.filter(pl.col("a").is_duplicated()).sort("at", descending=keeps_last)
        found.append(suspects.filter(~pl.struct(_KEY).is_first_distinct())["at"])
    return pl.concat(found).sort()


def compare_indexes(old: KeyIndex, new: KeyIndex) -> KeyDifference:
    """What became of the facts of *old* in *new*: each is the same as one that is equal, else by its key.

    A fact that comes twice is two facts, wherever they stand.
    """
    found = KeyDifference()
    parts = _count(max(old.count, new.count))
    for number in range(parts):
        before, after = old.part(number, parts), new.part(number, parts)
        gone, come = _apart(before, after, [*_KEY, "r"])
        removed, added = _apart(gone, come, _KEY)
        found.added.append(added["at"])
        found.removed.append(removed["at"])
        found.changed.append(come.join(added, on="at", how="anti")["at"])
        found.unchanged += after.height - come.height
    return found


def _apart(before: pl.DataFrame, after: pl.DataFrame, same: list[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What is left of both when pairs that are the *same* are taken out, the first with the first."""
    if not all(one["a"].is_unique().all() for one in (before, after)):
        # Far quicker than a count over groups.
        which = (pl.struct(same).rank("ordinal") - pl.struct(same).rank("min")).alias("which")
        before, after = (one.sort("at").with_columns(which) for one in (before, after))
        same = [*same, "which"]
    gone, come = before.join(after, on=same, how="anti"), after.join(before, on=same, how="anti")
    return gone.select(list(_SCHEMA)), come.select(list(_SCHEMA))


def find_positions(keys: pl.DataFrame, index: KeyIndex) -> pl.Series:
    """Where the facts with one of *keys* are."""
    return merge_positions([part.join(keys, on=_KEY, how="semi")["at"] for part in _parts(index)])


def merge_positions(places: list[pl.Series]) -> pl.Series:
    """All of *places*, sorted."""
    return pl.concat(places or [pl.Series("at", [], pl.Int64)]).sort()


def find_positions_to_hold(bad: KeyIndex, old: KeyIndex, new: KeyIndex) -> pl.Series:
    """I20: the places in *old* of facts whose rows went bad and that *new* has not otherwise."""
    found = [pl.Series("at", [], pl.Int64)]
    parts = _count(max(old.count, new.count))
    for number in range(parts):
        lost = bad.part(number, parts).join(new.part(number, parts), on=_KEY, how="anti")
        found.append(old.part(number, parts).join(lost, on=_KEY, how="semi")["at"])
    return pl.concat(found).sort()


def _parts(index: KeyIndex) -> Iterator[pl.DataFrame]:
    parts = _count(index.count)
    for number in range(parts):
        yield index.part(number, parts)


def _count(keys: int) -> int:
    return 1 if keys <= PART else -(-keys // (PART * _FAN)) * _FAN


def _kind() -> pl.Expr:
    return pl.col("a") % _FAN
