"""Delimited text as suppliers write it, and as it is when something is wrong with it."""

from pathlib import Path
from typing import Any

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import delimited
from penstock.ingest.extract.files import open_tables
from penstock.ingest.supplier import SupplierLimits, SupplierSource
from penstock.ingest.transform.gate import bind_columns
from tests.ingest.extract.delimited_files import written
from tests.ingest.extraction import STOCK, made, read_tables, refused, supplier

A = {"sku": "A", "qty": 1, "price_minor": 1050}
B = {"sku": "B", "qty": 2, "price_minor": 700}
PLAIN = "sku,qty,price\nA,1,10.50\nB,2,7\n"
LARGE = 3_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stock.csv"


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found_out(file: Path, delimiter: str) -> None:
    """I17: comma, semicolon, tab or pipe, nobody has to say which."""
    assert made(written(file, PLAIN.replace(",", delimiter))).rows == [(2, A), (3, B)]


def test_decimal_commas_do_not_pass_for_delimiters(file: Path) -> None:
    """I17: of two characters that cut all rows alike the semicolon is the delimiter."""
    text = "sku;Цена, руб;РРЦ, руб\nA;10,50;12,00\nB;7,00;8,50\n"
    columns = {"sku": {"from": "sku"}, "price": {"from": "Цена, руб", "type": "money"}}
    assert made(written(file, text), supplier(columns)).rows == [
        (2, {"sku": "A", "price": 1050}),
        (3, {"sku": "B", "price": 700}),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("is_ended", [True, False])
def test_lines_end_as_they_do_anywhere(file: Path, end: str, is_ended: bool) -> None:
    """I17: line feeds, carriage returns or both; the last line needs none."""
    text = PLAIN.replace("\n", end)
    assert made(written(file, text if is_ended else text[: -len(end)])).rows == [(2, A), (3, B)]


def test_quotes_hold_delimiters_quotes_and_line_ends(file: Path) -> None:
    """I17: a record over several lines is one record, and rows are counted by records."""
    text = 'sku,name\r\nA,"one, ""two""\r\nthree"\r\n"B",""\r\n\r\nC,x\r\n'
    found = made(written(file, text), supplier({"sku": {"from": "sku"}, "name": {"from": "name"}}))
    assert found.rows == [
        (2, {"sku": "A", "name": 'one, "two"\r\nthree'}),
        (3, {"sku": "B", "name": None}),
        (5, {"sku": "C", "name": "x"}),
    ]
    assert found.stats.blank_rows == 1


@pytest.mark.parametrize("place", [0, 1, LARGE // 2, LARGE - 1])
def test_a_stray_quote_is_a_character(file: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """I17: 5" in the middle of a cell means inches, wherever it is in a large file."""
    monkeypatch.setattr(delimited, "PIECE", 4096)
    monkeypatch.setattr(delimited, "BATCH", 500)
    rows = [["name", "note"], *([f"n{number}", 'a "b" c' if number % 7 else ""] for number in range(LARGE))]
    rows[place + 1][1] = '5" tire'
    text = "".join(f"{name},{note}\n" for name, note in rows)
    assert read_tables(written(file, text))[""] == [[cell for cell in row if cell] for row in rows]


def test_stray_quotes_beside_good_ones(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: rows behind a stray quote are read as those before it, and numbered on."""
    monkeypatch.setattr(delimited, "PIECE", 64)
    text = 'sku,name\nA,"x, y"\nB,5" tire\nC,"two\nlines"\nD,6" tire\nE,"a ""b"""\n'
    found = made(written(file, text), supplier({"sku": {"from": "sku"}, "name": {"from": "name"}}))
    assert [(row, payload["name"]) for row, payload in found.rows] == [
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
def test_an_open_quote_does_not_swallow_rows(file: Path, text: str) -> None:
    """I17: what makes one row of many fails, with the row; in a full snapshot a lost row would mean sold out."""
    config = supplier({"sku": {"from": "sku"}, "name": {"from": "name"}})
    assert "row 3: " in refused(written(file, text), config)


def test_quotes_may_mean_nothing(file: Path) -> None:
    """I17: with source.quote empty, an open quote is a character."""
    config = supplier({"sku": {"from": "sku"}, "name": {"from": "name"}}, source={"quote": ""})
    found = made(written(file, 'sku,name\nA,"x\nB,y"\n'), config)
    assert found.rows == [(2, {"sku": "A", "name": '"x'}), (3, {"sku": "B", "name": 'y"'})]


def test_an_open_quote_in_the_last_row_is_a_character_too_many(file: Path) -> None:
    """I17: where nothing can be swallowed, the cell is what is behind the quote."""
    assert made(written(file, 'sku,qty,price\nA,1,"10.50')).rows == [(2, A)]


def test_ragged_rows(file: Path) -> None:
    """I9: a row that is too long is bad, a short one lacks what it lacks, and delimiters at the end are nothing."""
    text = "sku,qty,price\nA,1,10.50,\nB\nC,1,1,x\nD,1,1,,,\nE,1,1,,,,y\n,1,1\n"
    found = made(written(file, text))
    assert found.rows == [
        (2, A),
        (3, {"sku": "B", "qty": None, "price_minor": None}),
        (5, {"sku": "D", "qty": 1, "price_minor": 100}),
    ]
    # Of a row with far too many cells the first one too many tells; E has blanks there, and only then something.
    assert found.reasons[0] == (4, "ROW_TOO_LONG")
    assert found.reasons[1:] == [(6, "ROW_TOO_LONG"), (7, "REQUIRED_MISSING")]


def test_blank_rows_count_as_rows_of_the_file_only(file: Path) -> None:
    """I8, §9: row numbers are those of the file; blank rows are neither good nor bad."""
    found = made(written(file, "\n\nsku,qty,price\n\nA,1,10.50\n,,\n  \nB,2,7\n\n\n"))
    assert found.rows == [(5, A), (8, B)]
    assert (found.stats.bad_rows, found.stats.blank_rows) == (0, 5)


def test_trailing_delimiters_in_all_rows(file: Path) -> None:
    """I17: a delimiter at the end of every row makes no column."""
    assert made(written(file, "sku;qty;price;\nA;1;10,50;\nB;2;7;\n")).rows == [(2, A), (3, B)]


def test_columns_that_share_a_name(file: Path) -> None:
    """I6: which of two is meant, nobody can tell; by its number it can be said, and unmapped they all stay."""
    text = "sku,qty,price,Price\nA,1,10.50,12\n"
    assert "several columns 'price': 3, 4" in refused(written(file, text), code=FailureCode.HEADER_MISMATCH)
    by_number = {**STOCK, "price_minor": {"from": 3, "type": "money"}}
    assert made(file, supplier(by_number)).rows == [(2, A)]
    written(file, "sku,price,price\nA,1,2\n")
    assert made(file, supplier()).rows == [(2, {"sku": "A", "price": "1", "price_2": "2"})]


def test_no_header(file: Path) -> None:
    """I17: columns of a file without a header are called by their numbers."""
    columns = {"sku": {"from": 1}, "qty": {"from": 2, "type": "integer"}}
    config = supplier(columns, source={"header": "none"})
    assert made(written(file, "A,1\nB,2"), config).rows == [(1, {"sku": "A", "qty": 1}), (2, {"sku": "B", "qty": 2})]
    assert made(file, supplier(source={"header": "none"})).rows[0] == (1, {"1": "A", "2": "1"})
    lacking = supplier({**columns, "price": {"from": 7, "required": True}}, source={"header": "none"})
    assert "price (7)" in refused(file, lacking, FailureCode.COLUMNS_MISSING)


PREAMBLE = "ООО «Ромашка»;;\nПрайс от 01.02.2026;;\n;;\nsku;qty;price\nA;1;10,50\nB;2;7\nИтого;3;17,50\n"


@pytest.mark.parametrize("header", ["auto", 4])
def test_a_preamble_and_totals(file: Path, header: Any) -> None:
    """I17: what is above the header is not data, and what is called a total is none either."""
    config = supplier(STOCK, source={"header": header, "skip_rows": ["^Итого"]})
    found = made(written(file, PREAMBLE, "windows-1251"), config)
    assert found.rows == [(5, A), (6, B)]
    assert found.stats.skipped_rows == 1


def test_a_header_of_two_rows(file: Path) -> None:
    """I17: a cell above stands for those right of it; names are joined."""
    text = "Артикул;Цена;;Остаток\n;розница;опт;\nA;10,50;7;1\n"
    columns = {
        "sku": {"from": "артикул"},
        "retail": {"from": "Цена / розница", "type": "money"},
        "bulk": {"from": "цена / опт", "type": "money"},
        "qty": {"from": "остаток", "type": "integer"},
    }
    found = made(written(file, text), supplier(columns, source={"header_rows": 2}))
    assert found.rows == [(3, {"sku": "A", "retail": 1050, "bulk": 700, "qty": 1})]


def test_one_column(file: Path) -> None:
    """I17: a list is a table of one column."""
    assert made(written(file, "sku\nA\nB\n"), supplier({"sku": {"from": "sku"}})).rows == [
        (2, {"sku": "A"}),
        (3, {"sku": "B"}),
    ]


def test_a_header_and_nothing_else(file: Path) -> None:
    """I7: no rows are no facts; whether that may be is asked elsewhere."""
    for text in ("sku,qty,price\n", "sku,qty,price"):
        assert made(written(file, text)).facts == []


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\r\n \t\n", b"\n\0\n\0"])
def test_nothing_at_all(file: Path, content: bytes) -> None:
    """I6: a file that holds nothing but blanks is empty."""
    file.write_bytes(content)
    refused(file, code=FailureCode.FILE_EMPTY)


def test_columns_that_are_missing(file: Path) -> None:
    """I6: the message says which column, how it may be spelled, and which ones are there."""
    said = refused(written(file, "Код,qty,price\nA,1,2\n"), code=FailureCode.COLUMNS_MISSING)
    assert "sku ('sku')" in said
    assert "'Код', 'qty', 'price'" in said


def test_columns_nobody_expects(file: Path) -> None:
    """I6: where the header has to be exact, one more column is a mismatch."""
    config = supplier(STOCK, source={"exact": True})
    assert made(written(file, PLAIN), config).rows == [(2, A), (3, B)]
    said = refused(written(file, "sku,qty,price,note\nA,1,2,x\n"), config, FailureCode.HEADER_MISMATCH)
    assert "'note'" in said


def test_a_header_that_is_not_where_it_should_be(file: Path) -> None:
    """I6: a header row beyond the file is a mismatch."""
    config = supplier(STOCK, source={"header": 9})
    assert "row 9" in refused(written(file, PLAIN), config, FailureCode.HEADER_MISMATCH)


def test_zero_bytes_are_characters(file: Path) -> None:
    """I17: a stray zero byte makes no UTF-16 of a text, and tears no row."""
    for text in ("sku,qty,price\nA\0,1,10.50\nB,2,7\n", PLAIN + "C\0,1,1\n" * 2 + "D,1,1\n" * 1000):
        rows = read_tables(written(file, text))[""]
        assert rows == [line.split(",") for line in text.splitlines()]


def test_characters_python_would_cut_lines_at(file: Path) -> None:
    """I17: only line ends end rows, not form feeds or other separators."""
    strange = "a\x0bb\x0cc\x85e\u2028f"
    assert read_tables(written(file, f"sku,{strange}\nA,{strange}\n"))[""] == [["sku", strange], ["A", strange]]
    found = made(file, supplier({"sku": {"from": "sku"}}, source={"exact": False}))
    assert found.rows == [(2, {"sku": "A"})]


@pytest.mark.parametrize("quote", ["", '5" '])
def test_returns_that_end_no_line(file: Path, quote: str) -> None:
    """I17: a carriage return amid a line is a character of its cell, on either path."""
    text = f"sku,name\nA,one\rtwo\nB,{quote}x\r\r\nC,y\r\n"
    assert read_tables(written(file, text))[""] == [
        ["sku", "name"],
        ["A", "one\rtwo"],
        ["B", f"{quote}x\r"],
        ["C", "y"],
    ]


def test_a_very_long_cell(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: a cell may be larger than any piece that is read at once."""
    long = "long, " * 30_000
    monkeypatch.setattr(delimited, "PIECE", 10_000)
    assert read_tables(written(file, f'sku,name\nA,"{long}"\nB,x\n'))[""] == [["sku", "name"], ["A", long], ["B", "x"]]


def test_texts_that_begin_like_something_else(file: Path) -> None:
    """I17: a header may begin with the letters a program or an archive begins with."""
    for start in ("MZ", "PK", "GIF8", "Rar!", "PAR1", "SQLite"):
        assert read_tables(written(file, f"{start},qty\nA,1\n"))[""] == [[start, "qty"], ["A", "1"]]


@pytest.mark.parametrize("text", ['A,5" ' + "x" * 3000, 'A,5" x\n' + 'B,"x\n",' * 300, "x" * 3000, '"x\n",' * 400])
def test_a_record_without_end(file: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """I19: no line, and no record of many lines, may take all memory."""
    monkeypatch.setattr(delimited, "PIECE", 64)
    monkeypatch.setattr(delimited, "_RECORD_LIMIT", 1024)
    assert "1,024" in refused(written(file, f"sku,qty,price\n{text}"))


def test_thousands_of_columns_that_share_a_name(file: Path) -> None:
    """I19: each gets a number that is free, without looking at all before it once more."""
    names = ["p", "p_3", "p", "p", *["p"] * 12_000]
    [table] = open_tables(written(file, ",".join(names) + "\n1\n"), SupplierSource(), SupplierLimits())
    fields = [field.name for field in bind_columns(table, supplier()).fields]
    assert fields[:5] == ["p", "p_3", "p_2", "p_4", "p_5"]
    assert len(set(fields)) == len(names)
