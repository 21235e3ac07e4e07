"""Tests of proposals for delimited texts, also for untidy ones."""

import csv
import gzip
import io
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.ingest.contract import IngestRunStatus
from tests.ingest.inspect.proposals import columns, inspect_valid, run_proposal

MESSY_HEADER = [
    "№ п/п",
    "Код",
    "Наименование товара",
    "Ед. изм.",
    "Цена, руб.",
    "Остаток",
    "Дата поступления",
    "Новинка",
]


def messy_rows() -> tuple[list[list[str]], dict[str, dict[str, Any]]]:
    """Return rows with sections between them, and their facts."""
    random = Random(3)
    rows: list[list[str]] = []
    facts: dict[str, dict[str, Any]] = {}
    for number in range(1, 201):
        if number % 50 == 1:
            rows.append(["", f"Раздел {'АБВГ'[number // 50]}: крепёж", *[""] * 6])
        price, code = random.randrange(1_000, 9_999_999), f"{number:05}"
        shown, known = random.choice([("12", 12), (">10", 10), ("10+", 10), ("есть", 1), ("нет", 0), ("-", None)])
        day = f"{random.randrange(1, 29):02}.{random.randrange(1, 13):02}.2026"
        is_new = random.random() < 0.3
        money = f"{price // 100:,}".replace(",", " ") + f",{price % 100:02}"
        name = f'Болт "М{number}"; оцинк.'
        rows.append([str(number), code, name, "шт", money, shown, day, "да" if is_new else "нет"])
        facts[code] = {
            "sku": code, "name": name, "unit": "шт", "price_minor": price, "qty": known,
            "date": f"{day[6:]}-{day[3:5]}-{day[:2]}", "novinka": is_new,
        }  # fmt: skip
    return rows, facts


def messy_csv() -> tuple[str, dict[str, dict[str, Any]]]:
    rows, facts = messy_rows()
    out = io.StringIO()
    writer = csv.writer(out, delimiter=";", lineterminator="\r\n")
    writer.writerows([['ООО "Метиз"'], ["Прайс-лист от 14.02.2026"], [], MESSY_HEADER, *rows])
    writer.writerow(["Итого", "", "", "", "1 000 000,00", "", "", ""])
    return out.getvalue(), facts


@pytest.mark.parametrize("encoding", ["windows-1251", "utf-8-sig", "utf-16"])
def test_an_untidy_semicolon_csv(encoding: str, tmp_path: Path) -> None:
    """I17, I18: preamble, sections, totals, decimal commas and words for counts are handled, in any common encoding."""
    text, facts = messy_csv()
    file = tmp_path / "metiz.csv"
    file.write_bytes(text.encode(encoding))
    inspection = inspect_valid(file)
    assert inspection.delimiter == ";"
    assert inspection.encoding in (encoding, "utf-8", "utf-16-le")
    assert inspection.tables[0].header_rows == [4]
    assert inspection.config["source"]["skip_rows"] == [r"(?i)^итого\b", "^[^0-9]"]
    found = columns(inspection)
    assert list(found) == ["sku", "name", "unit", "price_minor", "qty", "date", "novinka"]
    assert found["sku"] == {"from": "Код", "type": "string", "required": True}
    assert found["price_minor"] == {"from": "Цена, руб.", "type": "money", "required": True}
    assert found["date"]["formats"] == ["%d.%m.%Y"]
    assert found["qty"]["at_least"] is True
    assert any("'есть' is read as 1" in warning for warning in inspection.warnings)
    result = run_proposal(file, inspection, tmp_path)
    assert result.manifest.status is IngestRunStatus.PASS
    assert result.by("sku") == facts
    assert result.manifest.bad_rows == 0


def english_csv(rows: int = 300) -> tuple[str, dict[str, dict[str, Any]]]:
    random = Random(5)
    facts: dict[str, dict[str, Any]] = {}
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(
        ["Product Name", "UPC", "Vendor Code", "Retail Price", "Cost", "Qty on Hand", "Last Updated", "Weight (lbs)"]
    )
    for number in range(rows):
        upc, cents = f"0{random.randrange(10**11):011}", random.randrange(100, 900_000)
        month, day = random.randrange(1, 13), random.randrange(1, 29)
        weight = f"{random.randrange(100, 900) / 100:.2f}"
        name = f"Total Widget {number}, deluxe"
        shown = [name, upc, f"W-{number}", f"${cents / 100:,.2f}", f"${cents / 200:,.2f}", str(number % 40)]
        writer.writerow([*shown, f"{month:02}/{day:02}/2026", weight])
        facts[upc] = {
            "name": name, "barcode": upc, "sku": f"W-{number}", "retail_price_minor": cents,
            "price_minor": round(float(f"{cents / 200:.2f}") * 100), "qty": number % 40,
            "date": f"2026-{month:02}-{day:02}", "weight": weight,
        }  # fmt: skip
    return out.getvalue(), facts


