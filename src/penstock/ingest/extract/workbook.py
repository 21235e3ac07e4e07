"""Workbooks, each read by a child process: a file that crashes or exhausts the reader affects only that process."""

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
from penstock.ingest.extract.archives import ArchiveMember, make_unreadable_error
from penstock.ingest.extract.tables import BATCH, HEAD, NUMERIC, RowBatch, SourceTable
from penstock.ingest.model import RunFailed

if TYPE_CHECKING:
    from penstock.ingest.supplier import SheetSelection, SupplierLimits, SupplierSource

_CHILD = "penstock.ingest.extract.workbook_child"
Message = dict[str, Any]


def open_sheets(member: ArchiveMember, source: "SupplierSource", limits: "SupplierLimits") -> Iterator[SourceTable]:
    """Yield every selected sheet that is not empty, in the order of the workbook."""
    if member.path is None:
        raise ValueError(f"{member.name} is a stream; a workbook is read from a file")
    with _start_child(member.path, source.sheets, limits, member.name) as messages:
        message = next(messages, None)
        if message is None:
            hint = "to read hidden sheets, name them in `source.sheets.only`"
            raise RunFailed(FailureCode.FILE_EMPTY, f"{member.name} has no visible sheet with data", hint)
        while message is not None:
            reader = _SheetReader(messages)
            number = message["number"]
            name = message["sheet"] if source.sheets.category == "name" else f"sheet{number}"
            # Several workbooks of an archive may have sheets with the same names.
            category = f"{member.category} / {name}" if member.category else name
            yield SourceTable(category, number, reader.read_head(), reader.read_batches(), file=member.name)
            message = reader.find_next_sheet()


class _SheetReader:
    """The rows of a sheet, in the order in which the child process sends them."""

    def __init__(self, messages: Iterator[Message]) -> None:
        self._read_messages = messages
        self._first = self._take_message()
        self._next: Message | None = None

    def read_head(self) -> list[list[str]]:
        columns = self._first["columns"] if self._first else []
        return [list(row) for row in zip(*(column[:HEAD] for column in columns), strict=True)]

    def read_batches(self) -> Iterator[RowBatch]:
        message = self._first
        while message is not None:
            columns = message["columns"]
            frame = pl.DataFrame({str(n): pl.Series(cells, dtype=pl.String) for n, cells in enumerate(columns)})
            numeric = {
                NUMERIC + n: pl.repeat(False, frame.height, dtype=pl.Boolean, eager=True).scatter(rows, True)
                for n, rows in message["numeric"].items()
            }
            yield RowBatch(frame.with_columns(**numeric), message["first_row"])
            message = self._take_message()

    def find_next_sheet(self) -> Message | None:
        """Return the first message of the next sheet; the unread rest of this sheet is skipped."""
        while self._next is None and self._take_message() is not None:
            pass
        return self._next

    def _take_message(self) -> Message | None:
        message = next(self._read_messages, None)
        if message is None or "columns" in message:
            return message
        self._next = message
        return None


@contextmanager
def _start_child(
    path: Path, sheets: "SheetSelection", limits: "SupplierLimits", name: str
) -> Iterator[Iterator[Message]]:
    wanted = {"path": str(path), "only": sheets.only, "skip": sheets.skip}
    request = msgspec.json.encode({**wanted, "memory": limits.workbook_memory, "batch": BATCH})
    child = subprocess.Popen(
        [sys.executable, "-I", "-m", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    timer = Timer(limits.workbook_seconds, child.kill)
    timer.daemon = True
    timer.start()
    try:
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the child process has no pipes")
        with suppress(BrokenPipeError):  # the child process has died, which is reported when its output ends
            child.stdin.write(request)
            child.stdin.close()
        yield _read_messages(child, child.stdout, name, limits)
    finally:
        timer.cancel()
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _read_messages(
    child: "subprocess.Popen[bytes]", out: IO[bytes], name: str, limits: "SupplierLimits"
) -> Iterator[Message]:
    decode = msgspec.msgpack.Decoder(dict[str, Any]).decode
    while length := out.read(4):
        packed = out.read(int.from_bytes(length))
        if len(packed) < int.from_bytes(length):
            break  # the child process was killed within a message
        message = decode(packed)
        if "failed" in message:
            raise make_unreadable_error(name, message["failed"])
        if "too_large" in message:
            raise _make_size_error(name, message["too_large"])
        yield message
    if child.wait() != 0:
        budget = f"{limits.workbook_memory // 1_000_000:,} MB or {limits.workbook_seconds} s"
        raise _make_size_error(name, f"reading it takes more than {budget}, or crashes the reader")


def _make_size_error(name: str, reason: str) -> RunFailed:
    hint = "if the workbook is correct, raise `limits.workbook_memory` or `limits.workbook_seconds` of the supplier"
    return RunFailed(FailureCode.FILE_TOO_LARGE, f"{name} is too large: {reason}", hint)
