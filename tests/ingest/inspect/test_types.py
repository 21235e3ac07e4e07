"""The type of a column, from its cells."""

from typing import Any

import polars as pl
import pytest

from penstock.ingest.inspect.cells import Cells
from penstock.ingest.inspect.formats import PIECES
from penstock.ingest.inspect.types import Known, guess
from penstock.ingest.inspect.vocabulary import Hint


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
