"""Plain files, gzip and zip archives as streams: content is unpacked as it is read, and only up to the limits."""

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
    from penstock.ingest.extract.tables import ReadProgress
    from penstock.ingest.supplier import SupplierLimits

_ALWAYS_ALLOWED = 64 << 20  # bytes that may be unpacked from a file of any size
PEEK = 1 << 16
_FORMAT_ERRORS = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    struct.error,
    KeyError,  # a part of the archive has another name
    ValueError,  # a name is not text, or an offset is before the start of the file
    NotImplementedError,
    RuntimeError,
)
ZIPPED = b"PK\x03\x04"
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_OFFICE_PARTS = ("xl/workbook.xml", "xl/workbook.bin", "mimetype", "[content_types].xml")
_WORKBOOKS = (".xlsx", ".xlsm", ".xls", ".xlsb", ".ods")
_IS_UTF8 = 0x800


@dataclass(frozen=True)
class ArchiveMember:
    """A file to read, packed or not. *path* is set if the file is on the disk and not packed.

    *category* distinguishes the files of an archive; it is empty if there is only one file.
    """

    name: str
    number: int
    head: bytes
    open: Callable[[], IO[bytes]]
    path: Path | None = None
    category: str = ""

    @property
    def is_head_complete(self) -> bool:
        return len(self.head) < PEEK


class ExtractionLimits:
    """The limit on the unpacked size of a file, over all its members; content that is read twice counts once."""

    def __init__(self, name: str, packed: int | None, limits: "SupplierLimits") -> None:
        self._name = name
        ratio = limits.max_bytes if packed is None else max(_ALWAYS_ALLOWED, packed * limits.max_ratio)
        self._limit = min(limits.max_bytes, ratio)
        self._reached: Counter[int] = Counter()  # offset by number of the member
        self._total = 0

    def reach(self, member: int, offset: int) -> None:
        """Count the bytes of *member* up to *offset*; RunFailed FILE_TOO_LARGE beyond the limit."""
        more = offset - self._reached[member]
        if more <= 0:
            return
        self._reached[member] = offset
        self._total += more
        if self._total > self._limit:
            hint = "if the file is correct, raise `limits.max_bytes` and `limits.max_ratio` of the supplier"
            message = f"{self._name} unpacks to more than {self._limit:,} bytes"
            raise RunFailed(FailureCode.FILE_TOO_LARGE, message, hint)


class BoundedReader(io.RawIOBase):
    """A stream that raises RunFailed if it exceeds the limits or is corrupt."""

    def __init__(self, content: IO[bytes], name: str, number: int, budget: ExtractionLimits) -> None:
        self._content = content
        self._name = name
        self._number = number
        self._budget = budget
        self._read = 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._content.close()
        super().close()

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        with translate_read_errors(self._name):
            piece = self._content.read(len(buffer))
        self._read += len(piece)
        self._budget.reach(self._number, self._read)
        buffer[: len(piece)] = piece
        return len(piece)


@contextmanager
def translate_read_errors(name: str) -> Iterator[None]:
    """Turn errors of the file format into RunFailed FILE_UNREADABLE; errors of the disk pass through."""
    try:
        yield
    except _FORMAT_ERRORS as error:
        raise make_unreadable_error(name, str(error)) from error
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # raised by a decompressor, or for an offset outside the file
            raise
        raise make_unreadable_error(name, str(error)) from error


def make_unreadable_error(name: str, reason: str, hint: str = "ask the supplier to send the file again") -> RunFailed:
    """Return RunFailed FILE_UNREADABLE for the file *name*."""
    message = f"{name} cannot be read: {reason.strip() or 'it ends too early'}"
    return RunFailed(FailureCode.FILE_UNREADABLE, message, hint)


def open_members(
    file: Path,
    limits: "SupplierLimits",
    progress: "ReadProgress",
    name: str | None = None,
    sheets: "SheetSelection | None" = None,
) -> Iterator[ArchiveMember]:
    """Yield the members of *file*: the file itself, its unpacked content, or each file of an archive.

    Messages call the file *name*.
    """
    name = name or file.name
    with file.open("rb") as content:
        start = content.read(4)
    packed = ExtractionLimits(name, file.stat().st_size, limits)
    if start[:2] == b"\x1f\x8b":
        yield from _spill_workbook(_make_member(name, 1, lambda: _gunzip(file, progress), packed))
    elif start in (ZIPPED, b"PK\x05\x06") and not list_office_parts(file):
        yield from _open_archive(file, name, sheets or SheetSelection(), packed, progress)
    else:
        plain = ExtractionLimits(name, None, limits)
        yield replace(_make_member(name, 1, lambda: progress.follow(file.open("rb")), plain), path=file)


