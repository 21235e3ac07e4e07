"""Tests of the detection of encodings and formats, and of the errors of wrong ones."""

import codecs
from pathlib import Path

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import delimited
from tests.ingest.extraction import extract_file, make_supplier, read_refusal

TEXT = "Артикул;Название\r\nШ-1;Шина «Норд», 5 шт\r\nШ-2;Диск\r\n"
ROWS = [(2, {"sku": "Ш-1", "name": "Шина «Норд», 5 шт"}), (3, {"sku": "Ш-2", "name": "Диск"})]
COLUMNS = {"sku": {"from": "Артикул", "required": True}, "name": {"from": "Название"}}
WRITTEN = {
    "utf-8": TEXT.encode(),
    "utf-8 with a mark": codecs.BOM_UTF8 + TEXT.encode(),
    "utf-16-le with a mark": codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
    "utf-16-be with a mark": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "utf-16-le": TEXT.encode("utf-16-le"),
    "utf-16-be": TEXT.encode("utf-16-be"),
    "windows-1251": TEXT.encode("windows-1251"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "прайс.csv"


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_the_encoding_is_detected(file: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece: int) -> None:
    """I17: every encoding gives the same cells, also when a character is cut between two pieces."""
    monkeypatch.setattr(delimited, "PIECE", piece)
    file.write_bytes(WRITTEN[name])
    assert extract_file(file, make_supplier(COLUMNS)).rows == ROWS


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "koi8-r", "cp866", "windows-1251"])
def test_the_encoding_can_be_configured(file: Path, encoding: str) -> None:
    """I17: an encoding that cannot be detected can be configured."""
    file.write_bytes(TEXT.replace("«", "").replace("»", "").encode(encoding))
    rows = extract_file(file, make_supplier(COLUMNS, source={"encoding": encoding})).rows
    assert [payload["sku"] for _, payload in rows] == ["Ш-1", "Ш-2"]


def test_a_byte_order_mark_overrides_the_configuration(file: Path) -> None:
    """I17: a byte order mark has priority over the configured encoding."""
    file.write_bytes(WRITTEN["utf-8 with a mark"])
    assert extract_file(file, make_supplier(COLUMNS, source={"encoding": "windows-1251"})).rows == ROWS


@pytest.mark.parametrize("before", [10, 40_000])
@pytest.mark.parametrize("quote", ["", 'Ш-0;5" tire\n'])
def test_a_wrong_byte_in_the_middle(file: Path, before: int, quote: str) -> None:
    """I6: a wrong byte does not turn UTF-8 into Windows-1251; the file is rejected, and the hint names the setting."""
    text = "Артикул;Название\n" + quote + "Ш-1;Шина\n" * before
    file.write_bytes(text.encode() + b"X;\xff\n" + "Ш-2;Диск\n".encode() * 10)
    message = read_refusal(file, make_supplier(COLUMNS))
    assert "utf-8" in message
    assert "source.encoding" in message


def test_another_encoding_late_in_a_text(file: Path) -> None:
    """I6: letters of another encoding after a start in ASCII are rejected."""
    file.write_bytes(b"sku;name\n" + b"A;plain\n" * 10_000 + "Б;Шина\n".encode("windows-1251"))
    assert "source.encoding" in read_refusal(file, make_supplier({"sku": {"from": "sku"}}))


def test_half_a_character_at_the_end(file: Path) -> None:
    """I6: a UTF-16 text with an odd number of bytes is truncated."""
    file.write_bytes(WRITTEN["utf-16-le"] + b"A")
    assert "utf-16-le" in read_refusal(file, make_supplier(COLUMNS))


@pytest.mark.parametrize("start", [b"MZ\x90\0\x03\0\0\0", b"\x7fELF\x02\x01\x01\0", b"%PDF-1.7\n", b"\x89PNG\r\n"])
@pytest.mark.parametrize("name", ["price.csv", "price.xlsx"])
def test_a_renamed_program(tmp_path: Path, start: bytes, name: str) -> None:
    """I6: a program is rejected as a program, whatever its name is."""
    file = tmp_path / name
    file.write_bytes(start + bytes(range(256)) * 40)
    assert "a p" in read_refusal(file, code=FailureCode.FORMAT_UNKNOWN).lower()


@pytest.mark.parametrize(
    "page",
    [
        "<html><body><table><tr><td>sku</td></tr></table></body></html>",
        "<!DOCTYPE html>\n<html></html>",
        "\n<!-- saved -->\n<table border=1><tr></tr></table>",
        '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body/></html>',
        '<meta charset="utf-8"><table></table>',
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_page_with_the_name_of_a_workbook(tmp_path: Path, page: str, encoding: str) -> None:
    """I6: an HTML page is rejected as an HTML page, whatever its name is."""
    file = tmp_path / "price.xls"
    file.write_bytes(page.encode(encoding))
    assert "an HTML page" in read_refusal(file, code=FailureCode.FORMAT_UNKNOWN)
