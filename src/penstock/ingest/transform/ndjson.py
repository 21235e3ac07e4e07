"""facts.ndjson and bad.ndjson: written line by line with their hash, and read back in pieces."""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import orjson
import polars as pl

from penstock.ingest.model import Artifact

PIECE = 4 << 20
_PART = 4_096  # lines
_NOWHERE = "\x01"  # JSON has no such character, so nothing is cut there


class Lines:
    """A file of lines under way; what it is in the end is told by `artifact`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._out = path.open("xb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self._size = 0

    def add(self, lines: pl.Series) -> None:
        """A part at a time: what is copied stays small."""
        for begun in range(0, len(lines), _PART):
            self.write(_text(lines.slice(begun, _PART)))
            self.write(b"\n")

    def write(self, text: bytes) -> None:
        """Whole lines."""
        self._digest.update(text)
        self._out.write(text)
        self._size += len(text)

    def flush(self) -> None:
        self._out.flush()

    def close(self) -> None:
        self._out.close()

    @property
    def artifact(self) -> Artifact:
        return Artifact(self._digest.hexdigest(), self._size)


def text_of(lines: pl.Series) -> bytes:
    """All of *lines* as they stand in a file, each ended."""
    return _text(lines) + b"\n" if len(lines) else b""


def _text(lines: pl.Series) -> bytes:
    text: bytes = lines.str.join("\n").cast(pl.Binary).item()
    return text


def lines_of(content: IO[bytes]) -> Iterator[pl.Series]:
    """The lines of a file, some thousands at a time."""
    left = b""
    while piece := content.read(PIECE):
        text = left + piece
        cut = text.rfind(b"\n") + 1
        left = text[cut:]
        if cut:
            yield _lines(text[:cut])
    if left:
        yield _lines(left)


def _lines(text: bytes) -> pl.Series:
    frame = pl.read_csv(
        io.BytesIO(text), has_header=False, separator=_NOWHERE, quote_char=None, schema={"line": pl.String}
    )
    return frame["line"]


def at(content: BinaryIO, positions: pl.Series) -> Iterator[tuple[pl.Series, pl.Series]]:
    """The lines at *positions*, which are sorted, and their positions, some thousands at a time."""
    begun = 0
    for lines in lines_of(content):
        wanted = positions.filter((positions >= begun) & (positions < begun + len(lines)))
        if len(wanted):
            yield lines.gather(wanted - begun), wanted
        begun += len(lines)


def digest_of(content: BinaryIO) -> Artifact:
    """The hash and size of all that is left in *content*."""
    digest, size = hashlib.sha256(), 0
    while piece := content.read(1 << 20):
        digest.update(piece)
        size += len(piece)
    return Artifact(digest.hexdigest(), size)


def small(data: object) -> bytes:
    """A small JSON file, for programs and for people."""
    return orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n"


def document(content: bytes | None) -> dict[str, Any]:
    """What a small JSON file tells; nothing when it is not there or makes no sense."""
    try:
        told = orjson.loads(content or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return told if isinstance(told, dict) else {}
