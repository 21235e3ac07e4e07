"""Tests of the vocabulary of headers."""

import pytest

from penstock.ingest.inspect.vocabulary import find_meaning


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
def test_common_words_have_common_names(header: str, name: str) -> None:
    """I17: common words get common field names; other words are transliterated."""
    assert find_meaning(header).name == name
