"""Tests of proposals for workbooks with various layouts."""

import zipfile
from pathlib import Path
from typing import Any

import xlsxwriter  # type: ignore[import-untyped]

from penstock.ingest.contract import IngestRunStatus
from tests.ingest.inspect.proposals import columns, inspect_valid, run_proposal

Sheet = list[list[Any]]


def workbook(path: Path, sheets: dict[str, Sheet]) -> Path:
    book = xlsxwriter.Workbook(path)
    for name, rows in sheets.items():
        sheet = book.add_worksheet(name)
        for number, row in enumerate(rows):
            sheet.write_row(number, 0, [None if cell == "" else cell for cell in row])
    book.close()
    return path


def exported() -> tuple[Sheet, list[dict[str, Any]]]:
    """Return the rows of an accounting export: an empty first column, a numbered header, sections, signatures."""
    rows: Sheet = [["", "ИП Петров А.А."], ["", "ИНН 770123456789"], [], ["", "Прайс-лист на 14.02.2026"], [], []]
    header = ["Номенклатура", "Характеристика", "Артикул", "Ед.", "Цена (розничная), руб. с НДС", "Свободный остаток"]
    rows += [["", *header], ["", *"123456"]]
    facts = []
    for n in range(120):
        if n % 30 == 0:
            rows.append(["", ("Краски", "Лаки", "Эмали", "Кисти и валики")[n // 30]])
        rows.append(["", f"Краска ВД-{n}", "" if n % 3 else "матовая", f"КР-{n:04}", "шт", 100 + n * 1.25, n % 17])
        facts.append(
            {
                "name": f"Краска ВД-{n}", "kharakteristika": None if n % 3 else "матовая", "sku": f"КР-{n:04}",
                "unit": "шт", "retail_price_minor": 10_000 + n * 125, "qty": n % 17,
            }
        )  # fmt: skip
    rows += [[], ["", "Итого позиций: 120"], ["", "* Цены действительны до 01.03.2026"], ["", "Менеджер: Иванова О."]]
    return rows, facts


def test_an_export_with_numbered_columns_sections_and_notes(tmp_path: Path) -> None:
    """I17: rows that are not data are detected, and skipped by their texts."""
    rows, facts = exported()
    file = workbook(tmp_path / "export.xlsx", {"TDSheet": rows})
    inspection = inspect_valid(file)
    assert inspection.tables[0].header_rows == [7, 8]
    skipped = inspection.config["source"]["skip_rows"]
    assert skipped[:2] == [r"(?i)^итого\b", "^Краски$"]
    assert any("as sections or notes" in warning for warning in inspection.warnings)
    result = run_proposal(file, inspection, tmp_path)
    assert result.payloads == facts
    assert result.manifest.bad_rows == 0


def test_many_sections_become_bad_rows(tmp_path: Path) -> None:
    """I17: sections that cannot be skipped safely become bad rows, with a warning, and never facts."""
    rows: Sheet = [["Артикул", "Название", "Цена", "Остаток"]]
    for n in range(600):
        rows += [[f"Раздел {n // 15}"]] if n % 15 == 0 else []
        rows.append([f"A{n}", f"Товар {n}", n if n % 2 else "", n % 5])
    file = workbook(tmp_path / "sections.xlsx", {"Лист1": rows})
    inspection = inspect_valid(file)
    assert "skip_rows" not in inspection.config["source"]
    assert any("will be bad rows" in warning for warning in inspection.warnings)
    result = run_proposal(file, inspection, tmp_path)
    assert result.manifest.status is IngestRunStatus.PASS
    assert len(result.facts) == 600
    assert result.manifest.bad_rows == 40


def products(start: int = 1) -> Sheet:
    return [[f"A{n}", f"Товар {n}", n * 10.5, n * 12, "+" if n % 2 else "-"] for n in range(start, start + 40)]


def test_headers_of_different_heights(tmp_path: Path) -> None:
    """I17: a low header below a blank row is read like a high one; other sheets are skipped with a warning."""
    low = ["Артикул", "Название", "Цена опт", "Цена розн", "Наличие"]
    high: Sheet = [["ООО Ромашка"], [], ["Артикул", "Название", "Цена", "", "Наличие"], ["", "", "опт", "розн."]]
    contents: Sheet = [["№", "Раздел", "Позиций"], [1, "Обои", 40], [2, "Клей", 40], [3, "Плитка", 40]]
    sheets = {
        "Содержание": contents,
        "Обои": high + products(),
        "Клей": high + products(),
        "Плитка": [["ООО Ромашка"], [], low, *products()],
        "Пол": [low, *products()],
        "Контакты": [["Телефон", "+7 495 111"], ["E-mail", "a@b.ru"]],
    }
    file = workbook(tmp_path / "heights.xlsx", sheets)
    inspection = inspect_valid(file)
    assert sorted(inspection.config["source"]["sheets"]["skip"]) == ["Контакты", "Пол", "Содержание"]
    assert any("'Пол'" in warning and "another supplier" in warning for warning in inspection.warnings)
    assert columns(inspection)["wholesale_price_minor"]["from"] == ["Цена / опт", "Цена опт"]
    assert columns(inspection)["in_stock"]["values"] == {"+": True, "-": False}
    assert inspection.config["key"] == ["category_key", "sku"]
    result = run_proposal(file, inspection, tmp_path)
    assert len(result.facts) == 120
    assert result.manifest.bad_rows == 0
    expected = {"sku": "A2", "name": "Товар 2", "wholesale_price_minor": 2100, "retail_price_minor": 2400}
    assert result.facts[1]["payload"] == {**expected, "in_stock": False}


def test_a_sheet_with_a_repeated_column_is_skipped(tmp_path: Path) -> None:
    """I17: the few sheets with an ambiguous header are skipped, with a warning."""
    header = ["Артикул", "Название", "Цена опт", "Цена розн", "Наличие"]
    sheets: dict[str, Sheet] = {f"S{n}": [header, *products(n * 100)] for n in range(4)}
    sheets["Двойной"] = [["Артикул", "Название", "Цена опт", "Цена опт", "Наличие"], *products(900)]
    inspection = inspect_valid(workbook(tmp_path / "twice.xlsx", sheets))
    assert inspection.config["source"]["sheets"] == {"skip": ["Двойной"]}
    assert any("'Двойной' has a column twice" in warning for warning in inspection.warnings)
    assert columns(inspection)["wholesale_price_minor"]["from"] == "Цена опт"


def test_cells_merged_vertically_are_filled(tmp_path: Path) -> None:
    """I18: a category that is written once above its rows is filled down."""
    rows: Sheet = [["Категория", "Модель", "Цена, $", "Склад"]]
    rows += [
        [f"Кат {n // 10}" if n % 10 == 0 else "", f"M-{n}", f"${n}.50", ("много", "нет")[n % 2]] for n in range(60)
    ]
    file = workbook(tmp_path / "merged.xlsx", {"Лист1": rows})
    inspection = inspect_valid(file)
    assert columns(inspection)["category"] == {"from": "Категория", "type": "string", "fill_down": True}
    assert run_proposal(file, inspection, tmp_path).payloads[15] == {
        "category": "Кат 1", "model": "M-15", "price_minor": 1550, "availability": "нет",
    }  # fmt: skip


def test_a_brand_called_total_is_no_total(tmp_path: Path) -> None:
    """I17: a pattern that would skip data is not proposed."""
    rows: Sheet = [["Brand", "Item", "SKU", "Price"]]
    rows += [[("Total", "Shell")[n % 2], f"Oil {n}", f"O{n}", n + 0.5] for n in range(100)]
    file = workbook(tmp_path / "oil.xlsx", {"Oils": [*rows, ["Total", "", "", 5000]]})
    inspection = inspect_valid(file)
    assert inspection.tables[0].totals == [102]
    assert "skip_rows" not in inspection.config["source"]
    assert any("look like totals, but a pattern would also match data" in warning for warning in inspection.warnings)
    result = run_proposal(file, inspection, tmp_path)
    assert (len(result.facts), result.manifest.bad_rows) == (100, 1)


def test_files_of_an_archive_are_tables(tmp_path: Path) -> None:
    """I17: each file of an archive is a table; other files are skipped."""
    file = tmp_path / "cities.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for city in ("moscow", "kazan"):
            lines = [f"{n};item {n};{n}.5;{n % 3}\n" for n in range(1, 50)]
            archive.writestr(f"{city}.csv", "sku;name;price;qty\n" + "".join(lines))
        archive.writestr("readme.txt", "Hello, this is a price list.\nThanks.\n")
    inspection = inspect_valid(file)
    assert inspection.config["source"]["sheets"] == {"skip": ["readme"]}
    assert inspection.config["key"] == ["category_key", "sku"]
    assert len(run_proposal(file, inspection, tmp_path).facts) == 98