def test_an_english_csv(tmp_path: Path) -> None:
    """I17, I18: dates start with the month if a day proves it; dollars are money; barcodes keep their zeros."""
    text, facts = english_csv()
    file = tmp_path / "widgets.csv"
    file.write_text(text)
    inspection = inspect_valid(file)
    found = columns(inspection)
    assert found["date"] == {"from": "Last Updated", "type": "date", "formats": ["%m/%d/%Y"]}
    assert found["barcode"]["type"] == "string"
    assert found["retail_price_minor"]["type"] == "money"
    assert inspection.config["key"] == ["sku"]
    assert "skip_rows" not in inspection.config["source"]  # Total Widget is no total
    assert inspection.warnings == []
    result = run_proposal(file, inspection, tmp_path)
    assert result.by("barcode") == facts


def test_ambiguous_dates_are_reported(tmp_path: Path) -> None:
    """I17: if no day is above 12, the order of day and month is a guess with a warning."""
    file = tmp_path / "dates.csv"
    file.write_text("sku,date,price\n" + "".join(f"A{n},0{n}/0{10 - n}/2026,{n}.50\n" for n in range(1, 10)))
    inspection = inspect_valid(file)
    assert columns(inspection)["date"]["formats"] == ["%m/%d/%Y"]
    assert any("the order is ambiguous" in warning for warning in inspection.warnings)


def test_a_tsv_without_a_header(tmp_path: Path) -> None:
    """I17: columns without a header are read by their numbers and named by their content."""
    random = Random(9)
    rows = [(f"{n:08}", f"Фильтр масляный {n}", random.randrange(100, 99_999), n % 30) for n in range(1, 151)]
    file = tmp_path / "filters.tsv"
    lines = [f"{code}\t{name}\t{price // 100}.{price % 100:02}\t{qty}\n" for code, name, price, qty in rows]
    file.write_text("".join(lines), encoding="utf-8")
    inspection = inspect_valid(file)
    assert inspection.config["source"] == {"format": "csv", "delimiter": "\t", "header": "none"}
    assert {name: column["from"] for name, column in columns(inspection).items()} == {
        "barcode": 1, "name": 2, "price_minor": 3, "column_4": 4,
    }  # fmt: skip
    assert any("no header was found" in warning for warning in inspection.warnings)
    result = run_proposal(file, inspection, tmp_path)
    expected = [
        {"barcode": code, "name": name, "price_minor": price, "column_4": qty} for code, name, price, qty in rows
    ]
    assert result.payloads == expected


@pytest.mark.parametrize("packing", ["gz", "zip"])
def test_packed_files_are_inspected(packing: str, tmp_path: Path) -> None:
    """I17: files packed with gzip and zip are unpacked."""
    text, facts = english_csv(60)
    file = tmp_path / f"widgets.csv.{packing}"
    if packing == "gz":
        file.write_bytes(gzip.compress(text.encode()))
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("widgets.csv", text)
    inspection = inspect_valid(file)
    assert inspection.format == "csv"
    assert run_proposal(file, inspection, tmp_path).by("barcode") == facts


def test_columns_with_the_same_name_are_read_by_number(tmp_path: Path) -> None:
    """I18: columns with the same header are read by their numbers."""
    file = tmp_path / "twice.csv"
    file.write_text("sku;price;price\n" + "".join(f"A-{n};{n}.10;{n}.20\n" for n in range(50)))
    inspection = inspect_valid(file)
    found = columns(inspection)
    assert [(name, column["from"]) for name, column in found.items()] == [
        ("sku", "sku"), ("price_minor", 2), ("price_2_minor", 3),
    ]  # fmt: skip
    assert run_proposal(file, inspection, tmp_path).payloads[1] == {
        "sku": "A-1",
        "price_minor": 110,
        "price_2_minor": 120,
    }


def test_a_code_with_the_header_of_a_row_number(tmp_path: Path) -> None:
    """I17: a column called № is dropped only if it numbers the rows."""
    file = tmp_path / "numbers.csv"
    file.write_text("№;Название;Цена\n" + "".join(f"K-{n};Товар {n};{n},50\n" for n in range(50)), encoding="utf-8")
    inspection = inspect_valid(file)
    assert columns(inspection)["number"] == {"from": "№", "type": "string", "required": True}
    assert inspection.config["key"] == ["number"]


def test_without_a_unique_column_there_is_no_key(tmp_path: Path) -> None:
    """I17: a key is proposed only for a unique column."""
    file = tmp_path / "keyless.csv"
    file.write_text("brand,price\n" + "".join(f"{'XYZ'[n % 3]},{n % 7}.00\n" for n in range(60)))
    inspection = inspect_valid(file)
    assert "key" not in inspection.config
    assert any("no column is unique" in warning for warning in inspection.warnings)


def test_keys_are_unique_beyond_the_sample(tmp_path: Path) -> None:
    """I17: a column that repeats values only after the first rows is not proposed as the key."""
    file = tmp_path / "late.csv"
    lines = [f"A{n % 4000},B{n:06},{n}.00\n" for n in range(10_000)]
    file.write_text("sku,barcode,price\n" + "".join(lines))
    inspection = inspect_valid(file)
    assert inspection.config["key"] == ["barcode"]
    assert inspection.config["min_fact_count"] == 5_000
    assert inspection.tables[0].rows_sampled < 4_001
