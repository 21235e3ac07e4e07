"""The checks before a publication: quality limits, guards against the previous state, repeated keys, duplicates."""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import pytest
import typer.main

from penstock.cli.main import app
from penstock.ingest.contract import FailureCode, IngestReason
from penstock.ingest.model import RunFailed, RunStats
from penstock.ingest.run.quality import check_quality
from penstock.ingest.tree import paths
from tests.ingest.extraction import make_supplier
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, failure, snapshot
from tests.support.types import Json

EMPTY = snapshot({})


def make_rows(good: int, bad: int = 0) -> bytes:
    return snapshot({**{f"g{n}": n for n in range(good)}, **{f"b{n}": "none" for n in range(bad)}})


def read_prices(harness: IngestHarness) -> Json:
    return {fact["payload"]["sku"]: fact["payload"]["price"] for fact in harness.facts()}


def assert_failed(harness: IngestHarness, content: bytes, code: FailureCode) -> Json:
    """Check that the run fails with *code*, and that only the file is moved; return the manifest."""
    before, published = harness.current(), harness.all_files()
    outcome = harness.run(content)
    assert failure(outcome) is code
    assert outcome.manifest is not None
    assert harness.current() == before
    assert {path: published[path] for path in published if "/state" in path}.items() <= harness.all_files().items()
    moved_to = outcome.manifest.moved_to
    assert moved_to is not None
    assert moved_to.startswith(paths.make_broken_path(SUPPLIER))
    assert (harness.root / moved_to).read_bytes() == content
    manifest = harness.read_json(paths.make_run_path(outcome.manifest.run_id, paths.MANIFEST))
    assert (manifest["status"], manifest["failure_code"]) == ("FAIL", code.value)
    return manifest


@pytest.mark.parametrize(
    ("limits", "content", "code"),
    [
        ({"max_bad_ratio": 0.25}, make_rows(3, 1), None),
        ({"max_bad_ratio": 0.2499}, make_rows(3, 1), FailureCode.DQ_TOO_MANY_BAD_ROWS),
        ({"max_bad_ratio": 0}, make_rows(1000, 1), FailureCode.DQ_TOO_MANY_BAD_ROWS),
        ({"max_bad_ratio": 0}, make_rows(3), None),
        ({"min_fact_count": 3}, make_rows(3), None),
        ({"min_fact_count": 4}, make_rows(3), FailureCode.DQ_TOO_FEW_FACTS),
        ({"min_fact_count": 4, "max_bad_ratio": 1}, make_rows(3, 9), FailureCode.DQ_TOO_FEW_FACTS),
        ({"max_bad_ratio": 0}, EMPTY, FailureCode.DQ_EMPTY_SNAPSHOT),
        ({"min_fact_count": 0}, EMPTY, FailureCode.DQ_EMPTY_SNAPSHOT),
        ({"max_bad_ratio": 1}, make_rows(0, 2), FailureCode.DQ_EMPTY_SNAPSHOT),
        ({"min_fact_count": 100, "max_bad_ratio": 0, "allow_empty_snapshot": True}, EMPTY, None),
        (
            {"min_fact_count": 100, "max_bad_ratio": 1, "allow_empty_snapshot": True},
            make_rows(0, 2),
            FailureCode.DQ_TOO_FEW_FACTS,
        ),
        ({"min_fact_count": 100, "allow_empty_snapshot": True}, make_rows(3), FailureCode.DQ_TOO_FEW_FACTS),
    ],
)
def test_quality_limits_decide(harness: IngestHarness, limits: Json, content: bytes, code: FailureCode | None) -> None:
    """I7, §8: a limit may be reached but not exceeded; an empty file passes only with allow_empty_snapshot."""
    harness.configure({**KEYED, **limits})
    if code is None:
        harness.publish(content)
    else:
        assert_failed(harness, content, code)


@pytest.mark.parametrize("missing", ["min_fact_count", "max_bad_ratio", "allow_empty_snapshot", "all"])
def test_run_without_quality_limits_fails(harness: IngestHarness, missing: str) -> None:
    """I7, I14: a missing key or a missing file is CONFIG_DQ_MISSING; the file waits in the inbox."""
    first = harness.publish(make_rows(3))
    harness.configure({name: value for name, value in KEYED.items() if name != missing})
    if missing == "all":
        (harness.root / paths.make_config_path(SUPPLIER)).unlink()
    outcome = harness.run(make_rows(4))
    assert failure(outcome) is FailureCode.CONFIG_DQ_MISSING
    assert outcome.manifest is not None
    assert outcome.manifest.failure is not None
    assert outcome.manifest.failure.hint
    assert harness.names(paths.make_inbox_path(SUPPLIER)) == ["price.csv"]
    assert harness.current() == first
    harness.configure(KEYED)
    assert harness.run().is_pass
    assert len(harness.facts()) == 4


