"""Writers of ODS, XLSB and zip files, for which there is no library."""

import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

Value = str | float | bool | None
Sheets = Mapping[str, Sequence[Sequence[Value]]]
_TYPES = '<?xml version="1.0"?><Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>'
_RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_ODS_MIME = "application/vnd.oasis.opendocument.spreadsheet"


def zipped(file: Path, contents: Mapping[str, bytes | str], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return file


def ods(file: Path, sheets: Sheets) -> Path:
    return write_ods_xml(file, "".join(_ods_table(name, rows) for name, rows in sheets.items()))


def write_ods_xml(file: Path, tables: str) -> Path:
    """Write an ODS whose tables are given as XML."""
    names = {"office": "office", "table": "table", "text": "text"}
    spaces = " ".join(
        f'xmlns:{short}="urn:oasis:names:tc:opendocument:xmlns:{long}:1.0"' for short, long in names.items()
    )
    content = (
        f'<?xml version="1.0" encoding="UTF-8"?><office:document-content {spaces}><office:body>'
        f"<office:spreadsheet>{tables}</office:spreadsheet></office:body></office:document-content>"
    )
    manifest = '<manifest:manifest xmlns:manifest="urn:oasis:names:tc:opendocument:xmlns:manifest:1.0"/>'
    return zipped(file, {"mimetype": _ODS_MIME, "META-INF/manifest.xml": manifest, "content.xml": content})


def _ods_table(name: str, rows: Sequence[Sequence[Value]]) -> str:
    cells = "".join(f"<table:table-row>{''.join(map(_ods_cell, row))}</table:table-row>" for row in rows)
    return f'<table:table table:name="{escape(name)}">{cells}</table:table>'


def _ods_cell(value: Value) -> str:
    if value is None:
        return "<table:table-cell/>"
    if isinstance(value, bool):
        boolean = "true" if value else "false"
        return f'<table:table-cell office:value-type="boolean" office:boolean-value="{boolean}"/>'
    if isinstance(value, str):
        return f'<table:table-cell office:value-type="string"><text:p>{escape(value)}</text:p></table:table-cell>'
    return f'<table:table-cell office:value-type="float" office:value="{value!r}"/>'


def xlsb(file: Path, sheets: Sheets) -> Path:
    """Write the parts of [MS-XLSB] that a workbook needs."""
    names = list(sheets)
    bundles = b"".join(
        _record(0x9C, struct.pack("<II", 0, n) + _wide(f"rId{n}") + _wide(name))
        for n, name in enumerate(names, start=1)
    )
    book = _record(0x83) + _record(0x99, bytes(16)) + _record(0x8F) + bundles + _record(0x90) + _record(0x84)
    relations = "".join(
        f'<Relationship Id="rId{n}" Type="{_OFFICE}/worksheet" Target="worksheets/sheet{n}.bin"/>'
        for n in range(1, len(names) + 1)
    )
    parts: dict[str, bytes | str] = {
        "[Content_Types].xml": _TYPES,
        "xl/workbook.bin": book,
        "xl/_rels/workbook.bin.rels": f'<Relationships xmlns="{_RELATIONS}">{relations}</Relationships>',
    }
    for n, rows in enumerate(sheets.values(), start=1):
        parts[f"xl/worksheets/sheet{n}.bin"] = _xlsb_sheet(rows)
    return zipped(file, parts)


def _xlsb_sheet(rows: Sequence[Sequence[Value]]) -> bytes:
    width = max((len(row) for row in rows), default=1)
    size = struct.pack("<IIII", 0, max(len(rows) - 1, 0), 0, width - 1)
    cells = b"".join(
        _record(0x00, struct.pack("<I", n) + bytes(13)) + b"".join(_xlsb_cell(m, cell) for m, cell in enumerate(row))
        for n, row in enumerate(rows)
    )
    return _record(0x81) + _record(0x94, size) + _record(0x91) + cells + _record(0x92) + _record(0x82)


def _xlsb_cell(column: int, value: Value) -> bytes:
    place = struct.pack("<II", column, 0)
    if value is None:
        return _record(0x01, place)
    if isinstance(value, bool):
        return _record(0x04, place + bytes([value]))
    if isinstance(value, str):
        return _record(0x06, place + _wide(value))
    return _record(0x05, place + struct.pack("<d", value))


def _wide(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode("utf-16-le")


def _record(kind: int, body: bytes = b"") -> bytes:
    return _number(kind) + _number(len(body)) + body


def _number(value: int) -> bytes:
    """Encode an integer with seven bits per byte, the lowest first."""
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)
