"""The format and the encoding of a file, detected from its content; its name is not reliable."""

import re
import zipfile

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract.archives import OLE, ZIPPED, ArchiveMember, list_office_parts, translate_read_errors
from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import WORKBOOKS, FileFormat

_BOMS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_OTHER_FORMATS = {
    b"MZ": "a program for Windows",
    b"\x7fELF": "a program",
    b"%PDF-": "a PDF",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
    b"Rar!\x1a\x07": "a RAR archive",
    b"7z\xbc\xaf": "a 7-Zip archive",
    b"\x1f\x8b": "packed twice",
    b"PAR1": "a Parquet file",
    b"SQLite format 3\0": "an SQLite database",
}
_CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n\r\x0b\x0c\x1a\x1b") + b"\x7f"
_FEW = 0.002
_ASCII_SHARE = 0.02  # minimum share of digits, blanks, delimiters and line ends in a text of any alphabet
_HTML = re.compile(
    r"(?:<!--.*?-->\s*)*<(?:!doctype html|html|head|body|table|style|meta|div)\b", re.IGNORECASE | re.DOTALL
)
_XHTML = re.compile(r"<html\b[^>]*xhtml", re.IGNORECASE)


def detect_format(member: ArchiveMember, configured: FileFormat = FileFormat.AUTO) -> FileFormat:
    """Return the format of *member*; RunFailed FORMAT_UNKNOWN if it is not supported or not the *configured* one."""
    if not strip_mark(member.head).strip(b"\0 \t\r\n") and member.is_head_complete:
        raise RunFailed(FailureCode.FILE_EMPTY, f"{member.name} is empty", "ask the supplier to send the file again")
    detected = _find_format(member)
    if detected is None:
        raise _make_unknown_error(f"{member.name} is {_describe_content(member)}")
    # Formats of text overlap: a single record is both JSON and NDJSON, so the configuration decides.
    texts = (FileFormat.CSV, FileFormat.JSON, FileFormat.NDJSON, FileFormat.XML)
    can_pass = detected in texts and configured in texts and detected not in WORKBOOKS
    if configured is not FileFormat.AUTO and configured is not detected and not can_pass:
        message = f"{member.name} is {detected.value}, but `source.format` is {configured.value}"
        hint = "set `source.format` to auto, or ask the supplier for a file of the configured format"
        raise RunFailed(FailureCode.FORMAT_UNKNOWN, message, hint)
    return detected if configured is FileFormat.AUTO else configured


def detect_encoding(head: bytes, *, is_all: bool = False) -> str:
    """Return the encoding of a text: by its byte order mark, by its zero bytes, or UTF-8 unless it does not fit."""
    if (marked := read_mark_encoding(head)) is not None:
        return marked
    if (by_zeros := _detect_utf16(head[:4096])) is not None:
        return by_zeros
    # The last character of an incomplete head may be cut.
    text = (head if is_all else head[:-4]).decode("utf-8", errors="replace")
    wrong = text.count("\ufffd")
    # A few wrong bytes do not mean another encoding; they are reported when the whole text is read.
    is_utf8 = not wrong or sum(not char.isascii() for char in text) - wrong > wrong
    return "utf-8" if is_utf8 else "windows-1251"


def read_mark_encoding(head: bytes) -> str | None:
    """Return the encoding of the byte order mark at the start of *head*."""
    return next((name for mark, name in _BOMS.items() if head.startswith(mark)), None)


def _detect_utf16(head: bytes) -> str | None:
    """Return the UTF-16 encoding in which *head* has enough ASCII characters; a stray zero byte proves nothing."""
    if b"\0" not in head:
        return None
    encoding = "utf-16-le" if head[1::2].count(0) >= head[::2].count(0) else "utf-16-be"
    text = head.decode(encoding, errors="replace")
    usual = sum(char.isascii() and (char.isprintable() or char in "\t\r\n") for char in text)
    is_utf16 = usual > len(text) * _ASCII_SHARE and text.count("\n") * 2 >= head.count(b"\n")
    return encoding if is_utf16 else None


def strip_mark(head: bytes) -> bytes:
    """Return *head* without its byte order mark."""
    for mark in _BOMS:
        if head.startswith(mark):
            return head[len(mark) :]
    return head


def _find_format(member: ArchiveMember) -> FileFormat | None:
    head = member.head
    if head.startswith(OLE):
        return FileFormat.XLS
    if head.startswith(ZIPPED):
        return _detect_workbook(member)
    return None if _describe_known(head) else _detect_text_format(head)


def _detect_workbook(member: ArchiveMember) -> FileFormat | None:
    if member.path is None:
        return None
    parts = list_office_parts(member.path)
    if "xl/workbook.xml" in parts:
        return FileFormat.XLSX
    if "xl/workbook.bin" in parts:
        return FileFormat.XLSB
    if "mimetype" not in parts:
        return None
    with translate_read_errors(member.name), zipfile.ZipFile(member.path) as archive, archive.open("mimetype") as kind:
        return FileFormat.ODS if b"opendocument.spreadsheet" in kind.read(100) else None


def _describe_known(head: bytes) -> str | None:
    """Describe another known format. A text may start with the same letters, but has no zero bytes."""
    for start, name in _OTHER_FORMATS.items():
        if head.startswith(start) and (not start.isalnum() or b"\0" in head[:512]):
            return name
    return None


def _detect_text_format(head: bytes) -> FileFormat | None:
    encoding = detect_encoding(head)
    text = strip_mark(head).decode(encoding, errors="replace")
    if _is_binary(text, encoding):
        return None
    start = text.lstrip()
    if start[:1] == "<":
        return None if _is_html(start) else FileFormat.XML
    if start[:1] == "[":
        return FileFormat.JSON
    if start[:1] != "{":
        return FileFormat.CSV
    # Several lines of objects are NDJSON; a single object is a JSON document.
    lines = [line for line in start.split("\n", 20) if line.strip()]
    is_lines = len(lines) > 1 and lines[0].rstrip().endswith("}") and lines[1].lstrip()[:1] == "{"
    return FileFormat.NDJSON if is_lines else FileFormat.JSON


def _is_html(start: str) -> bool:
    return bool(_HTML.match(start) or _XHTML.search(start[:1000]))


def _is_binary(text: str, encoding: str) -> bool:
    controls = sum(text.count(chr(byte)) for byte in _CONTROLS)
    if encoding.startswith("utf-16"):
        controls += text.count("\ufffd")
    return controls > max(1, len(text) * _FEW)


def _describe_content(member: ArchiveMember) -> str:
    head = member.head
    if head.startswith(ZIPPED):
        is_office = member.path is not None and list_office_parts(member.path)
        return "an office document, but not a workbook" if is_office else "an archive in an archive"
    text = strip_mark(head).decode(detect_encoding(head), errors="replace").lstrip()
    return _describe_known(head) or ("an HTML page" if _is_html(text) else "of an unknown format")


def _make_unknown_error(message: str) -> RunFailed:
    hint = "ask the supplier for CSV, XLSX, XLS, XLSB, ODS, JSON, NDJSON or XML, plain or packed with gzip or zip"
    return RunFailed(FailureCode.FORMAT_UNKNOWN, message, hint)
