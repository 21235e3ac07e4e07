"""Names and types, column by column."""

from penstock.ingest.inspect.fields import fields_of
from penstock.ingest.inspect.vocabulary import snake


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
