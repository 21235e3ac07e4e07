"""The contract of the founding document: exact names of folders, files and fields."""

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
import rfc8785

from penstock.ingest.contract import FailureCode, IngestRunStatus
from penstock.ingest.state import reader
from penstock.ingest.tree import paths
from penstock.kernel.errors import NotFound
from tests.ingest.supplier_harness import SUPPLIER, SupplierHarness, price_list

DATA = "etl_data/raw_v1"
GOOD = price_list(("A1", 5, "100,00"), ("B2", ">1", "x"), ("C3", 7, "1 234,50"))
FACT_KEYS = ["run_id", "supplier", "row_id", "row_number", "payload"]


@pytest.fixture
def harness(tmp_path: Path) -> SupplierHarness:
    return SupplierHarness(tmp_path)


def test_run_writes_the_documented_files(harness: SupplierHarness) -> None:
    """I1, §3: every file of a run that passed is at the documented path."""
    harness.drop("price.csv", GOOD)
    manifest = harness.run().manifest
    assert manifest is not None
    assert manifest.status is IngestRunStatus.PASS
    run, sha = manifest.run_id, manifest.input_sha256 or ""
    assert sha == hashlib.sha256(GOOD.encode()).hexdigest()
    assert harness.files(f"{DATA}/runs/{run}") == ["bad.ndjson", "facts.ndjson", "manifest.json", "stats.json"]
    assert (harness.root / DATA / "state_store" / SUPPLIER / run / "facts.ndjson").is_file()
    assert (harness.root / DATA / "accepted_runs" / SUPPLIER / sha[:2] / f"{sha}.json").is_file()
    current = harness.root / DATA / "state" / "current" / SUPPLIER
    assert str(current.readlink()) == f"../../state_store/{SUPPLIER}/{run}"
    assert harness.files(f"{DATA}/inbox/{SUPPLIER}") == []
    assert (harness.root / "etl_ops" / "config" / f"{SUPPLIER}.yaml").is_file()


def test_facts_have_the_documented_fields(harness: SupplierHarness) -> None:
    """I8, §9.1, §9.2: a fact is self-contained, and its row_id is the sha256 of the canonical payload."""
    harness.drop("price.csv", GOOD)
    manifest = harness.run().manifest
    assert manifest is not None
    facts = harness.lines(f"{DATA}/runs/{manifest.run_id}/facts.ndjson")
    assert [list(fact) for fact in facts] == [FACT_KEYS, FACT_KEYS]
    assert [fact["payload"] for fact in facts] == [
        {"price_minor": 10000, "qty": 5, "sku": "A1"},
        {"price_minor": 123450, "qty": 7, "sku": "C3"},
    ]
    assert [fact["row_number"] for fact in facts] == [2, 4]
    for fact in facts:
        assert fact["row_id"] == hashlib.sha256(rfc8785.dumps(fact["payload"])).hexdigest()


def test_bad_rows_and_stats_have_the_documented_fields(harness: SupplierHarness) -> None:
    """I8, §9.3, §9.4: bad rows and statistics have the documented fields."""
    harness.drop("price.csv", GOOD)
    manifest = harness.run().manifest
    assert manifest is not None
    folder = f"{DATA}/runs/{manifest.run_id}"
    (bad,) = harness.lines(f"{folder}/bad.ndjson")
    document = {"run_id": manifest.run_id, "supplier": SUPPLIER, "row_number": 3, "reason_code": "NOT_INTEGER"}
    assert bad == {**document, "column": "qty"}
    stats = harness.json(f"{folder}/stats.json")
    assert {name: stats[name] for name in ("total_rows", "good_rows", "bad_rows")} == {
        "total_rows": 3, "good_rows": 2, "bad_rows": 1,
    }  # fmt: skip
    assert stats["bad_ratio"] == pytest.approx(1 / 3, abs=1e-6)


