"""What is packed is unpacked as it is read, and never beyond what a file may cost."""

import errno
import gzip
import io
import lzma
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, cast

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import SheetSelection

if TYPE_CHECKING:
    from penstock.ingest.extract.tables import BatchSizer
    from penstock.ingest.supplier import SupplierLimits

_FREE = 64 << 20  # what may be unpacked from however little
PEEK = 1 << 16
_BROKEN = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    struct.error,
    KeyError,  # a part that is called otherwise
    ValueError,  # a name that is no text, a place before the start of the file
    NotImplementedError,
    RuntimeError,
)
ZIPPED = b"PK\x03\x04"
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_OFFICE = ("xl/workbook.xml", "xl/workbook.bin", "mimetype", "[content_types].xml")
_WORKBOOKS = (".xlsx", ".xlsm", ".xls", ".xlsb", ".ods")
_IS_UTF8 = 0x800


@dataclass(frozen=True)
class ArchiveMember:
    """One file to read, packed or not. *path* is set when it lies on the disk as it is.

    *category* tells it from the others of its archive, and is empty when there are none.
    """

    name: str
    number: int
    head: bytes
    open: Callable[[], IO[bytes]]
    path: Path | None = None
    category: str = ""

    @property
    def is_all_in_head(self) -> bool:
        return len(self.head) < PEEK


class ExtractionLimits:
    """What a file may unpack to, all that is in it together; what is read again counts once."""

    def __init__(self, name: str, packed: int | None, limits: "SupplierLimits") -> None:
        self._name = name
        ratio = limits.max_bytes if packed is None else max(_FREE, packed * limits.max_ratio)
        self._limit = min(limits.max_bytes, ratio)
        self._reached: Counter[int] = Counter()  # by the numbers of the members
        self._total = 0

    def reach(self, member: int, place: int) -> None:
        """Failed FILE_TOO_LARGE when that is too far."""
        more = place - self._reached[member]
        if more <= 0:
            return
        self._reached[member] = place
        self._total += more
        if self._total > self._limit:
            hint = "if it is meant, raise limits.max_bytes and limits.max_ratio"
            said = f"{self._name} unpacks to more than {self._limit} bytes"
            raise RunFailed(FailureCode.FILE_TOO_LARGE, said, hint)


class BoundedReader(io.RawIOBase):
    """A stream that ends the run when it grows beyond what is allowed, or turns out to be broken."""

    def __init__(self, content: IO[bytes], name: str, number: int, allowance: ExtractionLimits) -> None:
        self._content = content
        self._name = name
        self._number = number
        self._allowance = allowance
        self._read = 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._content.close()
        super().close()

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        with unpacking(self._name):
            piece = self._content.read(len(buffer))
        self._read += len(piece)
        self._allowance.reach(self._number, self._read)
        buffer[: len(piece)] = piece
        return len(piece)


@contextmanager
def unpacking(name: str) -> Iterator[None]:
    """Failed FILE_UNREADABLE when what is packed is broken; when the disk is, that is not the file's fault."""
    try:
        yield
    except _BROKEN as error:
        raise unreadable(name, str(error)) from error
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # an unpacker's own, or a place that is in no file
            raise
        raise unreadable(name, str(error)) from error


def unreadable(name: str, why: str) -> RunFailed:
    said = why.strip() or "it ends too early"
    return RunFailed(FailureCode.FILE_UNREADABLE, f"{name} cannot be read: {said}", "ask the supplier to send it again")


def members(
    file: Path,
    limits: "SupplierLimits",
    gauge: "BatchSizer",
    name: str | None = None,
    sheets: "SheetSelection | None" = None,
) -> Iterator[ArchiveMember]:
    """What is in *file*, which people call *name*: itself, what it unpacks to, or each file of an archive."""
    name = name or file.name
    with file.open("rb") as content:
        start = content.read(4)
    packed = ExtractionLimits(name, file.stat().st_size, limits)
    if start[:2] == b"\x1f\x8b":
        yield from _spilled(_member(name, 1, lambda: _gunzipped(file, gauge), packed))
    elif start in (ZIPPED, b"PK\x05\x06") and not parts_of_office(file):
        yield from _archived(file, name, sheets or SheetSelection(), packed, gauge)
    else:
        plain = ExtractionLimits(name, None, limits)
        yield replace(_member(name, 1, lambda: gauge.follow(file.open("rb")), plain), path=file)


