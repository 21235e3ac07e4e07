"""I21: the comparison of two publications: facts that were added, removed and changed."""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import polars as pl

from penstock.ingest.model import PublicationDiff, parse_supplier
from penstock.ingest.state.reader import open_facts
from penstock.ingest.supplier import Supplier
from penstock.ingest.transform import key_index as indexes
from penstock.ingest.transform.ndjson import hash_keys, parse_facts, read_lines_at
from penstock.ingest.tree.port import FileTree


@dataclass(frozen=True)
class StateComparison:
    """The numbers of facts that differ, and the first of them with their contents before and after."""

    changes: PublicationDiff
    shown: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return {**self.changes.as_dict(), "shown": self.shown}


def compare_runs(tree: FileTree, config: Supplier, before: str, after: str, limit: int) -> StateComparison:
    """Compare two runs of one supplier; show the first *limit* changes of each kind."""
    if parse_supplier(before) != parse_supplier(after):
        raise ValueError("runs of two suppliers cannot be compared")
    with ExitStack() as stack:
        old, new = (stack.enter_context(open_facts(tree, run_id)) for run_id in (before, after))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        old_index = indexes.build_index(old, config, work / "old")
        new_index = indexes.build_index(new, config, work / "new")
        difference = indexes.compare_indexes(old_index, new_index)
        added, removed, changed = (
            indexes.merge_positions(positions).head(limit)
            for positions in (difference.added, difference.removed, difference.changed)
        )
        shown = [{"change": "added", "after": fact} for fact in _read_facts(new, added)]
        shown += [{"change": "removed", "before": fact} for fact in _read_facts(old, removed)]
        shown += _pair_changed_facts(old, new, changed, config, old_index)
    counts = {kind: sum(map(len, getattr(difference, kind))) for kind in ("added", "removed", "changed")}
    return StateComparison(PublicationDiff(**counts, unchanged=difference.unchanged, previous=before), shown)


def _pair_changed_facts(
    old: BinaryIO, new: BinaryIO, positions: pl.Series, config: Supplier, old_index: indexes.KeyIndex
) -> list[dict[str, Any]]:
    """Return the changed facts of *new*, each with the fact of *old* with the same key."""
    after = _read_facts_by_key(new, positions, config)
    keys = pl.DataFrame(list(after), schema={"a": pl.UInt64, "b": pl.UInt64}, orient="row")
    before = _read_facts_by_key(old, indexes.find_positions(keys, old_index), config)
    return [{"change": "changed", "before": before.get(key), "after": fact} for key, fact in after.items()]


def _read_facts_by_key(
    content: BinaryIO, positions: pl.Series, config: Supplier
) -> dict[tuple[int, int], dict[str, Any]]:
    content.seek(0)
    facts: dict[tuple[int, int], dict[str, Any]] = {}
    for lines, _ in read_lines_at(content, positions):
        keys = hash_keys(parse_facts(lines, config), config).select("a", "b").rows()
        facts |= zip(keys, map(_shorten, lines.to_list()), strict=True)
    return facts


def _read_facts(content: BinaryIO, positions: pl.Series) -> list[dict[str, Any]]:
    content.seek(0)
    return [_shorten(line) for lines, _ in read_lines_at(content, positions) for line in lines.to_list()]


def _shorten(line: str) -> dict[str, Any]:
    fact = orjson.loads(line)
    names = ("category_key", "row_number", "held_from", "payload")
    return {name: fact[name] for name in names if name in fact}
