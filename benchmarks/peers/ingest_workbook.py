"""Write a workbook of `benchmarks.ingest_data`; run as a program, so that a benchmark can be interrupted meanwhile."""

import sys
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import xlsxwriter  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ingest_data import DAYS, HEADER, MANY, NO_PRICE, goods

# Above this, strings go into the cells instead of a table of shared ones, which would have to fit into memory.
SHARED_STRINGS = 300_000


def main() -> None:
    path, rows, sheets = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    book = xlsxwriter.Workbook(str(path), {"constant_memory": rows > SHARED_STRINGS})
    book.set_properties({"created": datetime(2026, 1, 1, tzinfo=UTC)})  # the same bytes every time
    dated = book.add_format({"num_format": "dd.mm.yyyy"})
    listed = goods(rows)
    for number in range(sheets):
        sheet = book.add_worksheet(f"Sheet {number + 1}")
        sheet.write_row(0, 0, HEADER)
        share = rows // sheets + (number < rows % sheets)
        for row, good in enumerate(islice(listed, share), start=1):
            sheet.write_string(row, 0, good.sku)
            sheet.write_string(row, 1, good.name)
            sheet.write_string(row, 2, good.brand)
            sheet.write(row, 3, MANY if good.qty is None else good.qty)
            sheet.write(row, 4, NO_PRICE if good.minor is None else good.minor / 100)
            sheet.write_datetime(row, 5, DAYS[good.day], dated)
    book.close()


if __name__ == "__main__":
    main()
