"""Consolidation: both modes have equal results, and concurrent workers lose or double no record."""

import asyncio
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.harvest.config import ConsolidationSection
from penstock.harvest.consolidate.worker import ConsolidationResult, consolidate
from penstock.harvest.feed.mapping import FeedMapping
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Corrupt
from tests.harvest.consolidate.recorded_feed import MODES, Feed, make_mapping
from tests.support.soak import examples
from tests.support.wait import becomes

WAITING = """
SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database())
"""


SIMPLE = make_mapping([{"name": "all", "markup_percent": 10}])

# Payloads are text, because a JSON number may be written in other ways than in Python.
_digits = st.from_regex(r"-?(0|[1-9][0-9]{0,34})([.][0-9]{1,24})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)
_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_looks = st.from_regex(r"-?[0-9]{1,33}([.][0-9]{0,22})?", fullmatch=True) | st.sampled_from(
    ["", "-", "1e3", " 1", "1\n", "١", "+1", "NaN", "Infinity", "0x10", "true", "TRUE", "null", "007", "-0", "-0.00"]
)
_scalars = st.one_of(
    _digits, st.sampled_from(["null", "true", "false", "5", "0.5", "1", "-1"]), (_texts | _looks).map(json.dumps)
)
_NUMBERS = ("-1", "0", "0.5", "1", "5", "100", "0.30")
_TEXTS = ("", "ROUND", "round", "5", "'", "\\", "ü")
_LIKELY = {  # values of rules and of their bounds
    "text": st.sampled_from(_TEXTS).map(json.dumps),
    "integer": st.sampled_from(("-1", "0", "1", "5", '"5"', "100")),
    "decimal": st.sampled_from(_NUMBERS),
    "boolean": st.sampled_from(("true", "false", '"true"')),
}
_values = st.one_of(_scalars, st.lists(_scalars, max_size=2).map(lambda all_: f"[{', '.join(all_)}]"))
_NAMES = ("text", "integer", "decimal", "boolean")


@st.composite
def payloads(draw: st.DrawFn) -> str:
    """Generate an object with some of the values of a mapping, at their paths or elsewhere."""
    is_odd = st.integers(0, 9).map(lambda chance: chance == 0)
    names = draw(st.sets(st.sampled_from(_NAMES)))
    inner = {name: draw(_values if draw(is_odd) else _LIKELY[name]) for name in sorted(names)}
    members = {"a": draw(st.sampled_from(["object"] * 5 + ["null", "[]", "1", '"text"', '[{"text": "x"}]']))}
    if members["a"] == "object":
        members["a"] = "{" + ", ".join(f'"{name}": {value}' for name, value in inner.items()) + "}"
    if draw(st.integers(0, 9)):
        members["price"] = draw(_scalars if draw(is_odd) else st.integers(-(10**9), 10**9).map(str) | _digits)
    return "{" + ", ".join(f'"{name}": {value}' for name, value in members.items()) + "}"


@st.composite
def mappings(draw: st.DrawFn) -> FeedMapping:
    numbers = st.sampled_from(_NUMBERS)
    required = st.booleans() if draw(st.integers(0, 3)) == 0 else st.just(False)
    fields = {name: {"path": f"a.{name}", "type": name, "required": draw(required)} for name in _NAMES}
    values = {"text": st.sampled_from(_TEXTS) | _texts | _looks, "boolean": st.booleans()}
    rules = []
    for number in range(draw(st.integers(0, 4))):
        when: dict[str, Any] = {}
        for name in sorted(draw(st.sets(st.sampled_from(_NAMES), max_size=2))):
            if name in values or draw(st.booleans()):
                when[name] = {"any_of": draw(st.lists(values.get(name, numbers), min_size=1, max_size=3))}
            else:
                when[name] = {draw(st.sampled_from(["from", "below"])): draw(numbers)}
        percent = draw(st.decimals(-100, 1000, places=draw(st.integers(0, 6))))
        add = draw(st.sampled_from(["0", "0.005", "-0.005", "-12.345678"]))
        rules.append({"name": f"r{number}", "when": when, "markup_percent": percent, "add": add})
    return make_mapping(rules, fields, decimals=draw(st.integers(0, 6)))


def map_plainly(mapping: FeedMapping, payload: str) -> tuple[dict[str, Any], Fraction | None, str | None] | str:
    """Return fields, price and rule of a payload, or the name of an invalid field, without the code of the product."""
    document = json.loads(payload, parse_int=Decimal, parse_float=Decimal)
    fields = {}
    for field in mapping.inputs:
        value = document
        for step in field.path:
            value = value.get(step) if isinstance(value, dict) else None
        text = value if isinstance(value, str) or value is None else _as_text(value)
        read = _read(field.type.value, text)
        if (text is None and field.required) or (text is not None and read is None):
            return field.name
        fields[field.name] = read
    cost = fields.pop("cost")
    for rule in mapping.rules if cost is not None else ():
        if all(_is_true(condition, list(fields.values())[condition.field]) for condition in rule.conditions):
            exact = Fraction(cost) / 100 * Fraction(rule.factor) + Fraction(rule.add)
            size = Fraction(int(abs(exact) * 10**mapping.decimals + Fraction(1, 2)), 10**mapping.decimals)
            return fields, size if exact > 0 else -size, rule.name
    return fields, None, None


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return format(value or abs(value), "f")
    return "[...]"


def _read(type_: str, text: str | None) -> Any:
    if text is None or type_ == "text":
        return text
    if type_ == "boolean":
        return {"true": True, "false": False}.get(text)
    whole, _, part = text.removeprefix("-").partition(".")
    is_number = whole.isascii() and whole.isdigit() and (not part or (part.isascii() and part.isdigit()))
    if not is_number or (not part and "." in text):
        return None
    if type_ == "integer":
        return int(text) if len(whole) <= 18 and not part else None
    return Decimal(text) if len(whole) <= 30 and len(part) <= 20 else None


def _is_true(condition: Any, value: Any) -> bool:
    if value is None or condition.any_of is not None:
        return value is not None and value in condition.any_of
    is_above = condition.lower is None or value >= condition.lower
    return is_above and (condition.upper is None or value < condition.upper)


@pytest.mark.soak
@settings(
    max_examples=examples(60, soak=3_000),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],  # emptied for each example
)
@given(mapping=mappings(), payload_list=st.lists(payloads(), min_size=1, max_size=12))
async def test_both_modes_have_equal_results(feed: Feed, mapping: FeedMapping, payload_list: list[str]) -> None:
    """H7: for any records, sets and batches make the same records and rejects, and the correct ones."""
    await feed.db.execute("TRUNCATE raw_record, raw_pending, canonical_record, harvest_reject, harvest_feed")
    results = []
    for mode in MODES:
        other = Feed(feed.db, feed.run_id, mode)
        for number, payload in enumerate(payload_list):
            await other.write(f"k{number}", payload)
        result = await other.consolidate(mapping, mode, set_size=5, batch_size=5, upsert_size=2)
        results.append((result, await other.read_canonical(), await other.rejects()))
        assert await other.pending() == {}
    assert results[0] == results[1]
    result, canonical, rejects = results[0]
    assert result == ConsolidationResult(len(canonical), len(rejects))
    for number, payload in enumerate(payload_list):
        check(map_plainly(mapping, payload), canonical.get(f"k{number}"), rejects.get(f"k{number}"))