@pytest.mark.parametrize(
    ("guards", "after", "code"),
    [
        ({"max_drop_percent": 20}, {f"k{n}": n for n in range(8)}, None),
        ({"max_drop_percent": 20}, {f"k{n}": n for n in range(7)}, FailureCode.GUARD_ROWS_DROPPED),
        ({"max_drop_percent": 0}, {f"other{n}": n for n in range(10)}, None),
        ({"max_vanished_keys_percent": 20}, {f"k{n}": 7 for n in range(2, 12)}, None),
        ({"max_vanished_keys_percent": 20}, {f"k{n}": 7 for n in range(3, 13)}, FailureCode.GUARD_KEYS_VANISHED),
        ({}, {"A": 1}, None),
    ],
)
def test_guards_compare_a_snapshot_with_the_previous_state(
    harness: IngestHarness, guards: Json, after: Mapping[str, int], code: FailureCode | None
) -> None:
    """I20: the run fails if more facts or keys are missing than the guards allow."""
    harness.configure({**KEYED, "guards": guards})
    harness.publish(snapshot({f"k{n}": n for n in range(10)}))
    if code is None:
        harness.publish(snapshot(after))
        assert read_prices(harness) == dict(after)
    else:
        manifest = assert_failed(harness, snapshot(after), code)
        assert manifest["previous_run"] in manifest["hint"]


@pytest.mark.parametrize("rule", ["allow", "fail"])
def test_missing_category(harness: IngestHarness, rule: str) -> None:
    """I20: a sheet that is missing fails the run if the guard is set."""
    xlsxwriter = pytest.importorskip("xlsxwriter")

    def make_book(*sheets: str) -> bytes:
        file = harness.root / "book.xlsx"
        with xlsxwriter.Workbook(file) as opened:
            for sheet in sheets:
                page = opened.add_worksheet(sheet)
                page.write_row(0, 0, ["sku", "price"])
                page.write_row(1, 0, [f"in {sheet}", 1])
        return file.read_bytes()

    harness.configure({**KEYED, "guards": {"vanished_categories": rule}})
    harness.publish(make_book("summer", "winter"))
    if rule == "fail":
        manifest = assert_failed(harness, make_book("summer", "spring"), FailureCode.GUARD_CATEGORIES_VANISHED)
        assert "winter" in manifest["failure"]
    else:
        harness.publish(make_book("summer", "spring"))
        assert {fact["category_key"] for fact in harness.facts()} == {"summer", "spring"}


def test_last_good_fact_is_held(harness: IngestHarness) -> None:
    """I20: a held fact names the run it comes from; it is not a good row, and is deleted with its row."""
    harness.configure({**KEYED, "on_bad_row": "hold_last", "max_bad_ratio": 0.7})
    first = harness.publish(snapshot({"A": 1, "B": 2, "C": 3}))
    for price in ("?", "??"):
        run_id = harness.publish(snapshot({"A": 1, "B": price, "C": 3, "D": "none"}))
        held = [fact for fact in harness.facts() if "held_from" in fact]
        assert [(fact["held_from"], fact["run_id"], fact["payload"]) for fact in held] == [
            (first, run_id, {"price": 2, "sku": "B"})
        ]
        stats = harness.read_json(paths.make_run_path(run_id, paths.STATS))
        assert (stats["good_rows"], stats["bad_rows"], stats["held_rows"]) == (2, 2, 1)
        manifest = harness.read_json(paths.make_run_path(run_id, paths.MANIFEST))
        assert (manifest["good_rows"], manifest["changes"]["unchanged"]) == (2, 3)
    harness.publish(snapshot({"A": 1, "B": 5, "C": "?"}))
    assert read_prices(harness) == {"A": 1, "B": 5, "C": 3}
    harness.publish(snapshot({"A": 1, "B": 5}))
    assert read_prices(harness) == {"A": 1, "B": 5}


def test_bad_row_is_dropped_by_default(harness: IngestHarness) -> None:
    """I20: without hold_last, the fact of a bad row is deleted."""
    harness.publish(snapshot({"A": 1, "B": 2}))
    harness.publish(snapshot({"A": 1, "B": "?"}))
    assert read_prices(harness) == {"A": 1}


def test_held_facts_do_not_improve_the_ratio(harness: IngestHarness) -> None:
    """I7, I20: bad rows count as bad even if held facts replace them."""
    harness.configure({**KEYED, "on_bad_row": "hold_last"})
    harness.publish(snapshot({"A": 1, "B": 2, "C": 3}))
    assert_failed(harness, snapshot({"A": 1, "B": "?", "C": "?"}), FailureCode.DQ_TOO_MANY_BAD_ROWS)


TWICE = snapshot([("A", 1), ("B", 2), ("A", 3), ("A", 4)])


