"""Tests of JSON and NDJSON: records with names."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import records, tables
from penstock.ingest.extract.files import open_tables
from penstock.ingest.extract.tables import CELLS
from penstock.ingest.supplier import SupplierLimits, SupplierSource
from tests.ingest.extract.json_files import LIST, A, B, write_file
from tests.ingest.extraction import STOCK, extract_file, make_supplier, read_refusal

ENDLESS = b'{"q": 1e9999999999999999999}'


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_single_object_is_a_record(file: Path, end: bytes) -> None:
    """I17: a document that is a single object is a record."""
    assert extract_file(write_file(file, json.dumps(LIST[0], indent=1).encode() + end)).rows == [(1, A)]
    assert extract_file(write_file(file, json.dumps(LIST[0]).encode() + end)).rows == [(1, A)]


@pytest.mark.parametrize("content", [b"[]", b'{"items": []}', b"[ ]\n"])
def test_no_records(file: Path, content: bytes) -> None:
    """I7: an empty list at the configured path is an empty snapshot; without a configured path it is rejected."""
    if content[:1] == b"[":
        assert extract_file(write_file(file, content)).facts == []
        read_refusal(file, make_supplier(), FailureCode.HEADER_MISMATCH)  # its columns are unknown
    else:
        read_refusal(write_file(file, content))
        assert extract_file(file, make_supplier(STOCK, source={"records": "items"})).facts == []


def test_nested_values_have_dotted_names(file: Path) -> None:
    """I17: nested values have dotted names; lists stay JSON."""
    record = {
        "id": {"sku": "A"},
        "price": {"retail": {"rub": 10.5}},
        "tags": ["x", {"y": 1.10}],
        "no": None,
        "ok": True,
    }
    columns = {
        "sku": {"from": "id.sku"},
        "price": {"from": "price.retail.rub", "type": "money"},
        "tags": {"from": "tags"},
        "no": {"from": "no"},
        "ok": {"from": "ok"},
    }
    [(_, payload)] = extract_file(write_file(file, [record]), make_supplier(columns)).rows
    assert payload == {"sku": "A", "price": 1050, "tags": '["x", {"y": "1.1"}]', "no": None, "ok": "true"}


def test_a_field_that_first_records_lack(file: Path) -> None:
    """I17: a field that the first records lack is read from later records, unless it is required."""
    document = [{"sku": f"A{n}", "sale": n} if n > 900 else {"sku": f"A{n}"} for n in range(1, 1001)]
    columns: dict[str, Any] = {"sku": {"from": "sku"}, "sale": {"from": ["sale", "rebate"], "type": "integer"}}
    rows = dict(extract_file(write_file(file, document), make_supplier(columns)).rows)
    assert rows[900] == {"sku": "A900", "sale": None}
    assert rows[1000] == {"sku": "A1000", "sale": 1000}
    needed = make_supplier({**columns, "sale": {"from": "sale", "required": True}})
    message = read_refusal(file, needed, FailureCode.COLUMNS_MISSING)
    assert "its columns are 'sku'" in message


def test_spellings_and_fields_with_the_same_source(file: Path) -> None:
    """I18: any spelling is read, and two fields may have the same source."""
    columns = {
        "sku": {"from": ["code", "SKU", "sku"], "required": True},
        "qty": {"from": "qty", "type": "integer"},
        "stock": {"from": "qty"},
    }
    extracted = extract_file(write_file(file, LIST), make_supplier(columns))
    assert extracted.rows[0] == (1, {"sku": "A", "qty": 1, "stock": "1"})


def test_records_without_a_mapping(file: Path) -> None:
    """I18: without a mapping, every name is a field."""
    extracted = extract_file(write_file(file, [{"b": 1}, {"a": {"c": "x"}}]), make_supplier())
    assert extracted.rows == [(1, {"b": "1", "a.c": None}), (2, {"b": None, "a.c": "x"})]


def test_items_that_are_not_objects_are_bad_rows(file: Path) -> None:
    """I9: a number or text in a list of objects is a bad row."""
    extracted = extract_file(write_file(file, [LIST[0], 5, "x", None, [1], LIST[1]]))
    assert extracted.rows == [(1, A), (6, B)]
    assert extracted.reasons == [(n, "RECORD_MALFORMED") for n in (2, 3, 4, 5)]


def test_lines_of_records(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I9: a malformed line is a bad row, a blank line is no row, the last line needs no end, for any size of pieces."""
    bad = [
        b"{broken",
        b'{"sku": "C"',
        b"[1]",
        '"имя"'.encode(),
        b'{"sku": "\xff"}',
        b'{"sku": NaN}',
        b'{"a":' * 5000,
        ENDLESS,
    ]
    lines = [
        json.dumps(LIST[0]).encode(),
        json.dumps(LIST[0]).encode() + b"\r",
        b"",
        b"  ",
        *bad,
        json.dumps(LIST[1]).encode(),
    ]
    for piece in (1 << 20, 7):
        monkeypatch.setattr(records, "_PIECE", piece)
        extracted = extract_file(write_file(file, b"\n".join(lines)))
        assert extracted.rows == [(1, A), (2, A), (13, B)]
        assert extracted.reasons == [(n, "RECORD_MALFORMED") for n in range(5, 13)]
        assert extracted.stats.blank_rows == 2


