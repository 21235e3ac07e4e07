"""The process that reads one workbook: it is told what on standard input, and sends columns of texts back.

It imports as little as it can: it starts once for every workbook.
"""

import resource
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, time
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec
import python_calamine as calamine

from penstock.ingest.extract.tables import HEAD, rows_of

_OWN_LIMIT = "Cell limit exceeded"  # the reader's, for files that say in one word that a cell comes a million times


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_AS, (order["memory"], order["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        for message in _messages(order):
            _send(message)
    except (calamine.CalamineError, ValueError, OSError) as error:
        said = str(error) or type(error).__name__
        _send({"too_large" if _OWN_LIMIT in said else "failed": said})
    except BaseException as error:
        # The reader is not Python's: where it gives up on a file, it does so with an error of its own.
        if type(error).__name__ != "PanicException":
            raise
        _send({"failed": f"it breaks its reader: {error}"})
    sys.stdout.buffer.flush()


def _messages(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    workbook = calamine.CalamineWorkbook.from_path(order["path"])
    only, skip = order["only"], order["skip"]
    if missing := [name for name in only or [] if name not in workbook.sheet_names]:
        raise ValueError(f"it has no sheet {missing[0]!r}, but {', '.join(workbook.sheet_names)}")
    for number, known in enumerate(workbook.sheets_metadata, start=1):
        is_sheet = known.typ == calamine.SheetTypeEnum.WorkSheet
        is_wanted = known.name in only if only is not None else known.visible == calamine.SheetVisibleEnum.Visible
        if is_sheet and is_wanted and known.name not in skip:
            sheet = workbook.get_sheet_by_name(known.name)
            # Programs add empty sheets by themselves; only one that is asked for has to hold something.
            if sheet.start is not None or only is not None:
                yield {"sheet": known.name, "number": number}
                yield from _batches(sheet, order["batch"])


def _batches(sheet: calamine.CalamineSheet, size: int) -> Iterator[dict[str, Any]]:
    if sheet.start is None:
        return
    before = sheet.start[1]
    size = min(size, max(HEAD, rows_of(before + sheet.width)))  # a header is looked for in the first batch
    rows: list[Sequence[Any]] = []
    first_row = 1
    for row in sheet.iter_rows():
        rows.append(row)
        if len(rows) == size:
            yield {"first_row": first_row, **_columns(rows, before)}
            first_row += size
            rows = []
    if rows:
        yield {"first_row": first_row, **_columns(rows, before)}


def _columns(rows: list[Sequence[Any]], before: int) -> dict[str, Any]:
    """The texts of all columns; and, by their columns, the rows whose texts were numbers and look like 1.234."""
    columns = [[""] * len(rows)] * before
    figures: dict[str, list[int]] = {}
    # A call per cell costs as much as all the rest: most cells are texts, and most others numbers.
    for cells in zip(*rows, strict=True):
        if set(map(type, cells)) == {str}:
            columns.append(list(cells))
            continue
        texts = [
            cell if cell.__class__ is str else _number(cell) if cell.__class__ is float else _text(cell)
            for cell in cells
        ]
        if found := [n for n, text in enumerate(texts) if text[-4:-3] == "." and cells[n].__class__ is float]:
            figures[str(len(columns))] = found
        columns.append(texts)
    return {"columns": columns, "figures": figures}


def _number(value: float) -> str:
    """Fifteen digits are what a spreadsheet keeps; beyond them is the noise of its arithmetic."""
    short = f"{value:.15g}"
    return format(Decimal(short), "f") if "e" in short else short


@lru_cache(10_000, typed=True)
def _text(cell: Any) -> str:
    """What a person would read in the cell, in a form no locale can change."""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, datetime):
        return str(cell.date()) if cell.time() == time.min else cell.isoformat(timespec="seconds")
    return str(cell)


def _send(message: dict[str, Any]) -> None:
    packed = msgspec.msgpack.encode(message)
    sys.stdout.buffer.write(len(packed).to_bytes(4))
    sys.stdout.buffer.write(packed)


if __name__ == "__main__":
    main()