@pytest.mark.parametrize(
    ("policy", "facts", "bad"),
    [
        ("first", [("A", 1), ("B", 2)], [3, 4]),
        ("last", [("A", 4), ("B", 2)], [1, 3]),
        ("keep", [("A", 1), ("A", 3), ("A", 4), ("B", 2)], []),
    ],
)
def test_facts_with_the_same_key(
    harness: IngestHarness, policy: str, facts: list[tuple[str, int]], bad: list[int]
) -> None:
    """I18: the first, the last or all facts of a key stay; the others are bad rows with a reason."""
    harness.configure({**KEYED, "duplicate_keys": policy})
    run_id = harness.publish(TWICE)
    published = [(fact["payload"]["sku"], fact["payload"]["price"]) for fact in harness.facts()]
    assert sorted(published) == facts
    bad_rows = harness.lines(paths.make_run_path(run_id, paths.BAD))
    assert [(row["row_number"] - 1, row["reason_code"]) for row in bad_rows] == [(row, "KEY_DUPLICATE") for row in bad]
    stats = harness.read_json(paths.make_run_path(run_id, paths.STATS))
    assert (stats["good_rows"], stats["bad_rows"]) == (len(facts), len(bad))


@pytest.mark.parametrize("keep_raw", [False, True])
def test_bad_row_has_its_reason_and_its_column(harness: IngestHarness, keep_raw: bool) -> None:
    """I9: a bad row has its reason and its column; the text of the cell only with keep_raw."""
    harness.configure({**KEYED, "keep_raw": keep_raw, "max_bad_ratio": 1})
    run_id = harness.publish(snapshot([("A", 1), ("B", "n/a"), ("A", 2)]))
    rows = harness.lines(paths.make_run_path(run_id, paths.BAD))
    assert [(row["reason_code"], row["column"]) for row in rows] == [("NOT_INTEGER", "price"), ("KEY_DUPLICATE", "sku")]
    assert [row.get("raw_value") for row in rows] == ["n/a" if keep_raw else None, None]


def test_duplicate_keys_may_fail_the_run(harness: IngestHarness) -> None:
    """I18: with `fail`, a repeated key publishes nothing."""
    harness.configure({**KEYED, "duplicate_keys": "fail"})
    assert "2 rows repeat" in assert_failed(harness, TWICE, FailureCode.DQ_DUPLICATE_KEYS)["failure"]


@pytest.mark.parametrize("dedup", ["accepted", "current"])
def test_older_file_sent_again(harness: IngestHarness, dedup: str) -> None:
    """I22: an accepted file is a duplicate for ever; with dedup: current, only the published file is."""
    harness.configure({**KEYED, "dedup": dedup})
    older, newer = snapshot({"A": 1}), snapshot({"A": 2})
    harness.publish(older)
    second = harness.publish(newer)
    assert harness.run(newer).manifest is None
    again = harness.run(older)
    assert (again.manifest is None) == (dedup == "accepted")
    assert read_prices(harness) == ({"A": 2} if dedup == "accepted" else {"A": 1})
    assert (harness.current() == second) == (dedup == "accepted")
    assert len(harness.names(paths.make_duplicates_path(SUPPLIER))) == (2 if dedup == "accepted" else 1)


def test_no_option_bypasses_the_quality_limits() -> None:
    """I14: no command or option of ingest publishes a file that fails the quality limits."""
    words = [
        word for path, command in _list_commands(typer.main.get_command(app)) for word in _list_words(path, command)
    ]
    assert "--dry-run" in words
    forbidden = ("force", "skip", "ignore", "override", "unsafe", "publish")
    assert [word for word in words if any(part in word for part in forbidden)] == []


def _list_commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    children: Mapping[str, Any] = getattr(command, "commands", {})
    yield path, command
    for name, child in children.items():
        yield from _list_commands(child, f"{path} {name}".strip())


def _list_words(path: str, command: Any) -> Iterator[str]:
    if path.startswith("ingest"):
        yield path
        for parameter in command.params:
            yield from parameter.opts


def test_manifest_has_the_hash_of_the_configuration(harness: IngestHarness) -> None:
    """I7, I8: the manifest has the hash of the configuration that the run used."""
    config = (harness.root / paths.make_config_path(SUPPLIER)).read_bytes()
    run_id = harness.publish(make_rows(3))
    harness.configure({**KEYED, "min_fact_count": 2})
    assert harness.read_json(paths.make_run_path(run_id, paths.MANIFEST))["config_sha256"] == sha256(config).hexdigest()
    assert json.loads(config) == KEYED


def test_quality_check_needs_only_numbers() -> None:
    """I15: the quality check depends only on the numbers of good and bad rows."""
    stats = RunStats()
    stats.count(None, 9, {IngestReason.NOT_INTEGER.value: 1})
    check_quality(stats, make_supplier(max_bad_ratio=0.1))
    with pytest.raises(RunFailed) as refused:
        check_quality(stats, make_supplier(max_bad_ratio=0.09))
    assert refused.value.code is FailureCode.DQ_TOO_MANY_BAD_ROWS
