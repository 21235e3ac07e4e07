"""Price lists as suppliers send them, the same for the same number of rows: what every ingest is measured on.

The CSV and the workbook of as many rows contain the same items, so that both give the same facts.
"""

import asyncio
import sys
from collections.abc import Iterator
from datetime import date, timedelta
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers import ingest_env
from benchmarks.programs import run_program

HEADER = ("sku", "name", "brand", "qty", "price", "date")
BRANDS = ("Nokian", "Michelin", "Cordiant", "Yokohama", "Pirelli")
NO_PRICE = "call us"
MANY = ">10"
DAYS = tuple(date(2025, 1, 1) + timedelta(days=number) for number in range(700))
CHUNK = 20_000

# Knuth's multiplier spreads neighbouring numbers: a seed is not needed, and nothing differs from run to run.
_SPREAD = 2654435761
_LEAST, _MOST = 9_000, 2_500_000  # minor units: some prices have thousands, some have not


class Good(NamedTuple):
    """A row of a price list before a format makes text or cells of it; *minor* None is a bad row."""

    sku: str
    name: str
    brand: str
    qty: int | None  # None: more than ten
    minor: int | None
    day: int  # in DAYS


def goods(rows: int) -> Iterator[Good]:
    """The first *rows* goods of the one list there is."""
    for number in range(rows):
        brand = BRANDS[number % 5]
        spread = (number * _SPREAD) & 0xFFFFFFFF
        yield Good(
            f"{brand[:3].upper()}-{number:08d}",
            _name(number, brand),
            brand,
            None if number % 7 == 0 else spread % 40,
            None if number % 1000 == 999 else _LEAST + spread % _MOST,
            spread % 700,
        )


async def write_csv(path: Path, rows: int) -> None:
    """Write a semicolon-separated list in UTF-8 of about 70 bytes a row, with what makes a CSV hard."""
    days = [day.strftime("%d.%m.%Y") for day in DAYS]
    lines = (_line(good, days[good.day]) for good in goods(rows))
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(";".join(HEADER) + "\n")
        while chunk := "".join(islice(lines, CHUNK)):
            file.write(chunk)
            await asyncio.sleep(0)  # a run can be interrupted here: a large list takes minutes


async def write_xlsx(path: Path, rows: int, sheets: int) -> None:
    """Write the same goods into a workbook of *sheets* sheets, numbers as numbers and dates as dates."""
    await run_program(sys.executable, "-I", ingest_env.WORKBOOK, str(path), str(rows), str(sheets))


def _name(number: int, brand: str) -> str:
    size = f"{number % 20 * 5 + 155}/65 R{number % 6 + 13}"
    if number % 50 == 0:
        return f'Tyre "{brand}"; winter {size}'
    if number % 10 == 3:
        return f"Шина {brand} {size}"
    return f"Tyre {brand} {size} " if number % 40 == 7 else f"Tyre {brand} {size}"  # a blank to be trimmed


def _line(good: Good, day: str) -> str:
    sku, name, brand, qty, minor, _ = good
    if '"' in name:
        quotes = name.replace('"', '""')
        name = f'"{quotes}"'
    return f"{sku};{name};{brand};{MANY if qty is None else qty};{_price(minor)};{day}\n"


def _price(minor: int | None) -> str:
    if minor is None:
        return NO_PRICE
    whole = f"{minor // 100:,}".replace(",", " ")
    return f"{whole},{minor % 100:02d}"
