"""The comparison of two states."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.ingest.tree import paths
from tests.ingest.harness import COLUMNS, QUALITY, SUPPLIER, IngestHarness, snapshot
from tests.support.types import Json

KEYS = st.text("aбß\"',;1{}\\", min_size=1, max_size=3)
SNAPSHOTS = st.dictionaries(KEYS, st.integers(-9, 9), max_size=12)


@pytest.mark.parametrize("is_keyed", [True, False])
@settings(max_examples=20)
@given(before=SNAPSHOTS, after=SNAPSHOTS)
@example(before={}, after={})
@example(before={"a": 1, "б": 2, "1": 3}, after={"б": 2, "1": 4, "ß": 5})
def test_changes_are_those_of_a_plain_comparison(is_keyed: bool, before: Json, after: Json) -> None:
    """I21: the numbers and the keys of changes are exactly those of a comparison of two dicts."""
    source = {"header": 1, "delimiter": ",", "format": "csv", "encoding": "utf-8"}
    config = {**QUALITY, "columns": COLUMNS, "source": source, "allow_empty_snapshot": True}
    with tempfile.TemporaryDirectory() as folder:
        harness = IngestHarness(Path(folder), {**config, "key": ["sku"]} if is_keyed else config)
        first, second = (harness.run(snapshot(prices)).manifest for prices in (before, after))
        assert first is not None
        if before == after:  # the same file
            assert second is None
            return
        assert second is not None
        changes = harness.read_json(paths.make_state_path(SUPPLIER, second.run_id, paths.CHANGES))
        lines = harness.lines(paths.make_state_path(SUPPLIER, second.run_id, paths.CHANGED_KEYS))
        assert changes == harness.read_json(paths.make_run_path(second.run_id, paths.MANIFEST))["changes"]
    expected = _compare_by_key(before, after) if is_keyed else _compare_rows(before, after)
    counts = {name: len(expected[name]) for name in ("added", "removed", "changed", "unchanged")}
    assert changes == {"previous": first.run_id, **counts}
    if is_keyed:
        keys = {name: {line["key"]["sku"] for line in lines if line["change"] == name} for name in expected}
        assert keys == {**expected, "unchanged": set()}
    assert len(lines) == counts["added"] + counts["removed"] + counts["changed"]


FACTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=12)


@pytest.mark.full
@pytest.mark.parametrize("is_keyed", [True, False])
@settings(max_examples=20)
@given(before=FACTS, after=FACTS)
@example(before=[("a", 1), ("a", 2), ("b", 1)], after=[("b", 1), ("a", 2), ("a", 1)])
@example(before=[("a", 1), ("a", 1)], after=[("a", 1), ("a", 1), ("a", 1), ("b", 1)])
def test_repeated_facts_are_counted(
    is_keyed: bool, before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    """I21: with repeated keys, or without a key, the same rows in another order are not a change."""
    source = {"header": 1, "delimiter": ",", "format": "csv", "encoding": "utf-8"}
    config = {**QUALITY, "columns": COLUMNS, "source": source, "allow_empty_snapshot": True}
    with tempfile.TemporaryDirectory() as folder:
        harness = IngestHarness(
            Path(folder), {**config, "key": ["sku"], "duplicate_keys": "keep"} if is_keyed else config
        )
        harness.publish(snapshot(before))
        if before == after:  # the same file
            return
        run_id = harness.publish(snapshot(after))
        changes = harness.read_json(paths.make_state_path(SUPPLIER, run_id, paths.CHANGES))
    same = Counter(before) & Counter(after)
    removed, added = (Counter(sku for sku, _ in (Counter(facts) - same).elements()) for facts in (before, after))
    changed = (removed & added).total() if is_keyed else 0
    expected = {"added": added.total() - changed, "removed": removed.total() - changed, "changed": changed}
    assert {**expected, "unchanged": same.total()}.items() <= changes.items()


def _compare_by_key(before: Json, after: Json) -> dict[str, set[Any]]:
    both = before.keys() & after.keys()
    changed = {key for key in both if before[key] != after[key]}
    return {
        "added": after.keys() - before.keys(),
        "removed": before.keys() - after.keys(),
        "changed": changed,
        "unchanged": both - changed,
    }


def _compare_rows(before: Json, after: Json) -> dict[str, set[Any]]:
    old, new = set(before.items()), set(after.items())
    return {"added": new - old, "removed": old - new, "changed": set(), "unchanged": old & new}