def check(expected: Any, canonical: tuple[Any, ...] | None, reject: tuple[str, str] | None) -> None:
    if isinstance(expected, str):
        assert reject is not None
        assert canonical is None
        assert reject[0].startswith(f"{expected}: ")
        return
    assert reject is None
    assert canonical is not None
    fields, price, rule = expected
    stored = json.loads(canonical[0], parse_int=Decimal, parse_float=Decimal)
    if fields["text"] == "[...]":
        fields["text"] = stored["text"]
    assert stored == fields
    assert (canonical[2] if price is None else Fraction(canonical[2]), canonical[3]) == (price, rule)


@pytest.mark.parametrize("mode", MODES)
async def test_newer_record_is_not_overwritten(feed: Feed, mode: str) -> None:
    """H7: an older version does not replace a newer one."""
    await feed.write("k", {"price": 100}, version=7)
    await feed.consolidate(SIMPLE, mode)
    newer = await feed.read_canonical()
    await feed.write("k", {"price": 200}, version=6)
    await feed.consolidate(SIMPLE, mode)
    assert (await feed.read_canonical(), await feed.pending()) == (newer, {})


@pytest.mark.parametrize("mode", MODES)
async def test_reject_keeps_the_last_valid_record(feed: Feed, mode: str) -> None:
    """H7: a version that cannot be mapped is rejected; the record of the version before stays, and none is pending."""
    await feed.write("k", {"shape": "ROUND", "price": 100})
    await feed.consolidate(SIMPLE, mode)
    good = await feed.read_canonical()
    await feed.write("k", {"shape": "ROUND", "price": "a lot", "long": "x" * 20_000}, version=2)
    assert await feed.consolidate(SIMPLE, mode) == ConsolidationResult(0, 1)
    assert (await feed.read_canonical(), await feed.pending()) == (good, {})
    [(reason, payload)] = (await feed.rejects()).values()
    assert (reason, len(payload)) == ("cost: 'a lot' is not a decimal", 10_000)


