"""The header of a table: its rows are searched among titles and notes above the data."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from penstock.ingest.inspect.vocabulary import find_meaning
from penstock.ingest.transform.gate import join_header_rows

_SEARCHED_ROWS = 60  # rows that are searched for the header
_MAX_DEPTH = 3
_DATA_ROWS = 30  # rows below the header that show the content of the columns
_LONGEST_NAME = 80
_ROW_PENALTY = 0.98
_VALUE = re.compile(
    r"[^\w]*\d[\d\s.,:/%+'’-]*(?:(?:руб|р|шт|тг|кг|г|мм|см|rub|usd|eur|pcs|₽|€|\$)\.?)?|true|false", re.IGNORECASE
)
_DIGIT = re.compile(r"\d")
_GROUP_WORDS = re.compile(r"цен|склад|остат|налич|товар|price|stock|размер|характерист|отгруз|доставк", re.IGNORECASE)


class Cell(Enum):
    """The kind of a cell by its text."""

    BLANK = 0
    WORD = 1
    CODE = 2
    VALUE = 3


@dataclass(frozen=True)
class HeaderRows:
    """The header of a table: the number of rows above it, the number of its rows, and the joined names."""

    above: int
    depth: int
    names: list[str]

    @property
    def end(self) -> int:
        return self.above + self.depth

    @property
    def numbers(self) -> list[int]:
        return list(range(self.above + 1, self.end + 1))


def find_header(head: list[list[str]]) -> HeaderRows | None:
    """Return the header that fits the rows below it best; None if none fits."""
    grid = _Grid(head)
    best, best_score = None, 0.0
    for header in grid.iterate_candidates():
        score = grid.score(header)
        if score > best_score:
            best, best_score = header, score
    return best


def classify_cell(cell: str) -> Cell:
    text = cell.strip()
    if not text.strip("-–—"):
        return Cell.BLANK
    if _VALUE.fullmatch(text):
        return Cell.VALUE
    return Cell.CODE if _DIGIT.search(text) and " " not in text else Cell.WORD


class _Grid:
    """The first rows of a table, and the kind of each cell."""

    def __init__(self, head: list[list[str]]) -> None:
        self._head = head[: _SEARCHED_ROWS + _DATA_ROWS]
        self._kinds = [[classify_cell(cell) for cell in row] for row in self._head]
        self._width = max((len(row) for row in self._head), default=0)

    def iterate_candidates(self) -> Iterator[HeaderRows]:
        for row in range(min(len(self._head), _SEARCHED_ROWS)):
            if not self._may_be_header(row):
                continue
            for depth in range(1, _MAX_DEPTH + 1):
                if depth > 1 and not self._may_continue(row, row + depth - 1):
                    break
                yield HeaderRows(row, depth, join_header_rows(self._head[row : row + depth]))

    def score(self, header: HeaderRows) -> float:
        """Return how well *header* names the data below it; 0 if it may be data itself."""
        named = {column for column, name in enumerate(header.names) if name}
        meaningful = sum(find_meaning(header.names[column]).is_known for column in named)
        data = self._select_data(header.end)
        used = {column for column in range(self._width) if _measure_share(data, column, Cell.BLANK) <= 0.7}
        if not used:
            return meaningful / 10 if meaningful > 1 and meaningful * 2 >= len(named) else 0.0
        contrast = sum(self._has_contrast(header, column, data) for column in named & used)
        coverage = len(named & used) / len(used)
        different = len({header.names[column] for column in named}) / len(named)
        if coverage < 0.5 or different < 0.6 or not (meaningful or contrast):
            return 0.0
        # A row that only numbers the columns belongs to the header; any other row must add names.
        is_counted = header.depth > 1 and _numbers_columns(self._head[header.end - 1])
        weight = 1.5 if is_counted else _ROW_PENALTY ** (header.depth - 1)
        return weight * coverage * different * (len(named & used) + 3 * meaningful + 2 * contrast)

    def _may_be_header(self, row: int) -> bool:
        kinds = [kind for kind in self._kinds[row] if kind is not Cell.BLANK]
        is_wide = len(kinds) >= min(2, self._width)
        values = sum(kind is Cell.VALUE for kind in kinds)
        codes = sum(kind is Cell.CODE for kind in kinds)
        return is_wide and values <= len(kinds) * 0.3 and codes <= len(kinds) * 0.6 and self._is_short(row)

    def _is_short(self, row: int) -> bool:
        return all(len(cell) <= _LONGEST_NAME for cell in self._head[row])

    def _may_continue(self, top: int, row: int) -> bool:
        """Return whether *row* adds names to the header that starts at row *top*."""
        if row >= len(self._head):
            return False
        if _numbers_columns(self._head[row]):
            return True
        above = self._find_filled_columns(top, row)
        here = self._find_filled_columns(row, row + 1)
        kinds = [kind for kind in self._kinds[row] if kind is not Cell.BLANK]
        is_wordy = all(kind is not Cell.VALUE for kind in kinds) and self._is_short(row)
        is_grouped = bool(above - here) or all(_GROUP_WORDS.search(cell) for cell in self._head[top] if cell.strip())
        return is_wordy and is_grouped and bool(here - above) and len(here) >= 2

    def _find_filled_columns(self, begin: int, end: int) -> set[int]:
        return {column for row in self._head[begin:end] for column, cell in enumerate(row) if cell.strip()}

    def _select_data(self, begin: int) -> list[list[Cell]]:
        """Return the rows below the header without sections and notes, which have few cells."""
        rows = [row for row in self._kinds[begin : begin + _DATA_ROWS] if any(kind is not Cell.BLANK for kind in row)]
        fullest = max((_count_filled(row) for row in rows), default=0)
        return [row for row in rows if _count_filled(row) * 2 >= fullest]

    def _has_contrast(self, header: HeaderRows, column: int, data: list[list[Cell]]) -> bool:
        """Return whether the header is a word and the data below it is not."""
        is_word = classify_cell(header.names[column]) is Cell.WORD
        filled = 1 - _measure_share(data, column, Cell.BLANK)
        values = _measure_share(data, column, Cell.VALUE) + _measure_share(data, column, Cell.CODE)
        return is_word and filled > 0 and values >= filled * 0.7


def _numbers_columns(row: list[str]) -> bool:
    """Return whether *row* only numbers the columns: 1, 2, 3 …."""
    cells = [cell.strip() for cell in row if cell.strip()]
    return len(cells) >= 3 and cells == [str(number) for number in range(1, len(cells) + 1)]


def _count_filled(row: list[Cell]) -> int:
    return sum(kind is not Cell.BLANK for kind in row)


def _measure_share(data: list[list[Cell]], column: int, kind: Cell) -> float:
    count = sum((row[column] if column < len(row) else Cell.BLANK) is kind for row in data)
    return count / len(data) if data else 1.0
