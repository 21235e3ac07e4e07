"""§7, §16, the Gate: whether there is anything in a file, where its header is, and which column is which."""

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
_NUMBER = re.compile(r"[\d\s.,%+-]*")


@dataclass(frozen=True)
class BoundColumn:
    """A field of the payload, and the column it comes from; None: this table has none, and it is always empty."""

    name: str
    column: SupplierColumn
    index: int | None


@dataclass(frozen=True)
class TableHeader:
    """What is above the data, and what the columns below it are."""

    rows: int
    names: list[str]
    fields: list[BoundColumn]

    @property
    def width(self) -> int:
        return len(self.names)


def check_size(name: str, size: int) -> None:
    """Failed FILE_EMPTY when there is nothing to read."""
    if size == 0:
        raise RunFailed(FailureCode.FILE_EMPTY, f"{name} is empty", "ask the supplier to send it again")


def bind_columns(table: "SourceTable", supplier: Supplier) -> TableHeader:
    """Every field of the payload with its column; Failed COLUMNS_MISSING or HEADER_MISMATCH."""
    rows, names = _located(table, supplier)
    if supplier.columns:
        fields = [BoundColumn(name, column, _index(table, names, column)) for name, column in supplier.columns.items()]
    else:
        own = _own_names(names)
        fields = [BoundColumn(name, SupplierColumn.model_validate({"from": place}), place - 1) for place, name in own]
    if not fields:
        raise RunFailed(FailureCode.HEADER_MISMATCH, f"{_where(table)} has no columns", "map them: columns")
    _check_missing(table, names, fields, supplier)
    if all(field.index is None or (table.absent and names[field.index] in table.absent) for field in fields):
        # None of the columns is there: this is another file, whatever is required of it.
        said = f"{_where(table)} has none of the columns that are mapped; it has {_have(table, names)}"
        raise RunFailed(FailureCode.HEADER_MISMATCH, said, "is it the right file? if so, map its columns")
    if supplier.source.exact:
        _check_extra(table, names, fields)
    return TableHeader(rows, names, fields)


def normalize_name(name: str) -> str:
    """How names are compared: whatever the case and the blanks."""
    return _SPACES.sub(" ", name.replace("\u00a0", " ")).strip().casefold()


def join_header_rows(rows: list[list[str]]) -> list[str]:
    """The names a header of several rows gives: a cell above stands for those right of it that have none."""
    width = max((len(row) for row in rows), default=0)
    padded = [[_SPACES.sub(" ", cell).strip() for cell in row] + [""] * (width - len(row)) for row in rows]
    for above, below in pairwise(padded):
        for column in range(1, width):
            if not above[column] and below[column]:
                above[column] = above[column - 1]
    names = [list(dict.fromkeys(cell for cell in cells if cell)) for cells in zip(*padded, strict=True)]
    return [JOINED.join(cells) for cells in names]


def looks_like_header(row: list[str]) -> int:
    """How many cells could be names; 0 when some look like data."""
    cells = [cell for cell in row if cell.strip()]
    if len(cells) < 2 or any(_NUMBER.fullmatch(cell) for cell in cells) or len(set(cells)) < len(cells) * 0.8:
        return 0
    return len(cells)


def _located(table: "SourceTable", supplier: Supplier) -> tuple[int, list[str]]:
    """How many rows are above the data, and the names of the columns."""
    source = supplier.source
    if table.names is not None:
        return 0, table.names
    if source.header == "none":
        width = max((len(row) for row in table.head), default=0)
        return 0, [str(number) for number in range(1, width + 1)]
    row = source.header if isinstance(source.header, int) else _found(table.head, supplier)
    names = join_header_rows(table.head[row - 1 : row - 1 + source.header_rows])
    if not any(names):
        said = f"{_where(table)} has no header in row {row}"
        raise RunFailed(FailureCode.HEADER_MISMATCH, said, "say where: source.header")
    while names and not names[-1]:
        names.pop()
    return row - 1 + source.header_rows, names