@pytest.mark.parametrize("mode", MODES)
async def test_deleted_record_stays_deleted(feed: Feed, mode: str) -> None:
    """H10: a deleted record gets new prices like the others, but stays deleted."""
    for key in ("gone", "here", "never"):
        await feed.write(key, {"price": 100})
    await feed.db.execute("UPDATE raw_record SET is_deleted = true WHERE key = 'never'")
    await feed.consolidate(SIMPLE, mode)
    await feed.db.execute("UPDATE raw_record SET is_deleted = true WHERE key = 'gone'")
    await feed.db.execute("UPDATE canonical_record SET deleted_at = now() WHERE key = 'gone'")
    assert await feed.consolidate(make_mapping([{"name": "new", "add": 1}]), mode) == ConsolidationResult(3, 0)
    canonical = await feed.read_canonical()
    assert {key: (row[3], row[5]) for key, row in canonical.items()} == {
        "gone": ("new", True), "here": ("new", False), "never": ("new", True)
    }  # fmt: skip
    await feed.write("gone", {"price": 100}, version=2)
    await feed.consolidate(SIMPLE, mode)
    assert (await feed.read_canonical())["gone"][5] is False


@pytest.mark.parametrize("mode", MODES)
async def test_change_between_snapshot_and_lock_stays_pending(feed: Feed, mode: str) -> None:
    """H7: a row that changes between the snapshot and the lock of a statement stays pending with its new version."""
    await feed.write("k1", {"price": 100})
    await feed.write("k2", {"price": 100})
    # A view instead of the table stops the statement after its snapshot and before its locks.
    await feed.db.execute(
        """
        CREATE FUNCTION stop_here(key text) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
        BEGIN
            IF key = 'k1' THEN PERFORM pg_advisory_xact_lock_shared(1); END IF;
            RETURN true;
        END $$;
        ALTER TABLE raw_pending RENAME TO pending_rows;
        CREATE VIEW raw_pending AS SELECT ctid, feed, key, version FROM pending_rows WHERE stop_here(key);
        """
    )
    async with feed.db.session() as blocker:
        await blocker.execute("SELECT pg_advisory_lock(1)")
        seen: list[ConsolidationResult] = []

        async def record(_tx: Connection, result: ConsolidationResult) -> None:
            seen.append(result)

        work = asyncio.create_task(feed.consolidate(SIMPLE, mode, progress=record, set_concurrency=1))
        await becomes(lambda: blocker.fetchval(WAITING), "no session waits for the lock")
        async with feed.db.transaction() as tx:
            await tx.execute("UPDATE raw_record SET version = 2, payload = '{\"price\": 200}' WHERE key = 'k1'")
            await tx.execute("UPDATE pending_rows SET version = 2 WHERE key = 'k1'")
        await blocker.execute("SELECT pg_advisory_unlock(1)")
        assert await work == ConsolidationResult(2, 0)
    assert seen == [ConsolidationResult(1, 0), ConsolidationResult(1, 0)], (
        "a statement that sees the change takes the changed row"
    )
    canonical = await feed.read_canonical()
    assert [(row[1], row[4]) for row in canonical.values()] == [("2.00", 2), ("1.00", 1)]


