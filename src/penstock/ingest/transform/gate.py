"""§7, §16, the Gate: checks that a file is not empty, finds its header, and binds fields to columns."""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import CATEGORY, Supplier, SupplierColumn

if TYPE_CHECKING:
    from penstock.ingest.extract.tables import SourceTable

JOINED = " / "
_SPACES = re.compile(r"\s+")
_HEADER_HINT = "set the row of the header in `source.header`, or `none` if there is no header"
_NUMBER = re.compile(r"[\d\s.,%+-]*")


@dataclass(frozen=True)
class BoundColumn:
    """A field of the payload and its column; the index is None if the table lacks the column, so the field is empty."""

    name: str
    column: SupplierColumn
    index: int | None


@dataclass(frozen=True)
class TableHeader:
    """The header of a table: the number of rows up to the data, the names of the columns, and the bound fields."""

    rows: int
    names: list[str]
    fields: list[BoundColumn]

    @property
    def width(self) -> int:
        return len(self.names)


def check_size(name: str, size: int) -> None:
    """Raise RunFailed FILE_EMPTY if the file *name* has no bytes."""
    if size == 0:
        raise RunFailed(FailureCode.FILE_EMPTY, f"{name} is empty", "ask the supplier to send the file again")


def bind_columns(table: "SourceTable", supplier: Supplier) -> TableHeader:
    """Return the header of *table* with the fields of the payload; RunFailed COLUMNS_MISSING or HEADER_MISMATCH."""
    rows, names = _locate_header(table, supplier)
    if supplier.columns:
        fields = [
            BoundColumn(name, column, _find_column(table, names, column)) for name, column in supplier.columns.items()
        ]
    else:
        numbered = _name_columns(names)
        fields = [BoundColumn(name, SupplierColumn.model_validate({"from": n}), n - 1) for n, name in numbered]
    if not fields:
        raise RunFailed(FailureCode.HEADER_MISMATCH, f"{_describe_table(table)} has no columns", _HEADER_HINT)
    _check_missing(table, names, fields, supplier)
    if all(field.index is None or (table.absent and names[field.index] in table.absent) for field in fields):
        # Without any of the mapped columns it is a different file, even if no column is required.
        message = (
            f"{_describe_table(table)} has none of the mapped columns; its columns are {_list_names(table, names)}"
        )
        hint = "check that it is the right file; if so, name its headers in `columns`"
        raise RunFailed(FailureCode.HEADER_MISMATCH, message, hint)
    if supplier.source.exact:
        _check_extra(table, names, fields)
    return TableHeader(rows, names, fields)


def normalize_name(name: str) -> str:
    """Return *name* in the form in which names are compared, independent of case and blanks."""
    return _SPACES.sub(" ", name.replace("\u00a0", " ")).strip().casefold()


def join_header_rows(rows: list[list[str]]) -> list[str]:
    """Join the rows of a header into names; an empty cell of an upper row has the text of the cell to its left."""
    width = max((len(row) for row in rows), default=0)
    padded = [[_SPACES.sub(" ", cell).strip() for cell in row] + [""] * (width - len(row)) for row in rows]
    for above, below in pairwise(padded):
        for column in range(1, width):
            if not above[column] and below[column]:
                above[column] = above[column - 1]
    names = [list(dict.fromkeys(cell for cell in cells if cell)) for cells in zip(*padded, strict=True)]
    return [JOINED.join(cells) for cells in names]


def score_header_row(row: list[str]) -> int:
    """Return the number of cells that could be names; 0 if some look like data."""
    cells = [cell for cell in row if cell.strip()]
    if len(cells) < 2 or any(_NUMBER.fullmatch(cell) for cell in cells) or len(set(cells)) < len(cells) * 0.8:
        return 0
    return len(cells)


def _locate_header(table: "SourceTable", supplier: Supplier) -> tuple[int, list[str]]:
    """Return the number of rows above the data, and the names of the columns."""
    source = supplier.source
    if table.names is not None:
        return 0, table.names
    if source.header == "none":
        width = max((len(row) for row in table.head), default=0)
        return 0, [str(number) for number in range(1, width + 1)]
    row = source.header if isinstance(source.header, int) else _find_header_row(table.head, supplier)
    names = join_header_rows(table.head[row - 1 : row - 1 + source.header_rows])
    if not any(names):
        raise RunFailed(
            FailureCode.HEADER_MISMATCH, f"{_describe_table(table)} has no header in row {row}", _HEADER_HINT
        )
    while names and not names[-1]:
        names.pop()
    return row - 1 + source.header_rows, names


