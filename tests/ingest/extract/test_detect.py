"""How texts are written, and what is said of those that are written wrongly."""

import codecs
from pathlib import Path

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import delimited
from tests.ingest.extraction import made, refused, supplier

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
def test_the_encoding_is_found_out(file: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece: int) -> None:
    """I17: whoever wrote it, the same cells; also when a character is cut between two pieces."""
    monkeypatch.setattr(delimited, "PIECE", piece)
    file.write_bytes(WRITTEN[name])
    assert made(file, supplier(COLUMNS)).rows == ROWS


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "koi8-r", "cp866", "windows-1251"])
def test_the_encoding_can_be_told(file: Path, encoding: str) -> None:
    """I17: what cannot be found out is configured."""
    file.write_bytes(TEXT.replace("«", "").replace("»", "").encode(encoding))
    rows = made(file, supplier(COLUMNS, source={"encoding": encoding})).rows
    assert [payload["sku"] for _, payload in rows] == ["Ш-1", "Ш-2"]


def test_a_mark_is_believed_before_the_configuration(file: Path) -> None:
    """I17: a supplier who turns to UTF-8 with a mark does not publish garbage."""
    file.write_bytes(WRITTEN["utf-8 with a mark"])
    assert made(file, supplier(COLUMNS, source={"encoding": "windows-1251"})).rows == ROWS


@pytest.mark.parametrize("before", [10, 40_000])
@pytest.mark.parametrize("quote", ["", 'Ш-0;5" tire\n'])
def test_a_wrong_byte_in_the_middle(file: Path, before: int, quote: str) -> None:
    """I6: one wrong byte makes no Windows-1251 of a UTF-8 text; the file is refused, with what to set."""
    text = "Артикул;Название\n" + quote + "Ш-1;Шина\n" * before
    file.write_bytes(text.encode() + b"X;\xff\n" + "Ш-2;Диск\n".encode() * 10)
    said = refused(file, supplier(COLUMNS))
    assert "utf-8" in said
    assert "source.encoding" in said


def test_a_text_that_turns_to_another_encoding_late(file: Path) -> None:
    """I6: where the beginning is plain ASCII, letters of another encoding behind it are told of."""
    file.write_bytes(b"sku;name\n" + b"A;plain\n" * 10_000 + "Б;Шина\n".encode("windows-1251"))
    assert "source.encoding" in refused(file, supplier({"sku": {"from": "sku"}}))


def test_half_a_character_at_the_end(file: Path) -> None:
    """I6: a UTF-16 text with an odd byte was cut."""
    file.write_bytes(WRITTEN["utf-16-le"] + b"A")
    assert "utf-16-le" in refused(file, supplier(COLUMNS))


@pytest.mark.parametrize("start", [b"MZ\x90\0\x03\0\0\0", b"\x7fELF\x02\x01\x01\0", b"%PDF-1.7\n", b"\x89PNG\r\n"])
@pytest.mark.parametrize("name", ["price.csv", "price.xlsx"])
def test_what_is_no_text_at_all(tmp_path: Path, start: bytes, name: str) -> None:
    """I6: a program renamed stays a program, and is told to be one."""
    file = tmp_path / name
    file.write_bytes(start + bytes(range(256)) * 40)
    assert "a p" in refused(file, code=FailureCode.FORMAT_UNKNOWN).lower()


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
def test_a_page_that_is_called_a_workbook(tmp_path: Path, page: str, encoding: str) -> None:
    """I6: an HTML page is told to be one, whatever it is called."""
    file = tmp_path / "price.xls"
    file.write_bytes(page.encode(encoding))
    assert "an HTML page" in refused(file, code=FailureCode.FORMAT_UNKNOWN)
