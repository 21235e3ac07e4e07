"""What a file is, by what it holds; its name says little."""

import zipfile
from typing import TYPE_CHECKING

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract.packing import Member
from penstock.ingest.model import Failed
from penstock.ingest.supplier import WORKBOOKS, Format

if TYPE_CHECKING:
    from pathlib import Path

_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_BOMS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_KNOWN = {
    b"MZ": "a program for Windows",
    b"\x7fELF": "a program",
    b"%PDF": "a PDF",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
    b"Rar!": "a RAR archive",
    b"7z\xbc\xaf": "a 7-Zip archive",
    b"PK\x03\x04": "an archive in an archive",
    b"\x1f\x8b": "packed twice",
    b"PAR1": "a Parquet file",
    b"SQLite": "an SQLite database",
}
_CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n\r\x0b\x0c\x1a\x1b") + b"\x7f"
_FEW = 0.002


def detected(member: Member, wanted: Format = Format.AUTO) -> Format:
    """The format of *member*; Failed FORMAT_UNKNOWN when it is none of ours, or not what is *wanted*."""
    found = _found(member)
    if found is None:
        raise _unknown(f"{member.name} is {_looks_like(member.head)}")
    if wanted is not Format.AUTO and wanted is not found and not _can_pass_for(found, wanted):
        raise _unknown(f"{member.name} is {found.value}, not {wanted.value} as its configuration says")
    return found if wanted is Format.AUTO else wanted


def encoding_of(head: bytes, *, is_all: bool = False) -> str:
    """How a text is written: by its mark, else UTF-8 if it can be, else as its zeros or its letters tell."""
    for mark, name in _BOMS.items():
        if head.startswith(mark):
            return name
    if b"\0" in head[:4096]:
        return "utf-16-le" if head[1:200:2].count(0) >= head[0:200:2].count(0) else "utf-16-be"
    try:
        # The last character of a beginning may be cut.
        head[: None if is_all else -4].decode("utf-8")
    except UnicodeDecodeError as error:
        return "windows-1251" if error.start < len(head) - 4 or is_all else "utf-8"
    return "utf-8"


def without_mark(head: bytes) -> bytes:
    for mark in _BOMS:
        if head.startswith(mark):
            return head[len(mark) :]
    return head


def _found(member: Member) -> Format | None:
    head = member.head
    if head.startswith(_OLE):
        return Format.XLS
    if member.path is not None and head.startswith(b"PK"):
        return _workbook(member.path)
    if any(head.startswith(start) for start in _KNOWN) or not head:
        return None
    return _text_format(head)


def _workbook(path: "Path") -> Format | None:
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        if "xl/workbook.xml" in names:
            return Format.XLSX
        if "xl/workbook.bin" in names:
            return Format.XLSB
        is_ods = "mimetype" in names and b"opendocument.spreadsheet" in archive.open("mimetype").read(100)
    return Format.ODS if is_ods else None


def _text_format(head: bytes) -> Format | None:
    encoding = encoding_of(head)
    text = without_mark(head).decode(encoding, errors="replace")
    if _is_binary(text):
        return None
    start = text.lstrip()
    if start[:1] == "<":
        return None if start[:200].lower().startswith(("<!doctype html", "<html", "<table")) else Format.XML
    if start[:1] == "[":
        return Format.JSON
    return _json_format(start) if start[:1] == "{" else Format.CSV


def _json_format(start: str) -> Format:
    """One object is a document that holds records, several by lines are records."""
    lines = start.split("\n", 2)
    is_lines = len(lines) > 1 and lines[0].rstrip().endswith("}") and lines[1].lstrip()[:1] in ("{", "")
    return Format.NDJSON if is_lines else Format.JSON


def _is_binary(text: str) -> bool:
    strange = sum(text.count(chr(byte)) for byte in _CONTROLS)
    return strange > len(text) * _FEW


def _can_pass_for(found: Format, wanted: Format) -> bool:
    """A text may be anything its supplier calls it: one record alone is JSON, and NDJSON too."""
    texts = (Format.CSV, Format.JSON, Format.NDJSON, Format.XML)
    return found in texts and wanted in texts and found not in WORKBOOKS


def _looks_like(head: bytes) -> str:
    for start, name in _KNOWN.items():
        if head.startswith(start):
            return name
    return "an HTML page" if b"<html" in head[:500].lower() else "nothing we know"


def _unknown(said: str) -> Failed:
    hint = "send CSV, XLSX, XLS, XLSB, ODS, JSON, NDJSON or XML, plain or packed with gzip or zip"
    return Failed(FailureCode.FORMAT_UNKNOWN, said, hint)
