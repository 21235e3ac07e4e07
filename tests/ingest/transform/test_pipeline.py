"""I8, I18: tests of the whole pipeline against the reference implementation."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import delimited
from penstock.ingest.model import RunFailed
from penstock.ingest.transform import emit, key_index
from tests.ingest.transform.pipeline_runs import assert_as_expected, processed, supplier_of

EVERYTHING: dict[str, dict[str, Any]] = {
    "sku": {"from": "sku", "required": True, "pattern": "[A-Z]{3}-[0-9]+", "max_length": 9},
    "name": {"from": "name", "replace": {"  +": " ", "^n/a$": ""}, "empty": ["-", "—"]},
    "brand": {"from": "brand", "case": "upper", "fill_down": True},
    "size": {"from": "name", "extract": r"R([0-9]{2})", "type": "integer", "min": 13, "max": 22},
    "qty": {"from": "qty", "type": "integer", "at_least": True, "default": 0},
    "price_minor": {"from": "price", "type": "money", "required": True, "min": 0},
    "weight": {"from": "weight", "type": "decimal", "scale": 3, "round": True, "decimal": ",", "max": 1000},
    "made": {"from": "made", "type": "date", "formats": ["%d.%m.%Y", "%d/%m/%y"]},
    "seen": {"from": "seen", "type": "datetime", "formats": ["%d.%m.%Y %H:%M"]},
    "season": {"from": "season", "type": "enum", "values": {"Зима": 1, "лето ": 2}, "default": 0},
    "used": {"from": "used", "type": "enum", "values": {"yes": True, "no": False}},
    "ключ": {"from": "colour", "type": "enum", "values": ["Red", "blue"]},
}
HEADER = ["sku", "name", "brand", "qty", "price", "weight", "made", "seen", "season", "used", "colour"]
GOOD = [
    [
        "NOK-1",
        'Tyre "x"; R13',
        "Nokian",
        "5",
        "1 234,50",
        "9,5",
        "01.02.2025",
        "01.02.2025 10:20",
        "зима",
        "Yes",
        "red",
    ],
    ["NOK-2", " Шина  R14 ", "", ">10", "90", "0,0005", "2025-03-04", "2025-03-04", "ЛЕТО", "no", "BLUE"],
    ["NOK-3", "😀\n\t R15", "Pirelli", "10+", "$1,234.5", "1.234", "5/6/25", "2025-03-04T05:06:07", "", "", ""],
    ["NOK-4", "- R16", "", "", "12.345.678,00 руб.", "12,3456", "2025-03-04T10:00", "2025-03-04 05:06", "", "", ""],
    ["NOK-5", "R22", "", "больше 30", "0", "", "", "", "", "", ""],
    ["NOK-6", "-", "ß", "-0", "99999999999999,99 р", "1000", "", "", "", "", ""],
    ["NOK-7", "n/a", "x", "1 000", "1'000,5", "999,9994", "", "", "", "", ""],
]
BAD = [
    ["", "R13", "", "1", "1", "", "", "", "", "", ""],  # no key
    ["nok-1", "R13", "", "1", "1", "", "", "", "", "", ""],
    ["NOK-123456", "R13", "", "1", "1", "", "", "", "", "", ""],
    ["NOK-8", "no size", "", "1", "1", "", "", "", "", "", ""],
    ["NOK-8", "R99", "", "1", "1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "many", "1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1,5", "1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "9007199254740992", "1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1,234", "", "", "", "", "", ""],  # one, or a thousand?
    ["NOK-8", "R13", "", "1", "0,001", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "-1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "1000,0005", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "heavy", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "", "31.02.2025", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "", "01.02.25", "", "", "", ""],  # not the year 25
    ["NOK-8", "R13", "", "1", "1", "", "", "noon", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "", "", "", "осень", "", ""],
    ["NOK-8", "R13", "", "1", "1", "", "", "", "", "maybe", ""],
    ["NOK-8", "R13", "", "1", "1", "", "", "", "", "", "green"],
    ["NOK-8", "R13" + "x" * 300, "", "one\n\"'\x01", "1", "", "", "", "", "", ""],
    ["NOK-8", "R13", "", "1", "1", "", "", "", "", "", "", "torn"],
]
OTHERS = [[""], ["", " ", "\t"], ["", "", "", "", "", "", "", "", "", "", "", " "], ["Total", "R13"], ["", "Total:"]]
REPEATED = [["NOK-2", "R17", "", "1", "1"], ["NOK-1", "R18", "", "2", "2"], ["NOK-1", "R18", "", "2", "2"]]


@pytest.mark.parametrize("keep_raw", [False, True])
@pytest.mark.parametrize("duplicate_keys", ["first", "last", "keep"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_every_type_option_and_kind_of_bad_row(
    monkeypatch: pytest.MonkeyPatch, duplicate_keys: str, *, is_cut: bool, keep_raw: bool
) -> None:
    """I8, I18: facts, bad rows and statistics equal those of the reference, for any size of batches."""
    if is_cut:
        monkeypatch.setattr(delimited, "PIECE", 1000)
        monkeypatch.setattr(emit, "ROWS", 5)
        monkeypatch.setattr(key_index, "PART", 4)
    more = {"key": ["sku"], "duplicate_keys": duplicate_keys, "keep_raw": keep_raw}
    supplier = supplier_of(EVERYTHING, **more, source={"skip_rows": ["^Total"]})
    assert_as_expected([HEADER, *GOOD, *OTHERS, *BAD, *GOOD[:3], *OTHERS, *REPEATED], supplier)


def test_a_repeated_key_fails_the_run() -> None:
    """I18: `duplicate_keys: fail` rejects a file with repeated keys."""
    supplier = supplier_of(EVERYTHING, key=["sku"], duplicate_keys="fail")
    with tempfile.TemporaryDirectory() as folder, pytest.raises(RunFailed) as failed:
        processed([HEADER, *GOOD, GOOD[0]], supplier, Path(folder))
    assert failed.value.code == FailureCode.DQ_DUPLICATE_KEYS


@given(st.lists(st.lists(st.sampled_from(["", " ", "a", "b", "Total"]), min_size=1, max_size=4), max_size=12))
def test_rows_of_any_shape(rows: list[list[str]]) -> None:
    """I18: blank, skipped, short, long and filled rows are handled in any order."""
    columns: dict[str, dict[str, Any]] = {
        "x": {"from": "x", "fill_down": True},
        "y": {"from": "y", "required": True},
        "z": {"from": "z"},
    }
    supplier = supplier_of(columns, keep_raw=True, source={"skip_rows": ["^Total$"]})
    assert_as_expected([["x", "y", "z"], *rows], supplier)
