"""A tyre price list of forty sheets with different layouts, and its expected facts."""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import xlsxwriter  # type: ignore[import-untyped]

CITIES = ("Москва", "Санкт-Петербург", "Казань")
_BRANDS = ("Nokian", "Michelin", "Кама", "Cordiant", "Pirelli", "Yokohama")
_SPELLINGS = {
    "sku": ("Артикул", "Код товара", "артикул", "Артикул "),
    "name": ("Наименование", "Номенклатура", "Наименование товара"),
    "brand": ("Бренд", "Производитель", "Марка"),
    "season": ("Сезон",),
    "weight": ("Вес, кг", "Вес (кг)"),
    "studs": ("Шипы",),
    "barcode": ("Штрихкод", "Штрих-код"),
}
_TALL = tuple(_SPELLINGS)


@dataclass
class Truth:
    """The facts of the workbook by category and SKU, and the categories without facts."""

    facts: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    odd: set[tuple[str, str]] = field(default_factory=set)


def tyre_workbook(path: Path, sheets: int = 39, rows: int = 25) -> Truth:
    """Write a workbook with *sheets* sheets of data and a table of contents."""
    random = Random(7)
    truth = Truth()
    workbook = xlsxwriter.Workbook(path)
    contents = workbook.add_worksheet("Содержание")
    contents.write(0, 0, "Прайс-лист ООО «Шинный двор»")
    names = [f"Шины R{13 + number % 10} №{number}" for number in range(1, sheets + 1)]
    for number, name in enumerate(names):
        contents.write(number + 2, 1, name)
    for number, name in enumerate(names):
        _sheet(workbook, name, _Layout(number, random), rows, truth)
    workbook.close()
    return truth


class _Layout:
    """The layout of a sheet."""

    def __init__(self, number: int, random: Random) -> None:
        self.number = number
        self.random = random
        self.order = list(_TALL)
        if number % 3 == 1:
            self.order[2], self.order[3] = self.order[3], self.order[2]
        if number % 5 == 2:
            self.order.remove("weight")
        if number % 4 == 3:
            self.order.remove("barcode")
        self.cities = CITIES[: 3 if number % 7 else 2]
        self.top = 5 + number % 6

    def header(self, name: str) -> str:
        spellings = _SPELLINGS[name]
        return spellings[self.number % len(spellings)]


def _sheet(workbook: Any, name: str, layout: _Layout, rows: int, truth: Truth) -> None:
    sheet = workbook.add_worksheet(name)
    _preamble(sheet, layout)
    _header(sheet, layout)
    total = 0
    for row in range(rows):
        cells, fact = _product(layout, row)
        total += fact["qty_moskva"] or 0
        for column, cell in enumerate(cells):
            if cell is not None:
                sheet.write(layout.top + 2 + row, column, cell)
        truth.facts[name, fact["sku"]] = fact
        if cells[len(layout.order)] == "звоните":
            truth.odd.add((name, fact["sku"]))
    end = layout.top + 2 + rows
    sheet.write(end, 0, "Итого:" if layout.number % 2 else "Всего по складу")
    sheet.write(end, len(layout.order) + 2, total)


def _preamble(sheet: Any, layout: _Layout) -> None:
    sheet.write(0, 0, "ООО «Шинный двор»")
    sheet.write(1, 0, "г. Москва, ул. Складская, д. 5")
    sheet.write(1, 4, "тел. +7 (495) 123-45-67")
    if layout.number % 2:
        sheet.write(2, 2, f"Прайс-лист от {1 + layout.number % 28:02}.02.2026")


def _header(sheet: Any, layout: _Layout) -> None:
    top, price = layout.top, len(layout.order)
    for column, name in enumerate(layout.order):
        sheet.merge_range(top, column, top + 1, column, layout.header(name))
    sheet.merge_range(top, price, top, price + 1, "Цена")
    sheet.write(top + 1, price, "опт")
    sheet.write(top + 1, price + 1, "розница")
    stock = price + 2
    sheet.merge_range(top, stock, top, stock + len(layout.cities) - 1, "Склад")
    for column, city in enumerate(layout.cities):
        sheet.write(top + 1, stock + column, city)


def _product(layout: _Layout, row: int) -> tuple[list[Any], dict[str, Any]]:
    random = layout.random
    brand = random.choice(_BRANDS)
    wholesale = random.randrange(200_000, 2_000_000, 50)
    fact: dict[str, Any] = {
        "sku": f"{layout.number:02}{row:04}" if row % 2 else f"T{layout.number:02}-{row:04}",
        "name": f"{brand} Hakka {random.choice((165, 185, 205))}/65 R{13 + layout.number % 10} {row}",
        "brand": brand,
        "season": random.choice(("зима", "лето", "всесезон")),
        "weight": f"{random.randrange(600, 1900) / 100:.2f}",
        "studs": random.random() < 0.5,
        "barcode": f"46{random.randrange(10**11):011}",
        "wholesale_price_minor": wholesale,
        "retail_price_minor": wholesale * 2,
    }
    cells: dict[str, Any] = {**fact, "weight": float(fact["weight"]), "studs": "да" if fact["studs"] else "нет"}
    priced = [wholesale / 100, _rubles(wholesale * 2)]
    if row == 3 and layout.number % 13 == 0:
        priced = ["звоните", _rubles(wholesale * 2)]
    stock = [_stock(random) for _ in layout.cities]
    for city, (_, known) in zip(("moskva", "sankt_peterburg", "kazan"), [*stock, (None, None)][:3], strict=False):
        fact[f"qty_{city}"] = known
    fact.setdefault("qty_kazan", None)
    for name in ("weight", "barcode"):
        fact[name] = fact[name] if name in layout.order else None
    return [*(cells[name] for name in layout.order), *priced, *(shown for shown, _ in stock)], fact


def _rubles(minor: int) -> str:
    return f"{minor // 100:,}".replace(",", "\u00a0") + f",{minor % 100:02} руб."


def _stock(random: Random) -> tuple[Any, int | None]:
    number = random.randrange(60)
    if number > 50:
        return f">{number}", number
    if number > 40:
        return f"больше {number}", number
    return ("-", None) if number < 5 else (number, number)
