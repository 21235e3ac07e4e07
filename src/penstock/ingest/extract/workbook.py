"""Workbooks, read by a process of their own: whatever a file makes the reader do, only that process pays for it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import IO, TYPE_CHECKING, Any

import msgspec
import polars as pl

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract.archives import ArchiveMember, unreadable
from penstock.ingest.extract.tables import BATCH, FIGURES, HEAD, RowBatch, SourceTable
from penstock.ingest.model import RunFailed

if TYPE_CHECKING:
    from penstock.ingest.supplier import SheetSelection, SupplierLimits, SupplierSource

_CHILD = "penstock.ingest.extract.workbook_child"
Message = dict[str, Any]


def tables(member: ArchiveMember, source: "SupplierSource", limits: "SupplierLimits") -> Iterator[SourceTable]:
    """Every sheet that counts and holds anything, in the order of the workbook."""
    if member.path is None:
        raise unreadable(member.name, "a workbook has to be a file")
    with _reading(member.path, source.sheets, limits, member.name) as messages:
        message = next(messages, None)
        if message is None:
            said = f"{member.name} has no sheet that holds anything"
            raise RunFailed(FailureCode.FILE_EMPTY, said, "hidden sheets count when source.sheets.only names them")
        while message is not None:
            begun = _Sheet(messages)
            number = message["number"]
            name = message["sheet"] if source.sheets.category == "name" else f"sheet{number}"
            # Workbooks of one archive have sheets of the same names.
            category = f"{member.category} / {name}" if member.category else name
            yield SourceTable(category, number, begun.head(), begun.batches(), file=member.name)
            message = begun.next_sheet()


class _Sheet:
    """The rows of one sheet, as they come."""

    def __init__(self, messages: Iterator[Message]) -> None:
        self._messages = messages
        self._first = self._take()
        self._next: Message | None = None

    def head(self) -> list[list[str]]:
        columns = self._first["columns"] if self._first else []
        return [list(row) for row in zip(*(column[:HEAD] for column in columns), strict=True)]

    def batches(self) -> Iterator[RowBatch]:
        message = self._first
        while message is not None:
            columns = message["columns"]
            frame = pl.DataFrame({str(n): pl.Series(cells, dtype=pl.String) for n, cells in enumerate(columns)})
            figures = {
                FIGURES + n: pl.repeat(False, frame.height, dtype=pl.Boolean, eager=True).scatter(rows, True)
                for n, rows in message["figures"].items()
            }
            yield RowBatch(frame.with_columns(**figures), message["first_row"])
            message = self._take()

    def next_sheet(self) -> Message | None:
        """What begins behind this sheet; what nobody read of it is passed over."""
        while self._next is None and self._take() is not None:
            pass
        return self._next

    def _take(self) -> Message | None:
        message = next(self._messages, None)
        if message is None or "columns" in message:
            return message
        self._next = message
        return None


@contextmanager
def _reading(path: Path, sheets: "SheetSelection", limits: "SupplierLimits", name: str) -> Iterator[Iterator[Message]]:
    wanted = {"path": str(path), "only": sheets.only, "skip": sheets.skip}
    order = msgspec.json.encode({**wanted, "memory": limits.workbook_memory, "batch": BATCH})
    child = subprocess.Popen(
        [sys.executable, "-I", "-m", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    timer = Timer(limits.workbook_seconds, child.kill)
    timer.daemon = True
    timer.start()
    try:
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("a pipe was asked for")
        with suppress(BrokenPipeError):  # it died already, which is told when nothing comes back
            child.stdin.write(order)
            child.stdin.close()
        yield _messages(child, child.stdout, name, limits)
    finally:
        timer.cancel()
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _messages(
    child: "subprocess.Popen[bytes]", out: IO[bytes], name: str, limits: "SupplierLimits"
) -> Iterator[Message]:
    decode = msgspec.msgpack.Decoder(dict[str, Any]).decode
    while length := out.read(4):
        packed = out.read(int.from_bytes(length))
        if len(packed) < int.from_bytes(length):
            break  # it was ended amid a word
        message = decode(packed)
        if "failed" in message:
            raise unreadable(name, message["failed"])
        if "too_large" in message:
            raise _too_large(name, message["too_large"])
        yield message
    if child.wait() != 0:
        cost = f"{limits.workbook_memory // 1_000_000} MB or {limits.workbook_seconds} s"
        raise _too_large(name, f"it takes more than {cost} to be read, or breaks its reader")


def _too_large(name: str, why: str) -> RunFailed:
    hint = "if the workbook is right, raise limits.workbook_memory or limits.workbook_seconds"
    return RunFailed(FailureCode.FILE_TOO_LARGE, f"{name} is too large: {why}", hint)
