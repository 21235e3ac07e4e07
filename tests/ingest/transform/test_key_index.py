"""Tests of key indexes with several parts: repeated keys and the comparison of facts."""

import tempfile
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ingest.transform import key_index
from penstock.ingest.transform import ndjson as lines


@given(st.lists(st.integers(0, 60), max_size=300), st.booleans())
def test_repeated_keys_are_found_in_parts(keys: list[int], keeps_last: bool) -> None:
    """I18, I19: an index of several parts finds the same repeated keys as an index of a single part."""
    step = -1 if keeps_last else 1
    remaining = set({key: position for position, key in [*enumerate(keys)][::-step]}.values())
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "PART", 10)
        index = key_index.KeyIndex(Path(folder) / "index")
        for start in range(0, len(keys), 7):
            numbers = pl.DataFrame({"key": keys[start : start + 7]}, schema={"key": pl.UInt64})
            index.add(numbers.select(pl.col("key").hash(seed).alias(name) for seed, name in enumerate("abr")))
        found = key_index.find_repeated(index, keeps_last=keeps_last)
    assert found.to_list() == [position for position in range(len(keys)) if position not in remaining]


_facts = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=40)


@given(_facts, _facts, st.booleans())
def test_repeated_facts_are_counted(
    before: list[tuple[int, int]], after: list[tuple[int, int]], is_keyed: bool
) -> None:
    """I21: equal facts are matched first, in any order, then facts with the same key; the rest is added or removed."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "PART", 10)
        old, new = (_indexed(Path(folder) / name, facts, is_keyed) for name, facts in (("old", before), ("new", after)))
        found = key_index.compare_indexes(old, new)
    same = Counter(before) & Counter(after)
    old_rest, new_rest = (Counter(facts) - same for facts in (before, after))
    keys = [Counter(key for key, _ in facts.elements()) for facts in (old_rest, new_rest)]
    changed = (keys[0] & keys[1]).total() if is_keyed else 0
    counts = [sum(map(len, positions)) for positions in (found.added, found.removed, found.changed)]
    assert [*counts, found.unchanged] == [new_rest.total() - changed, old_rest.total() - changed, changed, same.total()]
    changed_facts = Counter(after[position] for position in key_index.merge_positions([*found.added, *found.changed]))
    assert (
        changed_facts,
        Counter(before[position] for position in key_index.merge_positions(found.removed)) - old_rest,
    ) == (
        new_rest,
        Counter(),
    )


def _indexed(folder: Path, facts: list[tuple[int, int]], is_keyed: bool) -> key_index.KeyIndex:
    index = key_index.KeyIndex(folder)
    for start in range(0, len(facts), 7):
        rows = pl.DataFrame(
            facts[start : start + 7], schema={"key": pl.String, "content": pl.String}, orient="row", strict=False
        )
        index.add(
            rows.select(
                lines.hash_expressions(
                    [pl.col("key")] if is_keyed else [], pl.concat_str("key", pl.lit(" "), "content")
                )
            )
        )
    return index
