"""Makes the two suppliers' files anew: a good workbook, and a CSV with far too many bad rows.

Run it with `python examples/demo/make_files.py`; the same files come of it each time.
"""

import random
from datetime import datetime
from pathlib import Path

import xlsxwriter  # type: ignore[import-untyped]

HERE = Path(__file__).parent / "files"
SEASONS = ("Лето", "Зима", "Всесезонные")
ROWS = 120  # of each sheet
WIDTHS, RIMS = (185, 195, 205, 215, 225), (15, 16, 17, 18)
MADE_AT = datetime(2026, 11, 17, 6, 30)  # noqa: DTZ001 - what a workbook keeps has no zone


def main() -> None:
    make_workbook(HERE / "azimut.xlsx", random.Random(11))
    make_csv(HERE / "polaris.csv", random.Random(17))


def make_workbook(path: Path, chance: random.Random) -> None:
    with xlsxwriter.Workbook(path) as book:
        book.set_properties({"created": MADE_AT})
        for season in SEASONS:
            sheet = book.add_worksheet(season)
            sheet.write_row(0, 0, ["Azimut Tyres: прайс-лист на 17.11.2026"])
            sheet.write_row(2, 0, ["Артикул", "Наименование", "Остаток", "Цена, руб."])
            for number in range(ROWS):
                sheet.write_row(3 + number, 0, tyre(season, number, chance))
            sheet.write_row(3 + ROWS, 0, ["Итого", "", ROWS])


def tyre(season: str, number: int, chance: random.Random) -> list[str | int]:
    name = f"Azimut {chance.choice(WIDTHS)}/{chance.choice((55, 60, 65))} R{chance.choice(RIMS)} {season}"
    stocks: list[str | int] = [">20", "больше 20", chance.randrange(20)]
    stock = chance.choice(stocks)
    rubles = f"{chance.randrange(4_000, 18_000):,}".replace(",", " ")
    return [f"AZ-{SEASONS.index(season)}{number:03d}", name, stock, f"{rubles},{chance.randrange(100):02d}"]


def make_csv(path: Path, chance: random.Random) -> None:
    lines = ["Код;Товар;Наличие;Цена"]
    for number in range(40):
        price = f"{chance.randrange(1_000, 9_000)},{chance.randrange(100):02d}"
        stock = str(chance.randrange(50))
        # What went wrong in the supplier's export: a code lost, stock in words, prices by request.
        code = f"PL-{number}"
        spoilt = {0: ("", stock, price), 1: (code, "уточняйте", price), 2: (code, stock, "по запросу")}
        code, stock, price = spoilt.get(number % 5, (code, stock, price))
        lines.append(f"{code};Фильтр {number};{stock};{price}")
    path.write_bytes("\r\n".join([*lines, ""]).encode("windows-1251"))


if __name__ == "__main__":
    main()
