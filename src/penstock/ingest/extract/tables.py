"""Tables of texts, in batches of bounded size: what every format is read into."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import polars as pl


HEAD = 200  # rows in which a header is looked for
BATCH = 20_000
CELLS = 1 << 19  # of a batch: a file of few bytes can have many rows and many columns
COLUMNS = 16_384  # what the widest workbook has
_TEXT = 1 << 25  # characters of rows that are held at once
_CELL = 32  # what a cell costs, however little is in it
MALFORMED = "\x00malformed"  # the column in which a line that is no record says so
FIGURES = "\x00figures "  # and a column's name: where its texts were numbers and could be taken for others
Row = TypeVar("Row")


@dataclass(frozen=True)
class RowBatch:
    """Some rows, every cell a text; columns are called "0", "1" …. *first_row* is the first one's number, from 1.

    A number of a file, 12.345, has no mark of thousands, whatever its supplier's texts have: `FIGURES` tells where.
    """

    frame: "pl.DataFrame"
    first_row: int


@dataclass
class SourceTable:
    """A sheet, or a whole file: its first rows to find the header in, and then all of them."""

    name: str
    number: int
    head: list[list[str]]
    batches: Iterator[RowBatch]
    is_delimited: bool = False  # cells beyond the header mean that a row is torn
    names: list[str] | None = None  # records name their cells themselves; then there is no header
    absent: frozenset[str] = frozenset()  # those of the names that none of the first records has
    file: str = "the file"


class BatchSizer:
    """How much of a file was read, by where its reader stands."""

    def __init__(self, size: int) -> None:
        self._size = max(size, 1)
        self._content: IO[bytes] | None = None

    def follow(self, content: IO[bytes]) -> IO[bytes]:
        self._content = content
        return content

    @property
    def fraction(self) -> float | None:
        """None when nobody can tell."""
        if self._content is None:
            return None
        return 1.0 if self._content.closed else min(self._content.tell() / self._size, 1.0)


def rows_of(width: int) -> int:
    """How many rows of *width* cells make a batch."""
    return max(1, min(BATCH, CELLS // max(width, 1)))


def gathered(rows: Iterator[Row], most: int, cells: Callable[[Row], Collection[str]]) -> Iterator[list[Row]]:
    """*most* rows at a time, or fewer when there is much in them."""
    batch: list[Row] = []
    held = 0
    for row in rows:
        batch.append(row)
        texts = cells(row)
        held += sum(map(len, texts)) + _CELL * len(texts)
        if len(batch) >= most or held >= _TEXT:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
