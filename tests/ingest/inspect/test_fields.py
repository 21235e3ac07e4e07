"""Tests of the names of fields."""

from penstock.ingest.inspect.fields import build_fields
from penstock.ingest.inspect.vocabulary import to_snake_case


def test_field_names_are_unique() -> None:
    """I17: field names are unique, and headers are merged only if no table has both."""
    fields, _ = build_fields(
        [["Артикул", "Код", "Артикул производителя"], ["Код товара", "Склад / Омск", "Склад / Тверь"]]
    )
    assert {field.name: field.spellings for field in fields} == {
        "sku": ["Артикул", "Код товара"], "code": ["Код"], "sku_proizvoditelya": ["Артикул производителя"],
        "qty_omsk": ["Склад / Омск"], "qty_tver": ["Склад / Тверь"],
    }  # fmt: skip
    fields, warnings = build_fields([["Цена, USD", "Цена, RUB", "Цена 1", "Остаток на 14.02.2026"]])
    assert [field.name for field in fields] == ["price_usd", "price_rub", "price_1", "qty"]
    assert fields[-1].references == [4]
    assert warnings == [
        "the header 'Остаток на 14.02.2026' contains a date and will change: column 4 is read by its number"
    ]
    assert to_snake_case("Щётка, 5 мм") == "shchetka_5_mm"