def test_a_line_without_end(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: an endless line is rejected in bounded memory."""
    monkeypatch.setattr(records, "_LINE_LIMIT", 1 << 20)
    lines = json.dumps(LIST[0]).encode() + b"\n"
    assert "a line" in read_refusal(write_file(file, lines * 2 + b'{"sku": "' + b"x" * (3 << 20)))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "windows-1251"])
@pytest.mark.parametrize("is_lines", [True, False])
def test_records_in_any_encoding(file: Path, encoding: str, is_lines: bool) -> None:
    """I17: records are read in every encoding of texts."""
    items = [{"sku": "Ш-1", "name": "Шина зимняя"}, {"sku": "Ш-2", "name": "Диск литой"}] * 50
    lines = [json.dumps(item, ensure_ascii=False) for item in items]
    content = "\n".join(lines) + "\n" if is_lines else f"[{', '.join(lines)}]"
    extracted = extract_file(write_file(file, content.encode(encoding)), make_supplier({"sku": {"from": "sku"}}))
    assert [payload["sku"] for _, payload in extracted.rows] == ["Ш-1", "Ш-2"] * 50


def test_csv_that_starts_like_json(file: Path) -> None:
    """I17: the format of a text can be configured."""
    content = b"[sku],qty,price\nA,1,10.50\n"
    columns = {**STOCK, "sku": {"from": "[sku]"}}
    read_refusal(write_file(file, content), make_supplier(columns))
    assert extract_file(file, make_supplier(columns, source={"format": "csv"})).rows == [(2, A)]


def test_records_of_many_names(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16, I19: records that each have other names are not expanded into a table of all rows and all names."""
    lines = [f'{{"sku": "A{n}", "n{n}": 1}}' for n in range(2_000)]
    [table] = open_tables(write_file(file, "\n".join(lines).encode()), SupplierSource(), SupplierLimits())
    frames = [batch.frame for batch in table.batches]
    assert all(frame.height * len(table.names or []) <= CELLS for frame in frames)
    assert sum(frame.height for frame in frames) == 2_000
    monkeypatch.setattr(records, "COLUMNS", 2_000)
    assert "2,000 names" in read_refusal(file, make_supplier(), FailureCode.FILE_TOO_LARGE)


def test_long_records(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16: batches of long records have fewer rows."""
    monkeypatch.setattr(tables, "_TEXT", 10_000)
    content = b"\n".join([b'{"sku": "' + b"x" * 1000 + b'"}'] * 100)
    [table] = open_tables(write_file(file, content), SupplierSource(), SupplierLimits(), ["sku"])
    assert [batch.frame.height for batch in table.batches] == [10] * 10