def parts_of_office(file: Path) -> set[str]:
    """By which parts a zip is told to be a document of an office program; some write them with odd names."""
    try:
        with unpacking(file.name), zipfile.ZipFile(file) as archive:
            names = {name.replace("\\", "/").lstrip("/").lower() for name in archive.namelist()}
    except RunFailed:
        return set()  # who reads it will tell
    return names.intersection(_OFFICE)


def _gunzipped(file: Path, gauge: "BatchSizer") -> IO[bytes]:
    content = gzip.GzipFile(fileobj=gauge.follow(file.open("rb")), mode="rb")
    content.myfileobj = content.fileobj  # type: ignore[assignment]  # so that it is closed with what is read from it
    return cast("IO[bytes]", content)


def _archived(
    file: Path, name: str, sheets: SheetSelection, allowance: ExtractionLimits, gauge: "BatchSizer"
) -> Iterator[ArchiveMember]:
    with gauge.follow(file.open("rb")) as content:
        with unpacking(name):
            archive = zipfile.ZipFile(content)
        found = {one: _named(one) for one in archive.infolist()}
        files = {one: path for one, path in found.items() if _counts(one, path)}
        if not files:
            raise RunFailed(FailureCode.FORMAT_UNKNOWN, f"{name} is an archive without files", "what should be in it?")
        wanted = _wanted(name, list(files.values()), sheets)
        for number, (one, path) in enumerate(files.items(), start=1):
            if path in wanted:
                member = _packed(archive, one, f"{name}: {path}", number, allowance)
                yield from _spilled(replace(member, category=wanted[path]))


def _packed(
    archive: zipfile.ZipFile, one: zipfile.ZipInfo, name: str, number: int, allowance: ExtractionLimits
) -> ArchiveMember:
    if one.flag_bits & 1:
        raise unreadable(name, "it needs a password")
    return _member(name, number, lambda: archive.open(one), allowance)


def _named(one: zipfile.ZipInfo) -> PurePosixPath:
    """Only who says so has written a name in UTF-8; others mean the code page of their country, which is ours."""
    name = one.filename
    if not one.flag_bits & _IS_UTF8:
        raw = name.encode("cp437", errors="replace")
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            name = raw.decode("cp866")
    return PurePosixPath(name.replace("\\", "/"))


def _counts(one: zipfile.ZipInfo, path: PurePosixPath) -> bool:
    """Not what some systems pack beside the files."""
    return not one.is_dir() and path.parts[:1] != ("__MACOSX",) and bool(path.name) and not path.name.startswith(".")


def _wanted(name: str, files: list[PurePosixPath], sheets: SheetSelection) -> dict[PurePosixPath, str]:
    """The files that count, and their categories."""
    if len(files) == 1:
        return dict.fromkeys(files, "")
    stems = Counter(path.stem for path in files)
    chosen = _chosen(name, files, sheets)
    return {
        path: f"sheet{number}" if sheets.category == "number" else path.stem if stems[path.stem] == 1 else str(path)
        for number, path in enumerate(files, start=1)
        if path in chosen
    }


def _chosen(name: str, files: list[PurePosixPath], sheets: SheetSelection) -> list[PurePosixPath]:
    """Files are chosen as sheets are; where no file is called so, sheets of workbooks are meant."""
    chosen = [path for path in files if not _is_among(path, sheets.skip)]
    if sheets.only is not None:
        named = [path for path in chosen if _is_among(path, sheets.only)]
        chosen = named or [path for path in chosen if path.suffix.lower() in _WORKBOOKS]
    if not chosen:
        said = f"none of its files is asked for: {', '.join(map(str, files))}"
        raise RunFailed(FailureCode.FORMAT_UNKNOWN, f"{name}: {said}", "see source.sheets.only and source.sheets.skip")
    return chosen


def _is_among(path: PurePosixPath, names: list[str]) -> bool:
    return not {path.stem, path.name, str(path)}.isdisjoint(names)


def _spilled(member: ArchiveMember) -> Iterator[ArchiveMember]:
    """A workbook that was packed once more is read from a file, as all workbooks are."""
    if not member.head.startswith((ZIPPED, OLE)):
        yield member
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "workbook"
        with member.open() as content, path.open("xb") as out:
            shutil.copyfileobj(content, out, PEEK)
        yield replace(member, path=path)


def _member(name: str, number: int, unpack: Callable[[], IO[bytes]], allowance: ExtractionLimits) -> ArchiveMember:
    def opened() -> IO[bytes]:
        with unpacking(name):
            return io.BufferedReader(BoundedReader(unpack(), name, number, allowance), PEEK)

    with opened() as content:
        return ArchiveMember(name, number, content.read(PEEK), opened)
