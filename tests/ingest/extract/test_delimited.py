"""Tests of delimited text, well-formed and damaged."""

from pathlib import Path
from typing import Any

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import delimited
from penstock.ingest.extract.files import open_tables
from penstock.ingest.supplier import SupplierLimits, SupplierSource
from penstock.ingest.transform.gate import bind_columns
from tests.ingest.extract.delimited_files import write_file
from tests.ingest.extraction import STOCK, extract_file, make_supplier, read_refusal, read_tables

A = {"sku": "A", "qty": 1, "price_minor": 1050}
B = {"sku": "B", "qty": 2, "price_minor": 700}
PLAIN = "sku,qty,price\nA,1,10.50\nB,2,7\n"
LARGE = 3_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stock.csv"


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_detected(file: Path, delimiter: str) -> None:
    """I17: comma, semicolon, tab or pipe is detected."""
    assert extract_file(write_file(file, PLAIN.replace(",", delimiter))).rows == [(2, A), (3, B)]


def test_decimal_commas_are_not_delimiters(file: Path) -> None:
    """I17: if two characters split all rows into equal numbers of cells, the semicolon is the delimiter."""
    text = "sku;Price, EUR;RRP, EUR\nA;10,50;12,00\nB;7,00;8,50\n"
    columns = {"sku": {"from": "sku"}, "price": {"from": "Price, EUR", "type": "money"}}
    assert extract_file(write_file(file, text), make_supplier(columns)).rows == [
        (2, {"sku": "A", "price": 1050}),
        (3, {"sku": "B", "price": 700}),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("is_ended", [True, False])
def test_line_ends(file: Path, end: str, is_ended: bool) -> None:
    """I17: lines end with line feeds, carriage returns or both; the last line needs no end."""
    text = PLAIN.replace("\n", end)
    assert extract_file(write_file(file, text if is_ended else text[: -len(end)])).rows == [(2, A), (3, B)]


def test_quotes_enclose_delimiters_quotes_and_line_ends(file: Path) -> None:
    """I17: a record over several lines is a single record, and row numbers count records."""
    text = 'sku,name\r\nA,"one, ""two""\r\nthree"\r\n"B",""\r\n\r\nC,x\r\n'
    extracted = extract_file(write_file(file, text), make_supplier({"sku": {"from": "sku"}, "name": {"from": "name"}}))
    assert extracted.rows == [
        (2, {"sku": "A", "name": 'one, "two"\r\nthree'}),
        (3, {"sku": "B", "name": None}),
        (5, {"sku": "C", "name": "x"}),
    ]
    assert extracted.stats.blank_rows == 1


@pytest.mark.parametrize("place", [0, 1, LARGE // 2, LARGE - 1])
def test_a_stray_quote_is_a_character(file: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """I17: a quote in the middle of a cell, such as 5", is a character, at any position of a large file."""
    monkeypatch.setattr(delimited, "PIECE", 4096)
    monkeypatch.setattr(delimited, "BATCH", 500)
    rows = [["name", "note"], *([f"n{number}", 'a "b" c' if number % 7 else ""] for number in range(LARGE))]
    rows[place + 1][1] = '5" tire'
    text = "".join(f"{name},{note}\n" for name, note in rows)
    assert read_tables(write_file(file, text))[""] == [[cell for cell in row if cell] for row in rows]


def test_stray_and_valid_quotes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: rows after a stray quote are read and numbered like the rows before it."""
    monkeypatch.setattr(delimited, "PIECE", 64)
    text = 'sku,name\nA,"x, y"\nB,5" tire\nC,"two\nlines"\nD,6" tire\nE,"a ""b"""\n'
    extracted = extract_file(write_file(file, text), make_supplier({"sku": {"from": "sku"}, "name": {"from": "name"}}))
    assert [(row, payload["name"]) for row, payload in extracted.rows] == [
        (2, "x, y"), (3, '5" tire'), (4, "two\nlines"), (5, '6" tire'), (6, 'a "b"'),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        'sku,name\nA,x\nB,"never closed\nC,y\nD,z\n',
        'sku,name\nA,x\nB,"closed too late\nC,"y\nD,z\n',
        'sku,name\nA,x\nB,"never closed\n' + "C,y\n" * 400_000,
    ],
)
def test_an_open_quote_does_not_join_rows(file: Path, text: str) -> None:
    """I17: a quote that joins several rows fails the run and names the row, because a lost row would mean sold out."""
    config = make_supplier({"sku": {"from": "sku"}, "name": {"from": "name"}})
    assert "row 3: " in read_refusal(write_file(file, text), config)


def test_quotes_can_be_disabled(file: Path) -> None:
    """I17: with an empty `source.quote`, an open quote is a character."""
    config = make_supplier({"sku": {"from": "sku"}, "name": {"from": "name"}}, source={"quote": ""})
    extracted = extract_file(write_file(file, 'sku,name\nA,"x\nB,y"\n'), config)
    assert extracted.rows == [(2, {"sku": "A", "name": '"x'}), (3, {"sku": "B", "name": 'y"'})]


def test_an_open_quote_in_the_last_row(file: Path) -> None:
    """I17: an open quote in the last row joins no rows and is dropped."""
    assert extract_file(write_file(file, 'sku,qty,price\nA,1,"10.50')).rows == [(2, A)]


def test_ragged_rows(file: Path) -> None:
    """I9: a long row is bad; in a short row the missing cells are empty; delimiters at the end are ignored."""
    text = "sku,qty,price\nA,1,10.50,\nB\nC,1,1,x\nD,1,1,,,\nE,1,1,,,,y\n,1,1\n"
    extracted = extract_file(write_file(file, text))
    assert extracted.rows == [
        (2, A),
        (3, {"sku": "B", "qty": None, "price_minor": None}),
        (5, {"sku": "D", "qty": 1, "price_minor": 100}),
    ]
    # Of a row with far too many cells the first one too many tells; E has blanks there, and only then something.
    assert extracted.reasons[0] == (4, "ROW_TOO_LONG")
    assert extracted.reasons[1:] == [(6, "ROW_TOO_LONG"), (7, "REQUIRED_MISSING")]


def test_blank_rows(file: Path) -> None:
    """I8, §9: row numbers count all rows of the file; blank rows are neither good nor bad."""
    extracted = extract_file(write_file(file, "\n\nsku,qty,price\n\nA,1,10.50\n,,\n  \nB,2,7\n\n\n"))
    assert extracted.rows == [(5, A), (8, B)]
    assert (extracted.stats.bad_rows, extracted.stats.blank_rows) == (0, 5)


def test_trailing_delimiters_in_all_rows(file: Path) -> None:
    """I17: a delimiter at the end of every row is not a column."""
    assert extract_file(write_file(file, "sku;qty;price;\nA;1;10,50;\nB;2;7;\n")).rows == [(2, A), (3, B)]


def test_columns_with_the_same_name(file: Path) -> None:
    """I6: a mapped name of several columns is an error with their numbers; without a mapping all are read."""
    text = "sku,qty,price,Price\nA,1,10.50,12\n"
    assert "several columns 'price': 3, 4" in read_refusal(write_file(file, text), code=FailureCode.HEADER_MISMATCH)
    by_number = {**STOCK, "price_minor": {"from": 3, "type": "money"}}
    assert extract_file(file, make_supplier(by_number)).rows == [(2, A)]
    write_file(file, "sku,price,price\nA,1,2\n")
    assert extract_file(file, make_supplier()).rows == [(2, {"sku": "A", "price": "1", "price_2": "2"})]


def test_no_header(file: Path) -> None:
    """I17: the columns of a file without a header are named by their numbers."""
    columns = {"sku": {"from": 1}, "qty": {"from": 2, "type": "integer"}}
    config = make_supplier(columns, source={"header": "none"})
    assert extract_file(write_file(file, "A,1\nB,2"), config).rows == [
        (1, {"sku": "A", "qty": 1}),
        (2, {"sku": "B", "qty": 2}),
    ]
    assert extract_file(file, make_supplier(source={"header": "none"})).rows[0] == (1, {"1": "A", "2": "1"})
    lacking = make_supplier({**columns, "price": {"from": 7, "required": True}}, source={"header": "none"})
    assert "price (7)" in read_refusal(file, lacking, FailureCode.COLUMNS_MISSING)


PREAMBLE = "ООО «Ромашка»;;\nПрайс от 01.02.2026;;\n;;\nsku;qty;price\nA;1;10,50\nB;2;7\nИтого;3;17,50\n"


@pytest.mark.parametrize("header", ["auto", 4])
def test_a_preamble_and_totals(file: Path, header: Any) -> None:
    """I17: rows above the header are not data, and rows of totals are skipped."""
    config = make_supplier(STOCK, source={"header": header, "skip_rows": ["^Итого"]})
    extracted = extract_file(write_file(file, PREAMBLE, "windows-1251"), config)
    assert extracted.rows == [(5, A), (6, B)]
    assert extracted.stats.skipped_rows == 1


def test_a_header_of_two_rows(file: Path) -> None:
    """I17: a cell of the upper row names the cells to its right; the names of both rows are joined."""
    text = "SKU;Price;;Stock\n;retail;wholesale;\nA;10,50;7;1\n"
    columns = {
        "sku": {"from": "sku"},
        "retail": {"from": "Price / retail", "type": "money"},
        "bulk": {"from": "price / wholesale", "type": "money"},
        "qty": {"from": "stock", "type": "integer"},
    }
    extracted = extract_file(write_file(file, text), make_supplier(columns, source={"header_rows": 2}))
    assert extracted.rows == [(3, {"sku": "A", "retail": 1050, "bulk": 700, "qty": 1})]


def test_a_single_column(file: Path) -> None:
    """I17: a list is a table of a single column."""
    assert extract_file(write_file(file, "sku\nA\nB\n"), make_supplier({"sku": {"from": "sku"}})).rows == [
        (2, {"sku": "A"}),
        (3, {"sku": "B"}),
    ]


def test_a_header_without_rows(file: Path) -> None:
    """I7: a file without rows has no facts, and extraction does not reject it."""
    for text in ("sku,qty,price\n", "sku,qty,price"):
        assert extract_file(write_file(file, text)).facts == []


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\r\n \t\n", b"\n\0\n\0"])
def test_a_blank_file(file: Path, content: bytes) -> None:
    """I6: a file of blanks is empty."""
    file.write_bytes(content)
    read_refusal(file, code=FailureCode.FILE_EMPTY)


def test_missing_columns(file: Path) -> None:
    """I6: the message names the missing column, its spellings and the columns of the file."""
    refusal = read_refusal(write_file(file, "Code,qty,price\nA,1,2\n"), code=FailureCode.COLUMNS_MISSING)
    assert "sku ('sku')" in refusal
    assert "'Code', 'qty', 'price'" in refusal


def test_columns_that_are_not_mapped(file: Path) -> None:
    """I6: with `source.exact`, an additional column is a mismatch."""
    config = make_supplier(STOCK, source={"exact": True})
    assert extract_file(write_file(file, PLAIN), config).rows == [(2, A), (3, B)]
    refusal = read_refusal(write_file(file, "sku,qty,price,note\nA,1,2,x\n"), config, FailureCode.HEADER_MISMATCH)
    assert "'note'" in refusal


def test_a_header_row_beyond_the_file(file: Path) -> None:
    """I6: a configured header row beyond the file is a mismatch."""
    config = make_supplier(STOCK, source={"header": 9})
    assert "row 9" in read_refusal(write_file(file, PLAIN), config, FailureCode.HEADER_MISMATCH)


def test_zero_bytes_are_characters(file: Path) -> None:
    """I17: a stray zero byte does not make a text UTF-16, and does not split a row."""
    for text in ("sku,qty,price\nA\0,1,10.50\nB,2,7\n", PLAIN + "C\0,1,1\n" * 2 + "D,1,1\n" * 1000):
        rows = read_tables(write_file(file, text))[""]
        assert rows == [line.split(",") for line in text.splitlines()]


def test_other_line_separators(file: Path) -> None:
    """I17: only line ends end rows, not form feeds or other separators of Unicode."""
    strange = "a\x0bb\x0cc\x85e\u2028f"
    assert read_tables(write_file(file, f"sku,{strange}\nA,{strange}\n"))[""] == [["sku", strange], ["A", strange]]
    extracted = extract_file(file, make_supplier({"sku": {"from": "sku"}}, source={"exact": False}))
    assert extracted.rows == [(2, {"sku": "A"})]


@pytest.mark.parametrize("quote", ["", '5" '])
def test_carriage_returns_inside_a_line(file: Path, quote: str) -> None:
    """I17: a carriage return inside a line is a character of its cell, in both parsers."""
    text = f"sku,name\nA,one\rtwo\nB,{quote}x\r\r\nC,y\r\n"
    assert read_tables(write_file(file, text))[""] == [
        ["sku", "name"],
        ["A", "one\rtwo"],
        ["B", f"{quote}x\r"],
        ["C", "y"],
    ]


def test_a_very_long_cell(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: a cell may be larger than the pieces in which the file is read."""
    long = "long, " * 30_000
    monkeypatch.setattr(delimited, "PIECE", 10_000)
    assert read_tables(write_file(file, f'sku,name\nA,"{long}"\nB,x\n'))[""] == [
        ["sku", "name"],
        ["A", long],
        ["B", "x"],
    ]


def test_texts_that_start_like_other_formats(file: Path) -> None:
    """I17: a header may start with the same letters as a program or an archive."""
    for start in ("MZ", "PK", "GIF8", "Rar!", "PAR1", "SQLite"):
        assert read_tables(write_file(file, f"{start},qty\nA,1\n"))[""] == [[start, "qty"], ["A", "1"]]


@pytest.mark.parametrize("text", ['A,5" ' + "x" * 3000, 'A,5" x\n' + 'B,"x\n",' * 300, "x" * 3000, '"x\n",' * 400])
def test_a_record_without_end(file: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """I19: an endless line, or an endless record of many lines, is rejected in bounded memory."""
    monkeypatch.setattr(delimited, "PIECE", 64)
    monkeypatch.setattr(delimited, "_RECORD_LIMIT", 1024)
    assert "1,024" in read_refusal(write_file(file, f"sku,qty,price\n{text}"))


def test_thousands_of_columns_with_the_same_name(file: Path) -> None:
    """I19: each column gets a free number, in linear time."""
    names = ["p", "p_3", "p", "p", *["p"] * 12_000]
    [table] = open_tables(write_file(file, ",".join(names) + "\n1\n"), SupplierSource(), SupplierLimits())
    fields = [field.name for field in bind_columns(table, make_supplier()).fields]
    assert fields[:5] == ["p", "p_3", "p_2", "p_4", "p_5"]
    assert len(set(fields)) == len(names)
