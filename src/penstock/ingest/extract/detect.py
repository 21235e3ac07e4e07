"""What a file is, by what it holds; its name says little."""

import re
import zipfile

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract.archives import OLE, ZIPPED, ArchiveMember, parts_of_office, unpacking
from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import WORKBOOKS, FileFormat

_BOMS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_KNOWN = {
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
_ASCII_SHARE = 0.02  # in any alphabet so many characters are digits, blanks, delimiters and line ends
_HTML = re.compile(
    r"(?:<!--.*?-->\s*)*<(?:!doctype html|html|head|body|table|style|meta|div)\b", re.IGNORECASE | re.DOTALL
)
_XHTML = re.compile(r"<html\b[^>]*xhtml", re.IGNORECASE)


def detected(member: ArchiveMember, wanted: FileFormat = FileFormat.AUTO) -> FileFormat:
    """The format of *member*; Failed FORMAT_UNKNOWN when it is none of ours, or not what is *wanted*."""
    if not without_mark(member.head).strip(b"\0 \t\r\n") and member.is_all_in_head:
        raise RunFailed(FailureCode.FILE_EMPTY, f"{member.name} is empty", "ask the supplier to send it again")
    found = _found(member)
    if found is None:
        raise _unknown(f"{member.name} is {_looks_like(member)}")
    # A text may be anything its supplier calls it: one record alone is JSON, and NDJSON too.
    texts = (FileFormat.CSV, FileFormat.JSON, FileFormat.NDJSON, FileFormat.XML)
    can_pass = found in texts and wanted in texts and found not in WORKBOOKS
    if wanted is not FileFormat.AUTO and wanted is not found and not can_pass:
        raise _unknown(f"{member.name} is {found.value}, not {wanted.value} as its configuration says")
    return found if wanted is FileFormat.AUTO else wanted


def encoding_of(head: bytes, *, is_all: bool = False) -> str:
    """How a text is written: by its mark, else as its zeros tell, else UTF-8 unless that makes no sense of it."""
    if (marked := marked_encoding(head)) is not None:
        return marked
    if (by_zeros := _utf16(head[:4096])) is not None:
        return by_zeros
    # The last character of a beginning may be cut.
    text = (head if is_all else head[:-4]).decode("utf-8", errors="replace")
    wrong = text.count("\ufffd")
    # One wrong byte makes no other encoding of a text: it is told of when it is reached.
    is_utf8 = not wrong or sum(not char.isascii() for char in text) - wrong > wrong
    return "utf-8" if is_utf8 else "windows-1251"


def marked_encoding(head: bytes) -> str | None:
    """The encoding a byte order mark tells."""
    return next((name for mark, name in _BOMS.items() if head.startswith(mark)), None)


def _utf16(head: bytes) -> str | None:
    """Whose digits, blanks and line ends have a zero beside them on the same side; a stray zero proves nothing."""
    if b"\0" not in head:
        return None
    encoding = "utf-16-le" if head[1::2].count(0) >= head[::2].count(0) else "utf-16-be"
    text = head.decode(encoding, errors="replace")
    usual = sum(char.isascii() and (char.isprintable() or char in "\t\r\n") for char in text)
    is_utf16 = usual > len(text) * _ASCII_SHARE and text.count("\n") * 2 >= head.count(b"\n")
    return encoding if is_utf16 else None


def without_mark(head: bytes) -> bytes:
    for mark in _BOMS:
        if head.startswith(mark):
            return head[len(mark) :]
    return head


def _found(member: ArchiveMember) -> FileFormat | None:
    head = member.head
    if head.startswith(OLE):
        return FileFormat.XLS
    if head.startswith(ZIPPED):
        return _workbook(member)
    return None if _known(head) else _text_format(head)


def _workbook(member: ArchiveMember) -> FileFormat | None:
    if member.path is None:
        return None
    parts = parts_of_office(member.path)
    if "xl/workbook.xml" in parts:
        return FileFormat.XLSX
    if "xl/workbook.bin" in parts:
        return FileFormat.XLSB
    if "mimetype" not in parts:
        return None
    with unpacking(member.name), zipfile.ZipFile(member.path) as archive, archive.open("mimetype") as kind:
        return FileFormat.ODS if b"opendocument.spreadsheet" in kind.read(100) else None


def _known(head: bytes) -> str | None:
    """What else it is; a text may begin with the same letters, but it has no zeros."""
    for start, name in _KNOWN.items():
        if head.startswith(start) and (not start.isalnum() or b"\0" in head[:512]):
            return name
    return None


def _text_format(head: bytes) -> FileFormat | None:
    encoding = encoding_of(head)
    text = without_mark(head).decode(encoding, errors="replace")
    if _is_binary(text, encoding):
        return None
    start = text.lstrip()
    if start[:1] == "<":
        return None if _is_html(start) else FileFormat.XML
    if start[:1] == "[":
        return FileFormat.JSON
    if start[:1] != "{":
        return FileFormat.CSV
    # Objects line by line are records, one alone is a document, which holds some.
    lines = [line for line in start.split("\n", 20) if line.strip()]
    is_lines = len(lines) > 1 and lines[0].rstrip().endswith("}") and lines[1].lstrip()[:1] == "{"
    return FileFormat.NDJSON if is_lines else FileFormat.JSON


def _is_html(start: str) -> bool:
    return bool(_HTML.match(start) or _XHTML.search(start[:1000]))


def _is_binary(text: str, encoding: str) -> bool:
    strange = sum(text.count(chr(byte)) for byte in _CONTROLS)
    if encoding.startswith("utf-16"):
        strange += text.count("\ufffd")
    return strange > max(1, len(text) * _FEW)


def _looks_like(member: ArchiveMember) -> str:
    head = member.head
    if head.startswith(ZIPPED):
        is_office = member.path is not None and parts_of_office(member.path)
        return "a document, but no workbook" if is_office else "an archive in an archive"
    text = without_mark(head).decode(encoding_of(head), errors="replace").lstrip()
    return _known(head) or ("an HTML page" if _is_html(text) else "nothing we know")


def _unknown(said: str) -> RunFailed:
    hint = "send CSV, XLSX, XLS, XLSB, ODS, JSON, NDJSON or XML, plain or packed with gzip or zip"
    return RunFailed(FailureCode.FORMAT_UNKNOWN, said, hint)
