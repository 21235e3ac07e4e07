"""Where a table begins: the rows of its header among what stands above it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from penstock.ingest.inspect.vocabulary import meaning_of
from penstock.ingest.transform.gate import join_header_rows

_WITHIN = 60  # rows in which a header is looked for
_DEEPEST = 3
_DATA = 30  # rows below that show what the columns hold
_LONGEST_NAME = 80
_LESS_FOR_MORE_ROWS = 0.98
_VALUE = re.compile(
    r"[^\w]*\d[\d\s.,:/%+'’-]*(?:(?:руб|р|шт|тг|кг|г|мм|см|rub|usd|eur|pcs|₽|€|\$)\.?)?|true|false", re.IGNORECASE
)
_DIGIT = re.compile(r"\d")
_GROUPS = re.compile(r"цен|склад|остат|налич|товар|price|stock|размер|характерист|отгруз|доставк", re.IGNORECASE)


class Cell(Enum):
    """What a cell looks like."""

    BLANK = 0
    WORD = 1
    CODE = 2
    VALUE = 3


@dataclass(frozen=True)
class HeaderRows:
    """The header of a table: how many rows are above it, how many it has, and the names they make."""

    above: int
    depth: int
    names: list[str]

    @property
    def end(self) -> int:
        return self.above + self.depth

    @property
    def numbers(self) -> list[int]:
        return list(range(self.above + 1, self.end + 1))


def header_of(head: list[list[str]]) -> HeaderRows | None:
    """The header that explains the rows below it best; None when none does."""
    grid = _Grid(head)
    best, best_score = None, 0.0
    for found in grid.candidates():
        score = grid.score(found)
        if score > best_score:
            best, best_score = found, score
    return best


def cell_kind(cell: str) -> Cell:
    text = cell.strip()
    if not text.strip("-–—"):
        return Cell.BLANK
    if _VALUE.fullmatch(text):
        return Cell.VALUE
    return Cell.CODE if _DIGIT.search(text) and " " not in text else Cell.WORD


class _Grid:
    """The beginning of a table, and what each cell of it looks like."""

    def __init__(self, head: list[list[str]]) -> None:
        self._head = head[: _WITHIN + _DATA]
        self._kinds = [[cell_kind(cell) for cell in row] for row in self._head]
        self._width = max((len(row) for row in self._head), default=0)

    def candidates(self) -> Iterator[HeaderRows]:
        for row in range(min(len(self._head), _WITHIN)):
            if not self._could_name(row):
                continue
            for depth in range(1, _DEEPEST + 1):
                if depth > 1 and not self._continues(row, row + depth - 1):
                    break
                yield HeaderRows(row, depth, join_header_rows(self._head[row : row + depth]))

    def score(self, header: HeaderRows) -> float:
        """How much of the data below *header* it names, and how well; 0 when it could as well be data itself."""
        named = {column for column, name in enumerate(header.names) if name}
        known = sum(meaning_of(header.names[column]).is_known for column in named)
        data = self._data(header.end)
        used = {column for column in range(self._width) if _share(data, column, Cell.BLANK) <= 0.7}
        if not used:
            return known / 10 if known > 1 and known * 2 >= len(named) else 0.0
        contrast = sum(self._contrasts(header, column, data) for column in named & used)
        coverage = len(named & used) / len(used)
        different = len({header.names[column] for column in named}) / len(named)
        if coverage < 0.5 or different < 0.6 or not (known or contrast):
            return 0.0
        # A row that only numbers the columns is no data; any other has to add something to belong to the header.
        is_counted = header.depth > 1 and _counts(self._head[header.end - 1])
        weight = 1.5 if is_counted else _LESS_FOR_MORE_ROWS ** (header.depth - 1)
        return weight * coverage * different * (len(named & used) + 3 * known + 2 * contrast)

    def _could_name(self, row: int) -> bool:
        kinds = [kind for kind in self._kinds[row] if kind is not Cell.BLANK]
        is_wide = len(kinds) >= min(2, self._width)
        values = sum(kind is Cell.VALUE for kind in kinds)
        codes = sum(kind is Cell.CODE for kind in kinds)
        return is_wide and values <= len(kinds) * 0.3 and codes <= len(kinds) * 0.6 and self._is_short(row)

    def _is_short(self, row: int) -> bool:
        return all(len(cell) <= _LONGEST_NAME for cell in self._head[row])

    def _continues(self, top: int, row: int) -> bool:
        """Whether *row* says more of the columns that the rows from *top* on have begun to name."""
        if row >= len(self._head):
            return False
        if _counts(self._head[row]):
            return True
        above = self._filled(top, row)
        here = self._filled(row, row + 1)
        kinds = [kind for kind in self._kinds[row] if kind is not Cell.BLANK]
        is_wordy = all(kind is not Cell.VALUE for kind in kinds) and self._is_short(row)
        hangs = bool(above - here) or all(_GROUPS.search(cell) for cell in self._head[top] if cell.strip())
        return is_wordy and hangs and bool(here - above) and len(here) >= 2

    def _filled(self, begin: int, end: int) -> set[int]:
        return {column for row in self._head[begin:end] for column, cell in enumerate(row) if cell.strip()}

    def _data(self, begin: int) -> list[list[Cell]]:
        """The fullest of the next rows: sections and notes tell nothing of the columns."""
        rows = [row for row in self._kinds[begin : begin + _DATA] if any(kind is not Cell.BLANK for kind in row)]
        fullest = max((_filled_in(row) for row in rows), default=0)
        return [row for row in rows if _filled_in(row) * 2 >= fullest]

    def _contrasts(self, header: HeaderRows, column: int, data: list[list[Cell]]) -> bool:
        """Whether a word stands over what is none."""
        words = cell_kind(header.names[column]) is Cell.WORD
        filled = 1 - _share(data, column, Cell.BLANK)
        values = _share(data, column, Cell.VALUE) + _share(data, column, Cell.CODE)
        return words and filled > 0 and values >= filled * 0.7


def _counts(row: list[str]) -> bool:
    """Whether *row* only numbers the columns: 1, 2, 3 …."""
    cells = [cell.strip() for cell in row if cell.strip()]
    return len(cells) >= 3 and cells == [str(number) for number in range(1, len(cells) + 1)]


def _filled_in(row: list[Cell]) -> int:
    return sum(kind is not Cell.BLANK for kind in row)


def _share(data: list[list[Cell]], column: int, kind: Cell) -> float:
    found = sum((row[column] if column < len(row) else Cell.BLANK) is kind for row in data)
    return found / len(data) if data else 1.0
