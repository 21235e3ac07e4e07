"""Tests of the proposal for a workbook of forty sheets."""

import time
from pathlib import Path

import pytest

from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.inspect.report import Inspection
from tests.ingest.inspect.proposals import columns, inspect_valid, run_proposal
from tests.ingest.inspect.scenarios.tyre_workbook import Truth, tyre_workbook


@pytest.fixture(scope="module")
def workbook(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth, Inspection]:
    file = tmp_path_factory.mktemp("tyres") / "Прайс шины.xlsx"
    truth = tyre_workbook(file)
    return file, truth, inspect_valid(file)


def test_headers_are_found_below_preambles_of_any_height(workbook: tuple[Path, Truth, Inspection]) -> None:
    """I17: preambles and headers of two rows are detected on every sheet."""
    _, _, inspection = workbook
    tables = [table for table in inspection.tables if not table.is_skipped]
    assert [table.header_rows for table in tables] == [[6 + n % 6, 7 + n % 6] for n in range(39)]
    assert tables[1].preamble[0] == "ООО «Шинный двор»"
    assert all(len(table.totals) == 1 for table in tables)
    assert inspection.config["source"]["header_rows"] == 2
    assert inspection.config["source"]["header"] == "auto"


def test_sheets_without_a_table_are_skipped(workbook: tuple[Path, Truth, Inspection]) -> None:
    """I17: a table of contents is added to `source.sheets.skip`, with a warning."""
    _, _, inspection = workbook
    assert inspection.config["source"]["sheets"] == {"skip": ["Содержание"]}
    assert any("'Содержание'" in warning and "skipped" in warning for warning in inspection.warnings)


def test_spellings_become_a_single_field(workbook: tuple[Path, Truth, Inspection]) -> None:
    """I18: columns with different headers for a field, in any order, become a field with all spellings."""
    _, _, inspection = workbook
    found = columns(inspection)
    assert found["sku"]["from"] == ["Артикул", "Код товара"]
    assert found["brand"]["from"] == ["Бренд", "Производитель", "Марка"]
    assert set(found) == {
        "sku", "name", "brand", "season", "weight", "shipy", "barcode", "wholesale_price_minor", "retail_price_minor",
        "qty_moskva", "qty_sankt_peterburg", "qty_kazan",
    }  # fmt: skip
    assert found["wholesale_price_minor"]["type"] == "money"
    assert found["qty_moskva"] == {"from": "Склад / Москва", "type": "integer", "at_least": True, "empty": ["-"]}
    assert found["shipy"]["values"] == {"да": True, "нет": False}
    assert inspection.config["key"] == ["sku"]


def test_unreadable_values_are_reported(workbook: tuple[Path, Truth, Inspection]) -> None:
    """I17: a word in a column of prices is a warning that contains the word."""
    _, truth, inspection = workbook
    warnings = [warning for warning in inspection.warnings if "звоните" in warning]
    assert len(warnings) == 1
    assert f"{len(truth.odd)} values cannot be read as an amount" in warnings[0]


def test_a_run_with_the_proposal_gives_the_facts(workbook: tuple[Path, Truth, Inspection], tmp_path: Path) -> None:
    """I17, I18: a run with the proposal publishes every row of every sheet as its expected fact."""
    file, truth, inspection = workbook
    result = run_proposal(file, inspection, tmp_path)
    assert result.manifest.status is IngestRunStatus.PASS
    found = {(fact["category_key"], fact["payload"]["sku"]): fact["payload"] for fact in result.facts}
    expected = {key: fact for key, fact in truth.facts.items() if key not in truth.odd}
    assert found.keys() == expected.keys()
    for key, fact in expected.items():
        shown = dict(found[key])
        shown["studs"] = shown.pop("shipy")
        assert shown == fact
    assert result.manifest.bad_rows == len(truth.odd)


@pytest.mark.full
def test_a_large_workbook_is_inspected_in_seconds(tmp_path: Path) -> None:
    """I17: the inspection of 39 sheets with 23,000 rows takes seconds."""
    file = tmp_path / "large.xlsx"
    tyre_workbook(file, rows=590)
    started = time.process_time()  # of this process alone: others may keep the machine busy
    inspection = inspect_valid(file)
    assert time.process_time() - started < 6
    assert inspection.config["min_fact_count"] == 11_000
    assert inspection.config["key"] == ["sku"]