@pytest.mark.parametrize("mode", MODES)
async def test_change_during_consolidation_is_pending_again(feed: Feed, mode: str) -> None:
    """H7: a change of a row that is being consolidated waits, and makes the row pending again."""
    await feed.write("k", {"price": 100})
    changes: list[asyncio.Task[None]] = []

    async def change(_tx: Connection, _done: ConsolidationResult) -> None:
        if not changes:
            changes.append(asyncio.create_task(feed.write("k", {"price": 200}, version=2)))
            await becomes(lambda: feed.db.fetchval(WAITING), "the change waits")

    first = await feed.consolidate(SIMPLE, mode, progress=change, set_concurrency=1)
    await changes[0]
    second = await feed.consolidate(SIMPLE, mode)
    assert first.consolidated + second.consolidated == 2
    assert await feed.pending() == {}
    assert (await feed.read_canonical())["k"][1::3] == ("2.00", 2)


@pytest.mark.parametrize("mode", MODES)
async def test_replicas_share_the_work(feed: Feed, mode: str) -> None:
    """H7: with several replicas each record is consolidated once, and their reported numbers are exact."""
    await write_many(feed, 500)
    reported: list[ConsolidationResult] = []

    async def record(_tx: Connection, result: ConsolidationResult) -> None:
        reported.append(result)

    size = {"set_size": 20, "batch_size": 20, "upsert_size": 7, "upsert_concurrency": 2}
    results = await asyncio.gather(*(feed.consolidate(SIMPLE, mode, progress=record, **size) for _ in range(3)))
    assert sum(result.consolidated for result in results) == sum(result.consolidated for result in reported) == 490
    assert sum(result.rejected for result in results) == len(await feed.rejects()) == 10
    assert len(await feed.read_canonical()) == 490
    assert await feed.pending() == {}


@pytest.mark.parametrize("mode", MODES)
async def test_locked_rows_are_awaited(feed: Feed, mode: str) -> None:
    """H7: rows that another replica has locked are awaited, and consolidated if it rolls back."""
    await write_many(feed, 50)
    async with feed.db.session() as other:
        transaction = other.transaction()
        await transaction.start()
        await other.execute("SELECT FROM raw_pending WHERE key < 'k00020' FOR UPDATE")
        work = asyncio.create_task(feed.consolidate(SIMPLE, mode))
        await becomes(lambda: feed.db.fetchval(WAITING), "the consolidation waits for the lock")
        assert not work.done()
        await transaction.rollback()
        assert await work == ConsolidationResult(49, 1)


@pytest.mark.parametrize("mode", MODES)
async def test_aborted_transaction_is_repeated(feed: Feed, mode: str) -> None:
    """H7: the records of a transaction that did not commit are consolidated again, once."""
    await write_many(feed, 100)
    reported: list[ConsolidationResult] = []

    async def die(_tx: Connection, result: ConsolidationResult) -> None:
        reported.append(result)
        if len(reported) == 3:
            raise ConnectionAbortedError("killed")

    with pytest.raises(ConnectionAbortedError):
        await feed.consolidate(SIMPLE, mode, progress=die, set_size=10, batch_size=10, set_concurrency=1)
    assert len(await feed.pending()) == 80
    assert len(await feed.rejects()) == 1, "the reject of the first ten records, of two committed sets"
    assert await feed.consolidate(SIMPLE, mode) == ConsolidationResult(79, 1)
    assert (len(await feed.read_canonical()), len(await feed.rejects())) == (98, 2)