def _find_header_row(head: list[list[str]], supplier: Supplier) -> int:
    """Return the number of the row with the most mapped names; without names, of the row most similar to a header."""
    mapped = [
        [normalize_name(reference) for reference in column.references if isinstance(reference, str)]
        for column in supplier.columns.values()
    ]

    def score(row: int) -> int:
        if not any(mapped):
            return score_header_row(head[row])
        names = {normalize_name(name) for name in join_header_rows(head[row : row + supplier.source.header_rows])}
        return sum(any(reference in names for reference in references) for references in mapped)

    best, most = 0, 0
    for row in range(len(head)):
        if (points := score(row)) > most:
            best, most = row, points
        if mapped and most == len(mapped):
            break
    return best + 1


def _name_columns(names: list[str]) -> list[tuple[int, str]]:
    """Return the number and the name of each unmapped column; a repeated name gets a number."""
    columns: dict[str, int] = {}
    last_numbers: dict[str, int] = {}  # avoids a quadratic search if a thousand columns share a name
    for column, name in enumerate(names, start=1):
        if not name:
            continue
        free = name
        while free in columns:
            last_numbers[name] = last_numbers.get(name, 1) + 1
            free = f"{name}_{last_numbers[name]}"
        columns[free] = column
    return [(column, name) for name, column in columns.items()]


def _find_column(table: "SourceTable", names: list[str], column: SupplierColumn) -> int | None:
    if table.names is not None:
        # Later records may have names that the first records lack, so an absent name is the last choice.
        references = [str(reference) for reference in column.references if str(reference) in names]
        references.sort(key=lambda reference: reference in table.absent)
        return names.index(references[0]) if references else None
    compared = [normalize_name(name) for name in names]
    for reference in column.references:
        if isinstance(reference, int):
            return reference - 1
        if compared.count(normalize_name(reference)) > 1:
            numbers = [
                str(number) for number, name in enumerate(compared, start=1) if name == normalize_name(reference)
            ]
            message = f"{_describe_table(table)} has several columns {reference!r}: {', '.join(numbers)}"
            hint = f"select one by its number, e.g. `from: {numbers[0]}`"
            raise RunFailed(FailureCode.HEADER_MISMATCH, message, hint)
        if normalize_name(reference) in compared:
            return compared.index(normalize_name(reference))
    return None


def _check_missing(table: "SourceTable", names: list[str], fields: list[BoundColumn], supplier: Supplier) -> None:
    names_of_fields = {field.name for field in fields}
    if missing := [name for name in supplier.key if name not in names_of_fields and name != CATEGORY]:
        raise _make_missing_error(table, names, missing)
    width = max([len(names), *(len(row) for row in table.head)], default=0)
    needed = [field for field in fields if field.column.required or field.name in supplier.key]
    missing = [
        f"{field.name} ({' or '.join(repr(reference) for reference in field.column.references)})"
        for field in needed
        if field.index is None or field.index >= width or (table.absent and names[field.index] in table.absent)
    ]
    if missing:
        raise _make_missing_error(table, names, missing)


def _list_names(table: "SourceTable", names: list[str]) -> str:
    return ", ".join(repr(name) for name in names if name and name not in table.absent)[:500] or "none"


def _make_missing_error(table: "SourceTable", names: list[str], missing: list[str]) -> RunFailed:
    columns = _list_names(table, names)
    message = f"{_describe_table(table)} has no column {', '.join(missing)}; its columns are {columns}"
    hint = "if the supplier renamed it, list both headers: `from: [old, new]`"
    if table.name:
        hint += f"; to skip the sheet, add {table.name!r} to `source.sheets.skip`"
    return RunFailed(FailureCode.COLUMNS_MISSING, message, hint)


def _check_extra(table: "SourceTable", names: list[str], fields: list[BoundColumn]) -> None:
    mapped = {field.index for field in fields}
    if extra := [name for index, name in enumerate(names) if name and index not in mapped]:
        message = f"{_describe_table(table)} has columns that are not mapped: {', '.join(map(repr, extra))}"
        raise RunFailed(FailureCode.HEADER_MISMATCH, message, "map them in `columns`, or remove `source.exact`")


def _describe_table(table: "SourceTable") -> str:
    return f"{table.file}, sheet {table.name!r}," if table.name else table.file
