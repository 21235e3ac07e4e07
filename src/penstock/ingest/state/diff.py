"""I21: two publications side by side: what was added, removed and changed, and how."""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import polars as pl

from penstock.ingest.model import PublicationDiff, supplier_of
from penstock.ingest.state.reader import open_facts
from penstock.ingest.supplier import Supplier
from penstock.ingest.transform import key_index as indexes
from penstock.ingest.transform.ndjson import hash_keys, parse_facts, read_lines_at
from penstock.ingest.tree.port import FileTree


@dataclass(frozen=True)
class StateComparison:
    """How many facts differ, and the first of them with what they were and what they are."""

    changes: PublicationDiff
    shown: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return {**self.changes.as_dict(), "shown": self.shown}


def compare_runs(tree: FileTree, config: Supplier, before: str, after: str, limit: int) -> StateComparison:
    """What *after* changed against *before*, two runs of one supplier; the first *limit* changes of each kind."""
    if supplier_of(before) != supplier_of(after):
        raise ValueError("runs of two suppliers cannot be compared")
    with ExitStack() as stack:
        old, new = (stack.enter_context(open_facts(tree, run_id)) for run_id in (before, after))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        old_index = indexes.build_index(old, config, work / "old")
        new_index = indexes.build_index(new, config, work / "new")
        found = indexes.compare_indexes(old_index, new_index)
        added, removed, changed = (
            indexes.merge_positions(places).head(limit) for places in (found.added, found.removed, found.changed)
        )
        shown = [{"change": "added", "after": fact} for fact in _facts(new, added)]
        shown += [{"change": "removed", "before": fact} for fact in _facts(old, removed)]
        shown += _changed(old, new, changed, config, old_index)
    counts = {name: sum(map(len, getattr(found, name))) for name in ("added", "removed", "changed")}
    return StateComparison(PublicationDiff(**counts, unchanged=found.unchanged, previous=before), shown)


def _changed(
    old: BinaryIO, new: BinaryIO, places: pl.Series, config: Supplier, old_index: indexes.KeyIndex
) -> list[dict[str, Any]]:
    """The changed facts of *new* beside those of *old* with the same key."""
    after = _keyed(new, places, config)
    keys = pl.DataFrame(list(after), schema={"a": pl.UInt64, "b": pl.UInt64}, orient="row")
    before = _keyed(old, indexes.find_positions(keys, old_index), config)
    return [{"change": "changed", "before": before.get(key), "after": fact} for key, fact in after.items()]


def _keyed(content: BinaryIO, places: pl.Series, config: Supplier) -> dict[tuple[int, int], dict[str, Any]]:
    content.seek(0)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for lines, _ in read_lines_at(content, places):
        keys = hash_keys(parse_facts(lines, config), config).select("a", "b").rows()
        found |= zip(keys, map(_short, lines.to_list()), strict=True)
    return found


def _facts(content: BinaryIO, places: pl.Series) -> list[dict[str, Any]]:
    content.seek(0)
    return [_short(line) for lines, _ in read_lines_at(content, places) for line in lines.to_list()]


def _short(line: str) -> dict[str, Any]:
    fact = orjson.loads(line)
    known = ("category_key", "row_number", "held_from", "payload")
    return {name: fact[name] for name in known if name in fact}
