"""Tests of forty sheets with random spellings, positions and orders of the headers."""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import xlsxwriter  # type: ignore[import-untyped]

from penstock.ingest.contract import IngestRunStatus
from tests.ingest.inspect.proposals import columns, inspect_valid, run_proposal

_SPELLINGS = {
    "sku": ("Артикул", "Арт.", "Код", "Код товара", "Vendor code"),
    "name": ("Наименование", "Название", "Номенклатура", "Товар", "Наименование\nтовара"),
    "price_minor": ("Цена", "Цена, руб.", "Цена руб", "Стоимость", "Цена (с НДС)"),
    "qty": ("Остаток", "Кол-во", "Наличие", "Количество, шт", "Остаток на складе"),
    "brand": ("Бренд", "Производитель"),
    "moshchnost_vt": ("Мощность, Вт",),
    "aktsiya": ("Акция",),
}
_ABOVE: tuple[list[Any], ...] = (
    ["ООО «Электро»"],
    ["Тел.: +7 (495) 123-45-67", "", "E-mail: a@b.ru"],
    ["Прайс-лист от 14.02.2026"],
    [],
    ["Курс USD", "92,5"],
    ["Внимание! Цены с НДС. Доставка по Москве бесплатно при заказе от 10 000 руб. Условия уточняйте у менеджера."],
)
_STOCK = ((5, 5), (">10", 10), ("есть", 1), ("нет", 0), ("10+", 10), ("более 50", 50), ("-", None), ("", None))


@dataclass
class _Made:
    """The rows of the sheets, and their facts."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    sections: int = 0


def _workbook(path: Path, random: Random) -> _Made:
    made = _Made()
    book = xlsxwriter.Workbook(path)
    for number in range(40):
        rows = _sheet(number, random, made)
        sheet = book.add_worksheet(f"Раздел {number}")
        aside = random.choice((0, 0, 1))
        for row, cells in enumerate(rows):
            sheet.write_row(row, aside, [None if cell == "" else cell for cell in cells])
    book.close()
    return made


def _sheet(number: int, random: Random, made: _Made) -> list[list[Any]]:
    optional = random.sample(["brand", "moshchnost_vt", "aktsiya"], random.randint(0, 3))
    names = ["sku", "name", "price_minor", "qty", *optional]
    random.shuffle(names)
    names = ["№", *names] if number % 4 == 0 else names
    rows: list[list[Any]] = list(random.sample(_ABOVE, random.randint(0, len(_ABOVE) - 1)))
    rows.append([random.choice(_SPELLINGS.get(name, (name,))) for name in names])
    for row in range(random.randint(5, 40)):
        if number % 2 and row % 20 == 10:
            rows.append([f"Группа {number}-{row}"])
            made.sections += 1
        shown, fact = _product(number, row, random)
        rows.append([shown[name] for name in names])
        made.facts[fact["sku"]] = {name: fact[name] if name in names else None for name in fact}
    return [*rows, ["Итого:", "", "", 123]] if number % 3 == 0 else rows


def _product(number: int, row: int, random: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    price = random.randrange(100, 9_999_999)
    stock, known = random.choice(_STOCK)
    watts = random.choice((5, 7.5, 10))
    fact = {
        "sku": f"{number:02}{row:04}" if row % 3 else f"EL-{number}-{row}", "name": f"Лампа {number}/{row}",
        "price_minor": price, "qty": known, "brand": random.choice(("A", "B")), "moshchnost_vt": f"{watts:.2f}",
        "aktsiya": random.random() < 0.5,
    }  # fmt: skip
    money = random.choice((price / 100, f"{price // 100},{price % 100:02}", f"{price // 100},{price % 100:02} р."))
    shown = {"№": row + 1, "price_minor": money, "qty": stock, "moshchnost_vt": watts}
    return {**fact, **shown, "aktsiya": "да" if fact["aktsiya"] else "нет"}, fact


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_varied_sheets_become_a_single_configuration(seed: int, tmp_path: Path) -> None:
    """I17, I18: the proposal reads every row of every sheet; only sections become bad rows, with a warning."""
    file = tmp_path / "varied.xlsx"
    made = _workbook(file, Random(seed))
    inspection = inspect_valid(file)
    assert set(columns(inspection)) == set(_SPELLINGS)
    assert "sheets" not in inspection.config["source"]
    assert inspection.config["key"] == ["sku"]
    result = run_proposal(file, inspection, tmp_path)
    assert result.manifest.status is IngestRunStatus.PASS
    assert result.by("sku") == made.facts
    assert any("rows with a single cell" in warning for warning in inspection.warnings)
    assert result.manifest.bad_rows in (0, made.sections)
