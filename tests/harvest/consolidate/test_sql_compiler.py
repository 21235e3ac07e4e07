"""Compiled statements: bounds, digits, and settings that are never executed as SQL."""

import json

import pytest

from penstock.harvest.config import FeedSection
from penstock.harvest.consolidate.sql_compiler import compile_fetch, compile_set
from penstock.harvest.consolidate.worker import ConsolidationResult
from penstock.harvest.feed.mapping import FeedMapping
from tests.harvest.consolidate.recorded_feed import MODES, Feed, make_mapping


@pytest.mark.parametrize("mode", MODES)
async def test_range_of_a_rule_is_half_open(feed: Feed, mode: str) -> None:
    """H7: ranges are half-open, and all values are compared as numbers."""
    rules = [
        {"name": "range", "when": {"carat": {"from": "0.5", "below": 1}}},
        {"name": "value", "when": {"carat": {"any_of": ["2.0"]}}},
    ]
    carats = {"0.49999": None, "0.5": "range", "0.999": "range", "1": None, "2.00": "value", "10": None, "-1": None}
    for carat in carats:
        await feed.write(carat, {"a": {"carat": carat}, "price": 100})
    await feed.consolidate(make_mapping(rules), mode)
    assert {key: row[3] for key, row in (await feed.read_canonical()).items()} == carats


@pytest.mark.parametrize("mode", MODES)
async def test_numbers_with_too_many_digits_are_rejected(feed: Feed, mode: str) -> None:
    """H7: integers have up to 18 digits, decimals up to 30 and 20; longer numbers are rejected, not rounded."""
    types = {name: {"path": name, "type": name} for name in ("integer", "decimal")}
    good = {"integer": "-" + "9" * 18, "decimal": "-" + "9" * 30 + "." + "9" * 20}
    await feed.write("good", good)
    await feed.write("long", {"integer": "9" * 19})
    await feed.write("large", {"decimal": "9" * 31})
    await feed.write("fine", {"decimal": "0." + "9" * 21})
    assert await feed.consolidate(make_mapping([], types), mode) == ConsolidationResult(1, 3)
    fields = json.loads((await feed.read_canonical())["good"][0], parse_int=str, parse_float=str)
    assert fields == good


@pytest.mark.parametrize("mode", MODES)
async def test_settings_are_not_part_of_a_statement(feed: Feed, mode: str) -> None:
    """H7: paths, values and names with quotes, dollars and backslashes are compared, never executed."""
    odd = "'$1\\'';DROP TABLE raw_record;--{texts}%s\"$$"
    path = odd.replace(" ", "_")
    fields = {"odd": {"path": path}, "number": {"path": "n", "type": "integer"}}
    mapping = make_mapping([{"name": odd, "when": {"odd": {"any_of": [odd]}}, "add": 1}], fields)
    for statement in (compile_set(mapping), compile_fetch(mapping)):
        assert "DROP" not in statement.text
    await feed.write("k", {path: odd, "price": 100})
    await feed.write("bad", {"n": odd})
    assert await feed.consolidate(mapping, mode) == ConsolidationResult(1, 1)
    assert (await feed.read_canonical())["k"] == (
        json.dumps({"odd": odd, "number": None}),
        "1.00",
        "2.00",
        odd,
        1,
        False,
    )
    assert (await feed.rejects())["bad"] == (f"number: '{odd}' is not an integer", json.dumps({"n": odd}))


@pytest.mark.parametrize("mode", MODES)
async def test_number_of_fields(feed: Feed, mode: str) -> None:
    """H7: a feed can have 200 fields, or none."""
    fields = {f"f{n}": {"path": f"f{n}", "type": "decimal"} for n in range(200)}
    await feed.write("k", {f"f{n}": n for n in range(200)})
    assert await feed.consolidate(make_mapping([], fields), mode) == ConsolidationResult(1, 0)
    assert json.loads((await feed.read_canonical())["k"][0]) == {f"f{n}": n for n in range(200)}
    empty = {"source": {"kind": "rest", "url": "http://source.test"}, "key": "id"}
    assert await feed.consolidate(
        FeedMapping.from_feed(FeedSection.model_validate(empty)), mode
    ) == ConsolidationResult(1, 0)
    assert (await feed.read_canonical())["k"] == ("{}", None, None, None, 1, False)
