"""Tests of the type of a column."""

from typing import Any

import polars as pl
import pytest

from penstock.ingest.inspect.cells import CellTexts
from penstock.ingest.inspect.formats import PIECES
from penstock.ingest.inspect.types import ColumnContext, guess_type
from penstock.ingest.inspect.vocabulary import ColumnHint


@pytest.mark.parametrize(
    ("texts", "hint", "options"),
    [
        (["1 234,50 руб.", "12,30 руб."], ColumnHint.MONEY, {"type": "money"}),
        (["$12.30", "$1,234.50"], ColumnHint.NONE, {"type": "money"}),
        (["1,234", "12.50"], ColumnHint.MONEY, {"type": "money", "decimal": "."}),
        (["1.234", "12,50"], ColumnHint.MONEY, {"type": "money", "decimal": ","}),
        (["10.333333", "1.5"], ColumnHint.MONEY, {"type": "money", "round": True}),
        (["5", ">10", "больше 30", "10+"], ColumnHint.NONE, {"type": "integer", "at_least": True}),
        (["5 шт.", "17 шт"], ColumnHint.NONE, {"type": "integer", "replace": {f"{PIECES}$": ""}}),
        (["5", "-", "7"], ColumnHint.QUANTITY, {"type": "integer", "empty": ["-"]}),
        (["есть", "нет"], ColumnHint.QUANTITY, {"type": "enum", "values": {"есть": True, "нет": False}}),
        (["да", "нет", "Да"], ColumnHint.NONE, {"type": "enum", "values": {"да": True, "нет": False}}),
        (["007", "12"], ColumnHint.NONE, {"type": "string"}),
        (["4607001234567", "4607001234568"], ColumnHint.NONE, {"type": "string"}),
        (["12", "AB-3", "45"], ColumnHint.NONE, {"type": "string"}),
        ([*(str(n) for n in range(1, 60)), "A-61"], ColumnHint.NONE, {"type": "string"}),
        (["5", "7.5", "10"], ColumnHint.NONE, {"type": "decimal", "scale": 2}),
        (["12", "45"], ColumnHint.CODE, {"type": "string"}),
        (["12", "45"], ColumnHint.NONE, {"type": "integer"}),
        (["1,5", "2,25"], ColumnHint.NONE, {"type": "decimal", "scale": 2}),
        (["1,125", "2,5"], ColumnHint.MEASURE, {"type": "decimal", "decimal": ",", "scale": 3}),
        (["14.02.2026", "1.3.2026"], ColumnHint.NONE, {"type": "date", "formats": ["%d.%m.%Y"]}),
        (["2026-02-14", "2026-03-01"], ColumnHint.NONE, {"type": "date"}),
        (["02/14/2026", "03/01/2026"], ColumnHint.NONE, {"type": "date", "formats": ["%m/%d/%Y"]}),
        (["14/02/2026", "03/01/2026"], ColumnHint.NONE, {"type": "date", "formats": ["%d/%m/%Y"]}),
        (["20260214"], ColumnHint.MOMENT, {"type": "date", "formats": ["%Y%m%d"]}),
        (["14.02.2026 10:30"], ColumnHint.NONE, {"type": "datetime", "formats": ["%d.%m.%Y %H:%M"]}),
        (["зима", "лето"] * 60, ColumnHint.NONE, {"type": "enum", "values": ["зима", "лето"]}),
        (["Nokian", "Кама"] * 60, ColumnHint.GROUP, {"type": "string"}),
        (["Длинный текст о товаре", "И ещё один"], ColumnHint.NONE, {"type": "string"}),
        (["10", "20", "звоните"] * 5, ColumnHint.MONEY, {"type": "money", "empty": ["звоните"]}),
    ],
)  # fmt: skip
def test_the_type_depends_on_the_cells(texts: list[str], hint: ColumnHint, options: dict[str, Any]) -> None:
    """I18: the type is the one that reads the cells, with the options that it needs."""
    found = guess_type(CellTexts(pl.Series(texts)), ColumnContext(hint, is_english=False)).options
    assert found == options
