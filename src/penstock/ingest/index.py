"""Which keys a snapshot has: on disk as hashes, compared in parts, so that memory stays bounded at any size."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import polars as pl

from penstock.ingest.facts import lines_of
from penstock.ingest.lines import keys_of, parsed
from penstock.ingest.supplier import Supplier

PART = 500_000  # keys looked at together
_KEY = ["a", "b"]
_SCHEMA = {"a": pl.UInt64, "b": pl.UInt64, "r": pl.UInt64, "at": pl.Int64}


class Index:
    """The keys of some facts: two hashes of the key, one of the content, and the fact's place in its file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._parts = 0
        self.count = 0

    def add(self, keys: pl.DataFrame) -> None:
        if keys.is_empty():
            return
        placed = keys.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("at") + self.count)
        placed.write_ipc(self._folder / f"{self._parts:06d}.arrow")
        self._parts += 1
        self.count += keys.height

    def part(self, number: int, of: int) -> pl.DataFrame:
        """The keys of one of *of* parts; every key is in the same part of every index."""
        if not self._parts:
            return pl.DataFrame(schema=_SCHEMA)
        found = pl.scan_ipc(self._folder / "*.arrow")
        return (found.filter(pl.col("a") % of == number) if of > 1 else found).collect()


@dataclass
class Difference:
    """I21: the places of what is new or changed (in the new facts), and of what is gone (in the old ones)."""

    added: list[pl.Series] = field(default_factory=list)
    changed: list[pl.Series] = field(default_factory=list)
    removed: list[pl.Series] = field(default_factory=list)
    unchanged: int = 0


def index_of(content: BinaryIO, supplier: Supplier, folder: Path) -> Index:
    """The index of facts that were published before."""
    index = Index(folder)
    for lines in lines_of(content):
        index.add(keys_of(parsed(lines, supplier), supplier))
    return index


def repeated(index: Index, *, keeps_last: bool) -> pl.Series:
    """The places of facts whose key another fact has that is kept."""
    found = [pl.Series("at", [], pl.Int64)]
    for part in _parts(index):
        # Few share even one hash, so that only they are looked at closely.
        suspects = part.filter(pl.col("a").is_duplicated()).sort("at", descending=keeps_last)
        found.append(suspects.filter(~pl.struct(_KEY).is_first_distinct())["at"])
    return pl.concat(found).sort()


def difference(old: Index, new: Index) -> Difference:
    """What became of the facts of *old* in *new*, by their keys."""
    found = Difference()
    parts = _count(max(old.count, new.count))
    for number in range(parts):
        before, after = old.part(number, parts), new.part(number, parts)
        found.added.append(after.join(before, on=_KEY, how="anti")["at"])
        found.removed.append(before.join(after, on=_KEY, how="anti")["at"])
        both = after.join(before.unique(_KEY, keep="any"), on=_KEY, how="inner")
        found.changed.append(both.filter(pl.col("r") != pl.col("r_right"))["at"])
        found.unchanged += both.height - len(found.changed[-1])
    return found


def places_of(keys: pl.DataFrame, index: Index) -> pl.Series:
    """Where the facts with one of *keys* are."""
    return together([part.join(keys, on=_KEY, how="semi")["at"] for part in _parts(index)])


def together(places: list[pl.Series]) -> pl.Series:
    """All of *places*, sorted."""
    return pl.concat(places or [pl.Series("at", [], pl.Int64)]).sort()


def to_hold(bad: Index, old: Index, new: Index) -> pl.Series:
    """I20: the places in *old* of facts whose rows went bad and that *new* has not otherwise."""
    found = [pl.Series("at", [], pl.Int64)]
    parts = _count(max(old.count, new.count))
    for number in range(parts):
        lost = bad.part(number, parts).join(new.part(number, parts), on=_KEY, how="anti")
        found.append(old.part(number, parts).join(lost, on=_KEY, how="semi")["at"])
    return pl.concat(found).sort()


def _parts(index: Index) -> Iterator[pl.DataFrame]:
    parts = _count(index.count)
    for number in range(parts):
        yield index.part(number, parts)


def _count(keys: int) -> int:
    return max(1, -(-keys // PART))