@pytest.mark.parametrize("mode", MODES)
async def test_new_rules_price_all_records_again(feed: Feed, mode: str) -> None:
    """H7: changed rules are a new version and make all records pending; unchanged rules do neither."""
    await write_many(feed, 10)
    assert await feed.consolidate(SIMPLE, mode) == ConsolidationResult(9, 1)
    assert await feed.consolidate(SIMPLE, mode) == ConsolidationResult(0, 0)
    dearer = make_mapping([{"name": "dearer", "markup_percent": 50}])
    assert await feed.consolidate(dearer, mode) == ConsolidationResult(9, 1)
    assert {row[3] for row in (await feed.read_canonical()).values()} == {"dearer"}
    versions = "SELECT DISTINCT pricing_version FROM canonical_record"
    assert [row[0] for row in await feed.db.fetch(versions)] == [2]
    pricing = await feed.db.fetch("SELECT version, rules, digest FROM harvest_pricing ORDER BY version")
    digests = {row["version"]: row["digest"] for row in pricing}
    assert digests == {1: SIMPLE.pricing_digest, 2: dearer.pricing_digest}
    assert pricing[1]["rules"] == dearer.make_pricing_document()


async def test_changed_fields_make_all_records_pending(feed: Feed) -> None:
    """H7: changed fields do not change the version of the rules."""
    await write_many(feed, 10)
    await feed.consolidate(SIMPLE)
    other = make_mapping([{"name": "all", "markup_percent": 10}], {"lab": {"path": "lab"}})
    assert await feed.consolidate(other) == ConsolidationResult(9, 1)
    assert await feed.db.fetchval("SELECT max(version) FROM harvest_pricing") == 1


@pytest.mark.parametrize("mode", MODES)
async def test_stopped_consolidation_is_not_complete(feed: Feed, mode: str) -> None:
    """H7: a stop takes effect after the current transaction; the other records stay pending."""
    await write_many(feed, 100)
    await feed.use_mapping(SIMPLE)
    stopping = asyncio.Event()

    async def stop(_tx: Connection, _done: ConsolidationResult) -> None:
        stopping.set()

    section = ConsolidationSection.model_validate(
        {"mode": mode, "set_size": 10, "batch_size": 10, "set_concurrency": 1}
    )
    options: dict[str, Any] = {"run_id": feed.run_id, "pricing_version": 1, "progress": stop, "stopping": stopping}
    result = await consolidate(feed.db, feed.name, SIMPLE, section, **options)
    assert result == ConsolidationResult(9, 1, is_complete=False)
    assert len(await feed.pending()) == 90


async def test_pending_row_without_a_record_is_an_error(feed: Feed) -> None:
    """H7: a pending row without a raw record does not cause an endless loop."""
    await feed.db.execute("INSERT INTO raw_pending VALUES ('d', 'k', 1)")
    with pytest.raises(Corrupt, match="1 pending"):
        await feed.consolidate(SIMPLE)


async def write_many(feed: Feed, count: int) -> None:
    """Insert records, every fiftieth of which cannot be mapped."""
    await feed.db.execute(
        """
        WITH raw AS (
            INSERT INTO raw_record (feed, key, payload, version, seen_run, seen_in, seen_scan, changed_at)
            SELECT 'd', 'k' || lpad(n::text, 5, '0'),
                   jsonb_build_object('price', CASE WHEN n % 50 = 0 THEN 'x' ELSE n::text END),
                   1, gen_random_uuid(), 'p', 1, now()
            FROM generate_series(0, $1 - 1) AS n
            RETURNING feed, key, version
        )
        INSERT INTO raw_pending SELECT * FROM raw
        """,
        count,
    )
