"""What is packed is unpacked as it is read, and never beyond what a file may cost."""

import gzip
import io
import lzma
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, cast

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import Failed

if TYPE_CHECKING:
    from penstock.ingest.extract import Gauge
    from penstock.ingest.supplier import Limits

_FREE = 64 << 20  # what may be unpacked from however little
_PEEK = 1 << 16
_BROKEN = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    NotImplementedError,
    RuntimeError,
)
WORKBOOK_STARTS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
WORKBOOK_PARTS = ("xl/workbook.xml", "xl/workbook.bin", "mimetype")


@dataclass(frozen=True)
class Member:
    """One file to read, packed or not. *path* is set when it lies on the disk as it is."""

    name: str
    number: int
    head: bytes
    open: Callable[[], IO[bytes]]
    path: Path | None
    is_alone: bool


class Bounded(io.RawIOBase):
    """A stream that ends the run when it grows beyond what is allowed, or turns out to be broken."""

    def __init__(self, content: IO[bytes], packed: int | None, limits: "Limits", name: str) -> None:
        self._content = content
        self._packed = packed
        self._limits = limits
        self._name = name
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            piece = self._content.read(len(buffer))
        except _BROKEN as error:
            raise unreadable(self._name, str(error)) from error
        self._read += len(piece)
        self._check()
        buffer[: len(piece)] = piece
        return len(piece)

    def _check(self) -> None:
        limit = self._limits.max_bytes
        if self._packed is not None and self._read > _FREE:
            limit = min(limit, max(_FREE, self._packed * self._limits.max_ratio))
        if self._read > limit:
            hint = "if it is meant, raise limits.max_bytes and limits.max_ratio"
            raise Failed(FailureCode.FILE_TOO_LARGE, f"{self._name} unpacks to more than {limit} bytes", hint)


def unreadable(name: str, why: str) -> Failed:
    said = why.strip() or "it ends too early"
    return Failed(FailureCode.FILE_UNREADABLE, f"{name} cannot be read: {said}", "ask the supplier to send it again")


def members(file: Path, limits: "Limits", gauge: "Gauge") -> Iterator[Member]:
    """What is in *file*: itself, what it unpacks to, or each file of an archive."""
    with file.open("rb") as content:
        start = content.read(8)
    if start[:2] == b"\x1f\x8b":
        yield from _spilled(_member(file.stem, 1, lambda: _gunzipped(file, gauge), file.stat().st_size, limits))
    elif start[:4] in (b"PK\x03\x04", b"PK\x05\x06") and not _is_workbook(file):
        yield from _archived(file, limits, gauge)
    else:
        yield _plain(file, limits, gauge)


def _gunzipped(file: Path, gauge: "Gauge") -> IO[bytes]:
    return cast("IO[bytes]", gzip.GzipFile(fileobj=gauge.follow(file.open("rb")), mode="rb"))


def _plain(file: Path, limits: "Limits", gauge: "Gauge") -> Member:
    def opened() -> IO[bytes]:
        return io.BufferedReader(Bounded(gauge.follow(file.open("rb")), None, limits, file.name), _PEEK)

    with opened() as content:
        return Member(file.stem, 1, content.read(_PEEK), opened, file, is_alone=True)


def _archived(file: Path, limits: "Limits", gauge: "Gauge") -> Iterator[Member]:
    try:
        archive = zipfile.ZipFile(gauge.follow(file.open("rb")))
        found = [one for one in archive.infolist() if not one.is_dir() and _counts(one.filename)]
    except (*_BROKEN, ValueError) as error:
        raise unreadable(file.name, str(error)) from error
    if not found:
        raise Failed(FailureCode.FORMAT_UNKNOWN, f"{file.name} is an archive without files", "what should be in it?")
    with archive:
        for number, one in enumerate(found, start=1):
            if one.flag_bits & 1:
                raise unreadable(file.name, f"{one.filename} needs a password")
            stem = PurePosixPath(one.filename).stem
            packed = max(one.compress_size, 1)
            is_alone = len(found) == 1
            member = _member(stem, number, lambda one=one: archive.open(one), packed, limits, is_alone)  # type: ignore[misc]
            yield from _spilled(member)


def _spilled(member: Member) -> Iterator[Member]:
    """A workbook that was packed once more is read from a file, as all workbooks are."""
    if not member.head.startswith(WORKBOOK_STARTS):
        yield member
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / member.name
        with member.open() as content, path.open("xb") as out:
            shutil.copyfileobj(content, out, _PEEK)
        yield replace(member, path=path)


def _counts(name: str) -> bool:
    """Not what some systems pack beside the files."""
    return not name.startswith("__MACOSX/") and not PurePosixPath(name).name.startswith(".")


def _member(
    name: str, number: int, unpack: Callable[[], IO[bytes]], packed: int, limits: "Limits", is_alone: bool = True
) -> Member:
    def opened() -> IO[bytes]:
        try:
            return io.BufferedReader(Bounded(unpack(), packed, limits, name), _PEEK)
        except _BROKEN as error:
            raise unreadable(name, str(error)) from error

    with opened() as content:
        head = content.read(_PEEK)
    return Member(name, number, head, opened, None, is_alone)


def _is_workbook(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return any(name in WORKBOOK_PARTS for name in archive.namelist())
    except _BROKEN:
        return False