def list_office_parts(file: Path) -> set[str]:
    """Return the parts that make the zip *file* an office document; some programs write unusual paths."""
    try:
        with translate_read_errors(file.name), zipfile.ZipFile(file) as archive:
            names = {name.replace("\\", "/").lstrip("/").lower() for name in archive.namelist()}
    except RunFailed:
        return set()  # the reader of the archive reports the error
    return names.intersection(_OFFICE_PARTS)


def _gunzip(file: Path, progress: "ReadProgress") -> IO[bytes]:
    content = gzip.GzipFile(fileobj=progress.follow(file.open("rb")), mode="rb")
    content.myfileobj = content.fileobj  # type: ignore[assignment]  # close the file together with the stream
    return cast("IO[bytes]", content)


def _open_archive(
    file: Path, name: str, sheets: SheetSelection, budget: ExtractionLimits, progress: "ReadProgress"
) -> Iterator[ArchiveMember]:
    with progress.follow(file.open("rb")) as content:
        with translate_read_errors(name):
            archive = zipfile.ZipFile(content)
        paths = {entry: _decode_name(entry) for entry in archive.infolist()}
        files = {entry: path for entry, path in paths.items() if _is_payload(entry, path)}
        if not files:
            hint = "ask the supplier for an archive that contains the price list"
            raise RunFailed(FailureCode.FORMAT_UNKNOWN, f"{name} is an archive without files", hint)
        categories = _select_files(name, list(files.values()), sheets)
        for number, (entry, path) in enumerate(files.items(), start=1):
            if path in categories:
                member = _open_packed(archive, entry, f"{name}: {path}", number, budget)
                yield from _spill_workbook(replace(member, category=categories[path]))


def _open_packed(
    archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str, number: int, budget: ExtractionLimits
) -> ArchiveMember:
    if entry.flag_bits & 1:
        raise make_unreadable_error(name, "it needs a password", "ask the supplier for an archive without a password")
    return _make_member(name, number, lambda: archive.open(entry), budget)


def _decode_name(entry: zipfile.ZipInfo) -> PurePosixPath:
    """Return the path of *entry*. A name without the UTF-8 flag is in UTF-8 or in the DOS code page of Russia."""
    name = entry.filename
    if not entry.flag_bits & _IS_UTF8:
        raw = name.encode("cp437", errors="replace")
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            name = raw.decode("cp866")
    return PurePosixPath(name.replace("\\", "/"))


def _is_payload(entry: zipfile.ZipInfo, path: PurePosixPath) -> bool:
    """Return whether *entry* is a file of the supplier, not an entry that an operating system adds."""
    return not entry.is_dir() and path.parts[:1] != ("__MACOSX",) and bool(path.name) and not path.name.startswith(".")


def _select_files(name: str, files: list[PurePosixPath], sheets: SheetSelection) -> dict[PurePosixPath, str]:
    """Return the category of each selected file."""
    if len(files) == 1:
        return dict.fromkeys(files, "")
    stems = Counter(path.stem for path in files)
    selected = _choose_files(name, files, sheets)
    return {
        path: f"sheet{number}" if sheets.category == "number" else path.stem if stems[path.stem] == 1 else str(path)
        for number, path in enumerate(files, start=1)
        if path in selected
    }


def _choose_files(name: str, files: list[PurePosixPath], sheets: SheetSelection) -> list[PurePosixPath]:
    """Return the files that `source.sheets` selects; if `only` names no file, it names sheets of the workbooks."""
    selected = [path for path in files if not _matches(path, sheets.skip)]
    if sheets.only is not None:
        named = [path for path in selected if _matches(path, sheets.only)]
        selected = named or [path for path in selected if path.suffix.lower() in _WORKBOOKS]
    if not selected:
        message = f"{name}: the configuration selects none of its files: {', '.join(map(str, files))}"
        hint = "name files of the archive in `source.sheets.only`, or remove them from `source.sheets.skip`"
        raise RunFailed(FailureCode.FORMAT_UNKNOWN, message, hint)
    return selected


def _matches(path: PurePosixPath, names: list[str]) -> bool:
    return not {path.stem, path.name, str(path)}.isdisjoint(names)


def _spill_workbook(member: ArchiveMember) -> Iterator[ArchiveMember]:
    """Write a packed workbook to a temporary file, because workbooks are read from files."""
    if not member.head.startswith((ZIPPED, OLE)):
        yield member
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "workbook"
        with member.open() as content, path.open("xb") as out:
            shutil.copyfileobj(content, out, PEEK)
        yield replace(member, path=path)


def _make_member(name: str, number: int, unpack: Callable[[], IO[bytes]], budget: ExtractionLimits) -> ArchiveMember:
    def open_stream() -> IO[bytes]:
        with translate_read_errors(name):
            return io.BufferedReader(BoundedReader(unpack(), name, number, budget), PEEK)

    with open_stream() as content:
        return ArchiveMember(name, number, content.read(PEEK), open_stream)
