"""Names and types, column by column."""

from typing import Any

import polars as pl
import pytest

from penstock.ingest.inspect.cells import Cells
from penstock.ingest.inspect.fields import fields_of
from penstock.ingest.inspect.formats import PIECES
from penstock.ingest.inspect.headers import header_of
from penstock.ingest.inspect.types import Known, guess
from penstock.ingest.inspect.vocabulary import Hint, meaning_of, snake


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("Артикул", "sku"), ("Код товара", "sku"), ("SKU", "sku"), ("vendorCode", "sku"), ("Article No.", "sku"),
        ("Наименование", "name"), ("Номенклатура", "name"), ("Product Name", "name"), ("Бренд", "brand"),
        ("Производитель", "brand"), ("Остаток", "qty"), ("Кол-во", "qty"), ("Наличие", "qty"), ("Stock", "qty"),
        ("Цена", "price"), ("Стоимость, руб.", "price"), ("Цена розничная", "retail_price"), ("РРЦ", "retail_price"),
        ("Опт", "wholesale_price"), ("Цена / опт", "wholesale_price"), ("Категория", "category"),
        ("Группа", "category"),
        ("Штрих-код", "barcode"), ("EAN13", "barcode"), ("Ед. изм.", "unit"), ("Валюта", "currency"), ("Дата", "date"),
        ("Вес, кг", "weight"), ("№ п/п", "number"), ("Шипы", "shipy"), ("Ёмкость АКБ", "emkost_akb"),
        ("price.currency", "currency"), ("№ 1", "n1"), ("!!!", "column"),
    ],
)  # fmt: skip
def test_usual_words_have_usual_names(header: str, name: str) -> None:
    """I17: words everybody uses get the names everybody uses; others are written in Latin letters."""
    assert meaning_of(header).name == name


def test_fields_never_share_a_name() -> None:
    """I17: names are unique, and headers merge only when no table has both."""
    fields, _ = fields_of(
        [["Артикул", "Код", "Артикул производителя"], ["Код товара", "Склад / Омск", "Склад / Тверь"]]
    )
    assert {field.name: field.spellings for field in fields} == {
        "sku": ["Артикул", "Код товара"], "code": ["Код"], "sku_proizvoditelya": ["Артикул производителя"],
        "qty_omsk": ["Склад / Омск"], "qty_tver": ["Склад / Тверь"],
    }  # fmt: skip
    fields, told = fields_of([["Цена, USD", "Цена, RUB", "Цена 1", "Остаток на 14.02.2026"]])
    assert [field.name for field in fields] == ["price_usd", "price_rub", "price_1", "qty"]
    assert fields[-1].places == [4]
    assert told == ["the header 'Остаток на 14.02.2026' has a date in it and will change: it is known by its number, 4"]
    assert snake("Щётка, 5 мм") == "shchetka_5_mm"


@pytest.mark.parametrize(
    ("texts", "hint", "options"),
    [
        (["1 234,50 руб.", "12,30 руб."], Hint.MONEY, {"type": "money"}),
        (["$12.30", "$1,234.50"], Hint.NONE, {"type": "money"}),
        (["1,234", "12.50"], Hint.MONEY, {"type": "money", "decimal": "."}),
        (["1.234", "12,50"], Hint.MONEY, {"type": "money", "decimal": ","}),
        (["10.333333", "1.5"], Hint.MONEY, {"type": "money", "round": True}),
        (["5", ">10", "больше 30", "10+"], Hint.NONE, {"type": "integer", "at_least": True}),
        (["5 шт.", "17 шт"], Hint.NONE, {"type": "integer", "replace": {f"{PIECES}$": ""}}),
        (["5", "-", "7"], Hint.QUANTITY, {"type": "integer", "empty": ["-"]}),
        (["есть", "нет"], Hint.QUANTITY, {"type": "enum", "values": {"есть": True, "нет": False}}),
        (["да", "нет", "Да"], Hint.NONE, {"type": "enum", "values": {"да": True, "нет": False}}),
        (["007", "12"], Hint.NONE, {"type": "string"}),
        (["4607001234567", "4607001234568"], Hint.NONE, {"type": "string"}),
        (["12", "AB-3", "45"], Hint.NONE, {"type": "string"}),
        ([*(str(n) for n in range(1, 60)), "A-61"], Hint.NONE, {"type": "string"}),
        (["5", "7.5", "10"], Hint.NONE, {"type": "decimal", "scale": 2}),
        (["12", "45"], Hint.CODE, {"type": "string"}),
        (["12", "45"], Hint.NONE, {"type": "integer"}),
        (["1,5", "2,25"], Hint.NONE, {"type": "decimal", "scale": 2}),
        (["1,125", "2,5"], Hint.MEASURE, {"type": "decimal", "decimal": ",", "scale": 3}),
        (["14.02.2026", "1.3.2026"], Hint.NONE, {"type": "date", "formats": ["%d.%m.%Y"]}),
        (["2026-02-14", "2026-03-01"], Hint.NONE, {"type": "date"}),
        (["02/14/2026", "03/01/2026"], Hint.NONE, {"type": "date", "formats": ["%m/%d/%Y"]}),
        (["14/02/2026", "03/01/2026"], Hint.NONE, {"type": "date", "formats": ["%d/%m/%Y"]}),
        (["20260214"], Hint.MOMENT, {"type": "date", "formats": ["%Y%m%d"]}),
        (["14.02.2026 10:30"], Hint.NONE, {"type": "datetime", "formats": ["%d.%m.%Y %H:%M"]}),
        (["зима", "лето"] * 60, Hint.NONE, {"type": "enum", "values": ["зима", "лето"]}),
        (["Nokian", "Кама"] * 60, Hint.GROUP, {"type": "string"}),
        (["Длинный текст о товаре", "И ещё один"], Hint.NONE, {"type": "string"}),
        (["10", "20", "звоните"] * 5, Hint.MONEY, {"type": "money", "empty": ["звоните"]}),
    ],
)  # fmt: skip
def test_cells_tell_their_type(texts: list[str], hint: Hint, options: dict[str, Any]) -> None:
    """I18: the type is what reads the cells, with the options it needs."""
    found = guess(Cells(pl.Series(texts)), Known(hint, is_english=False)).options
    assert found == options


def test_a_header_is_found_among_much_else() -> None:
    """I17: neither addresses nor data are taken for a header."""
    head = [["ООО Ромашка", "", "", ""], ["Тел.", "+7 495 1234567", "", ""], ["", "", "", ""]]
    data = [[f"A-{n}", f"Товар {n}", f"{n},50", str(n)] for n in range(20)]
    header = header_of([*head, ["Артикул", "Название", "Цена", "Шт"], *data])
    assert header is not None
    assert header.numbers == [4]
    assert header_of(data) is None
    # What stands right above a header does not belong to it, unless it tells columns apart.
    shifted = [["Тел.: 1", "", "Почта: a@b.ru", "", ""], ["", "Артикул", "Название", "Цена", "Шт"]]
    found = header_of([*shifted, *(["", *row] for row in data)])
    assert found is not None
    assert found.numbers == [2]
    grouped = [["Товар", "", "Цена", "", "Остаток", ""], ["Артикул", "Название", "Омск", "Тверь", "Омск", "Тверь"]]
    found = header_of([*grouped, *([*row, row[3], row[3]] for row in data)])
    assert found is not None
    assert found.names[2:] == ["Цена / Омск", "Цена / Тверь", "Остаток / Омск", "Остаток / Тверь"]