def _found(head: list[list[str]], supplier: Supplier) -> int:
    """The first row that has the most of the names that are asked for, else the one that looks most like a header."""
    asked = [
        [normalize_name(place) for place in column.places if isinstance(place, str)]
        for column in supplier.columns.values()
    ]

    def score(row: int) -> int:
        if not any(asked):
            return looks_like_header(head[row])
        names = {normalize_name(name) for name in join_header_rows(head[row : row + supplier.source.header_rows])}
        return sum(any(place in names for place in places) for places in asked)

    best, most = 0, 0
    for row in range(len(head)):
        if (found := score(row)) > most:
            best, most = row, found
        if asked and most == len(asked):
            break
    return best + 1


def _own_names(names: list[str]) -> list[tuple[int, str]]:
    """Without a mapping each column is a field under its own name; the second of a name gets a number."""
    found: dict[str, int] = {}
    numbers: dict[str, int] = {}  # the last one of each name: a thousand columns may share it
    for place, name in enumerate(names, start=1):
        if not name:
            continue
        free = name
        while free in found:
            numbers[name] = numbers.get(name, 1) + 1
            free = f"{name}_{numbers[name]}"
        found[free] = place
    return [(place, name) for name, place in found.items()]


def _index(table: "SourceTable", names: list[str], column: SupplierColumn) -> int | None:
    if table.names is not None:
        # Records may have anything later on: a name the first ones lack is looked for in all of them.
        places = [str(place) for place in column.places if str(place) in names]
        places.sort(key=lambda place: place in table.absent)
        return names.index(places[0]) if places else None
    compared = [normalize_name(name) for name in names]
    for place in column.places:
        if isinstance(place, int):
            return place - 1
        if compared.count(normalize_name(place)) > 1:
            said = f"{_where(table)} has more than one column {place!r}"
            raise RunFailed(FailureCode.HEADER_MISMATCH, said, "say which by its number: `from: 3`")
        if normalize_name(place) in compared:
            return compared.index(normalize_name(place))
    return None


def _check_missing(table: "SourceTable", names: list[str], fields: list[BoundColumn], supplier: Supplier) -> None:
    known = {field.name for field in fields}
    if lost := [name for name in supplier.key if name not in known and name != CATEGORY]:
        raise _missing(table, names, lost)
    width = max([len(names), *(len(row) for row in table.head)], default=0)
    needed = [one for one in fields if one.column.required or one.name in supplier.key]
    lost = [
        f"{one.name} ({' or '.join(repr(place) for place in one.column.places)})"
        for one in needed
        if one.index is None or one.index >= width or (table.absent and names[one.index] in table.absent)
    ]
    if lost:
        raise _missing(table, names, lost)


def _have(table: "SourceTable", names: list[str]) -> str:
    return ", ".join(repr(name) for name in names if name and name not in table.absent)[:500] or "none"


def _missing(table: "SourceTable", names: list[str], lost: list[str]) -> RunFailed:
    have = _have(table, names)
    said = f"{_where(table)} has no column {', '.join(lost)}; it has {have}"
    hint = "has the supplier renamed it? list its spellings: `from: [old, new]`; skip a sheet with source.sheets.skip"
    return RunFailed(FailureCode.COLUMNS_MISSING, said, hint)


def _check_extra(table: "SourceTable", names: list[str], fields: list[BoundColumn]) -> None:
    mapped = {field.index for field in fields}
    if extra := [name for index, name in enumerate(names) if name and index not in mapped]:
        said = f"{_where(table)} has columns nobody expects: {', '.join(map(repr, extra))}"
        raise RunFailed(FailureCode.HEADER_MISMATCH, said, "map them, or leave out source.exact")


def _where(table: "SourceTable") -> str:
    return f"{table.file}, sheet {table.name!r}," if table.name else table.file