def test_manifest_has_the_documented_fields(harness: SupplierHarness) -> None:
    """§10, I8: a manifest has the documented fields, and the hash and size of every artifact."""
    harness.drop("price.csv", GOOD)
    manifest = harness.run().manifest
    assert manifest is not None
    folder = f"{DATA}/runs/{manifest.run_id}"
    document = harness.json(f"{folder}/manifest.json")
    required = {"run_id", "supplier", "input_filename", "input_sha256", "started_at", "finished_at", "good_rows"}
    assert required | {"bad_rows", "status", "code_commit"} <= set(document)
    assert set(document["artifacts"]) == {"facts.ndjson", "bad.ndjson", "stats.json"}
    for name, artifact in document["artifacts"].items():
        content = (harness.root / folder / name).read_bytes()
        assert artifact == {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    config = (harness.root / paths.make_config_path(SUPPLIER)).read_bytes()
    assert document["config_sha256"] == hashlib.sha256(config).hexdigest()
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|v[\d.]+", document["code_commit"])


def test_accepted_run_has_the_documented_fields(harness: SupplierHarness) -> None:
    """I10, §11: a marker names the run, the time, the file and the manifest."""
    harness.drop("price.csv", GOOD)
    manifest = harness.run().manifest
    assert manifest is not None
    marker = harness.json(paths.make_accepted_path(SUPPLIER, manifest.input_sha256 or ""))
    assert set(marker) == {"run_id", "accepted_at", "input_filename", "manifest_path"}
    assert marker["run_id"] == manifest.run_id
    assert harness.json(marker["manifest_path"])["run_id"] == manifest.run_id


def test_published_state_is_read_only(harness: SupplierHarness) -> None:
    """§12, I11: the state and its folder are read-only."""
    harness.drop("price.csv", GOOD)
    manifest = harness.run().manifest
    assert manifest is not None
    state = harness.root / paths.make_state_path(SUPPLIER, manifest.run_id)
    assert state.stat().st_mode & 0o222 == 0
    assert all(file.stat().st_mode & 0o222 == 0 for file in state.iterdir())


def test_file_that_fails_the_gate_is_quarantined(harness: SupplierHarness) -> None:
    """I6, §7: FAIL, the file in broken, a manifest with the code, and the state unchanged."""
    harness.drop("price.csv", GOOD)
    before = harness.run().manifest
    harness.drop("next.csv", "a;b\n1;2\n")
    manifest = harness.run().manifest
    assert before is not None
    assert manifest is not None
    assert manifest.status is IngestRunStatus.FAIL
    assert manifest.failure is not None
    assert manifest.failure.code is FailureCode.COLUMNS_MISSING
    assert harness.files(f"{DATA}/quarantine/{SUPPLIER}/broken") == ["next.csv"]
    document = harness.json(f"{DATA}/runs/{manifest.run_id}/manifest.json")
    assert (document["status"], document["failure_code"]) == ("FAIL", "COLUMNS_MISSING")
    assert document["moved_to"] == f"{DATA}/quarantine/{SUPPLIER}/broken/next.csv"
    pointer = harness.tree.read_pointer(SUPPLIER)
    assert pointer is not None
    assert pointer.run_id == before.run_id


def test_moved_files_never_overwrite_others(harness: SupplierHarness) -> None:
    """I2, I6: an existing name gets .failed, then a number."""
    for number in range(4):
        harness.drop("next.csv", f"a;b\n{number};2\n")
        harness.run()
    broken = f"{DATA}/quarantine/{SUPPLIER}/broken"
    assert harness.files(broken) == ["next.csv", "next.csv.failed", "next.csv.failed.1", "next.csv.failed.2"]
    contents = {(harness.root / broken / name).read_text() for name in harness.files(broken)}
    assert len(contents) == 4


def test_newest_unique_file_wins(harness: SupplierHarness) -> None:
    """I2, §4.1: known content goes to duplicates, older files go to obsolete, and one file is processed."""
    first = GOOD
    harness.drop("first.csv", first, at=1_000)
    harness.run()
    harness.drop("again.csv", first, at=9_000)
    harness.drop("old.csv", price_list(("A", 1, 1)), at=2_000)
    harness.drop("older.csv", price_list(("A", 2, 1)), at=1_500)
    harness.drop("new.csv", price_list(("A", 3, 1)), at=3_000)
    harness.drop("same-as-new.csv", price_list(("A", 3, 1)), at=2_500)
    outcome = harness.run()
    assert outcome.manifest is not None
    assert outcome.manifest.input_filename == "new.csv"
    assert harness.files(f"{DATA}/quarantine/{SUPPLIER}/duplicates") == ["again.csv", "same-as-new.csv"]
    assert harness.files(f"{DATA}/archive/{SUPPLIER}/obsolete") == ["old.csv", "older.csv"]
    assert harness.files(f"{DATA}/inbox/{SUPPLIER}") == []


def test_accepted_file_is_never_processed_again(harness: SupplierHarness) -> None:
    """§15, I10: an accepted file is a duplicate, and the run reports that there was nothing to do."""
    harness.drop("price.csv", GOOD)
    harness.run()
    harness.drop("price.csv", GOOD)
    outcome = harness.run()
    assert outcome.manifest is None
    assert outcome.reason == "all files were accepted before"
    assert outcome.is_pass


def test_file_without_rows_needs_permission(harness: SupplierHarness) -> None:
    """I7, §8: an empty snapshot needs allow_empty_snapshot."""
    harness.drop("price.csv", price_list())
    failed = harness.run().manifest
    assert failed is not None
    assert failed.failure is not None
    assert failed.failure.code is FailureCode.DQ_EMPTY_SNAPSHOT
    harness.configure(allow_empty_snapshot=True)
    harness.drop("price.csv", price_list())
    passed = harness.run().manifest
    assert passed is not None
    assert passed.status is IngestRunStatus.PASS
    assert json.loads((harness.root / paths.make_run_path(passed.run_id, paths.STATS)).read_bytes())["bad_ratio"] == 0


def test_three_keys_are_a_configuration(tmp_path: Path) -> None:
    """I18, §8: with only the quality limits, every column is a text under its own name."""
    harness = SupplierHarness(tmp_path)
    harness.configure(columns={}, key=[])
    harness.drop("price.csv", "Артикул;Цена;Цена\nA1;5;6\n")
    manifest = harness.run().manifest
    assert manifest is not None
    (fact,) = harness.lines(f"{DATA}/runs/{manifest.run_id}/facts.ndjson")
    assert fact["payload"] == {"Артикул": "A1", "Цена": "5", "Цена_2": "6"}


def test_columns_may_have_any_name(harness: SupplierHarness) -> None:
    """I8, I18, I21: column names that mean something to a library or to Penstock are ordinary names."""
    harness.configure(columns={}, key=["*", "change", "row_id"])
    header = "*;^.*$;change;row_id;row_number;payload;category_key"
    harness.drop("price.csv", f"{header}\nA;1;x;r;9;p;1\n")
    harness.run()
    harness.drop("price.csv", f"{header}\nA;1;x;r;9;p;2\n")
    manifest = harness.run().manifest
    assert manifest is not None
    assert manifest.status is IngestRunStatus.PASS
    (fact,) = harness.lines(paths.make_run_path(manifest.run_id, paths.FACTS))
    assert fact["payload"] == dict(zip(header.split(";"), ["A", "1", "x", "r", "9", "p", "2"], strict=True))
    (changed,) = harness.lines(paths.make_state_path(SUPPLIER, manifest.run_id, paths.CHANGED_KEYS))
    assert changed == {"change": "changed", "key": {"*": "A", "change": "x", "row_id": "r"}}


def test_file_name_in_another_encoding(harness: SupplierHarness) -> None:
    """I2, I16: a name that is not UTF-8 is escaped and cut, and the file is processed."""
    name = ("я" * 120).encode("cp1251") + b".csv"
    Path(os.fsdecode(os.fsencode(harness.root / paths.make_inbox_path(SUPPLIER)) + b"/" + name)).write_text(GOOD)
    manifest = harness.run().manifest
    assert manifest is not None
    assert manifest.status is IngestRunStatus.PASS
    assert harness.files(paths.make_inbox_path(SUPPLIER)) == []
    (archived,) = harness.files(paths.make_archive_path(SUPPLIER))
    assert archived.startswith("\\xff")


@pytest.mark.parametrize(
    "run_id", ["", "..", "brinex", "../../etc_20260101T000000Z_abcdef", "brinex_20260101T000000Z_abcdeg"]
)
def test_invalid_run_id_is_not_found(harness: SupplierHarness, run_id: str) -> None:
    """I5: an invalid run id is not found, and does not lead to another path."""
    with pytest.raises(NotFound):
        reader.read_manifest(harness.tree, run_id)
