"""The child process that reads a workbook: standard input is the request, standard output are columns of texts.

It starts for every workbook, so it imports as little as possible.
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

from penstock.ingest.extract.tables import HEAD, count_batch_rows

_CELL_LIMIT = "Cell limit exceeded"  # raised by the reader, for small files that repeat a cell millions of times


def main() -> None:
    """Read the workbook that the request names, and send its sheets."""
    request = msgspec.json.decode(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        for message in _read_sheets(request):
            _send_message(message)
    except (calamine.CalamineError, ValueError, OSError) as error:
        reason = str(error) or type(error).__name__
        _send_message({"too_large" if _CELL_LIMIT in reason else "failed": reason})
    except BaseException as error:
        # The reader is written in Rust: its panic is not a subclass of Exception.
        if type(error).__name__ != "PanicException":
            raise
        _send_message({"failed": f"it crashes the reader: {error}"})
    sys.stdout.buffer.flush()


def _read_sheets(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    workbook = calamine.CalamineWorkbook.from_path(request["path"])
    only, skip = request["only"], request["skip"]
    if missing := [name for name in only or [] if name not in workbook.sheet_names]:
        sheets = ", ".join(map(repr, workbook.sheet_names))
        raise ValueError(f"it has no sheet {missing[0]!r}, which `source.sheets.only` names; its sheets are {sheets}")
    for number, entry in enumerate(workbook.sheets_metadata, start=1):
        is_sheet = entry.typ == calamine.SheetTypeEnum.WorkSheet
        is_wanted = entry.name in only if only is not None else entry.visible == calamine.SheetVisibleEnum.Visible
        if is_sheet and is_wanted and entry.name not in skip:
            sheet = workbook.get_sheet_by_name(entry.name)
            # Programs add empty sheets, which are skipped unless the configuration names them.
            if sheet.start is not None or only is not None:
                yield {"sheet": entry.name, "number": number}
                yield from _read_batches(sheet, request["batch"])


def _read_batches(sheet: calamine.CalamineSheet, size: int) -> Iterator[dict[str, Any]]:
    if sheet.start is None:
        return
    before = sheet.start[1]
    size = min(size, max(HEAD, count_batch_rows(before + sheet.width)))  # the first batch must contain the header
    rows: list[Sequence[Any]] = []
    first_row = 1
    for row in sheet.iter_rows():
        rows.append(row)
        if len(rows) == size:
            yield {"first_row": first_row, **_collect_columns(rows, before)}
            first_row += size
            rows = []
    if rows:
        yield {"first_row": first_row, **_collect_columns(rows, before)}


def _collect_columns(rows: list[Sequence[Any]], before: int) -> dict[str, Any]:
    """Return the texts of all columns; and for each column the rows with numeric cells that look like 1.234."""
    columns = [[""] * len(rows)] * before
    numeric: dict[str, list[int]] = {}
    # A call per cell would double the cost. Most cells are texts, and most others are numbers.
    for cells in zip(*rows, strict=True):
        if set(map(type, cells)) == {str}:
            columns.append(list(cells))
            continue
        texts = [
            cell if cell.__class__ is str else _format_number(cell) if cell.__class__ is float else _format_cell(cell)
            for cell in cells
        ]
        if ambiguous := [n for n, text in enumerate(texts) if text[-4:-3] == "." and cells[n].__class__ is float]:
            numeric[str(len(columns))] = ambiguous
        columns.append(texts)
    return {"columns": columns, "numeric": numeric}


def _format_number(value: float) -> str:
    """Format a number with the fifteen digits of a spreadsheet, without the rounding errors of binary arithmetic."""
    short = f"{value:.15g}"
    return format(Decimal(short), "f") if "e" in short else short


@lru_cache(10_000, typed=True)
def _format_cell(cell: Any) -> str:
    """Format a cell as a person reads it, independent of the locale."""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, datetime):
        return str(cell.date()) if cell.time() == time.min else cell.isoformat(timespec="seconds")
    return str(cell)


def _send_message(message: dict[str, Any]) -> None:
    packed = msgspec.msgpack.encode(message)
    sys.stdout.buffer.write(len(packed).to_bytes(4))
    sys.stdout.buffer.write(packed)


if __name__ == "__main__":
    main()
