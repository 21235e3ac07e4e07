"""Tables of texts in batches of bounded size: the common result of reading every format."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import polars as pl


HEAD = 200  # rows that are searched for the header
BATCH = 20_000
CELLS = 1 << 19  # of a batch: a small file can have many rows and many columns
COLUMNS = 16_384  # of the widest possible workbook
_TEXT = 1 << 25  # characters of the rows in memory
_CELL = 32  # memory of a cell, in addition to its text
MALFORMED = "\x00malformed"  # the column that contains lines that are not records
NUMERIC = "\x00numeric "  # prefix of columns that flag ambiguous texts, such as 1.234, that are numbers in the file
Row = TypeVar("Row")


@dataclass(frozen=True)
class RowBatch:
    """Rows of texts in columns named "0", "1" ….  *first_row* is the number of the first row, from 1.

    In a numeric cell such as 12.345 the point is the decimal separator; a column with the prefix NUMERIC flags it.
    """

    frame: "pl.DataFrame"
    first_row: int


@dataclass
class SourceTable:
    """A sheet or a whole file: its first rows, which contain the header, and all rows in batches."""

    name: str
    number: int
    head: list[list[str]]
    batches: Iterator[RowBatch]
    is_delimited: bool = False  # cells beyond the header mean that the row is damaged
    names: list[str] | None = None  # of records, which have names instead of a header
    absent: frozenset[str] = frozenset()  # names that none of the first records has
    file: str = "the file"


class ReadProgress:
    """The share of a file that was read so far, by the position of its reader."""

    def __init__(self, size: int) -> None:
        self._size = max(size, 1)
        self._content: IO[bytes] | None = None

    def follow(self, content: IO[bytes]) -> IO[bytes]:
        """Return *content*, and report its position from now on."""
        self._content = content
        return content

    @property
    def fraction(self) -> float | None:
        """The share from 0 to 1; None if it is unknown."""
        if self._content is None:
            return None
        return 1.0 if self._content.closed else min(self._content.tell() / self._size, 1.0)


def count_batch_rows(width: int) -> int:
    """Return the number of rows of *width* cells in a batch."""
    return max(1, min(BATCH, CELLS // max(width, 1)))


def gather_batches(rows: Iterator[Row], limit: int, cells: Callable[[Row], Collection[str]]) -> Iterator[list[Row]]:
    """Yield batches of *limit* rows, or of fewer rows if they contain much text."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        texts = cells(row)
        size += sum(map(len, texts)) + _CELL * len(texts)
        if len(batch) >= limit or size >= _TEXT:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
