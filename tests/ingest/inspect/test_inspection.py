"""Tests of files that are not price lists: they are rejected, or reported."""

import json
import random
from pathlib import Path

import pytest
import xlsxwriter  # type: ignore[import-untyped]

from penstock.ingest.contract import FailureCode
from penstock.ingest.inspect.inspection import inspect_file
from penstock.ingest.model import RunFailed
from tests.ingest.inspect.proposals import inspect_valid


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (random.Random(1).randbytes(5_000), FailureCode.FORMAT_UNKNOWN),
        (b"%PDF-1.7 and so on", FailureCode.FORMAT_UNKNOWN),
        (b"PK\x03\x04" + b"\0" * 100, FailureCode.FILE_UNREADABLE),
        (b'{"rows": [1, 2', FailureCode.FILE_UNREADABLE),
        (b"<a><b></a>", FailureCode.FILE_UNREADABLE),
    ],
    ids=["noise", "pdf", "torn archive", "torn json", "torn xml"],
)
def test_errors_of_the_extractor_are_raised(content: bytes, code: FailureCode, tmp_path: Path) -> None:
    """I6, I17: RunFailed of the extractor is raised unchanged."""
    file = tmp_path / "rubbish"
    file.write_bytes(content)
    with pytest.raises(RunFailed) as caught:
        inspect_file(file)
    assert caught.value.code is code


def test_prose_is_no_table(tmp_path: Path) -> None:
    """I17: a text without a table gives a valid proposal with warnings."""
    file = tmp_path / "letter.txt"
    file.write_text("Dear customer,\n\nprices will follow. Regards!\nThe supplier\n")
    inspection = inspect_valid(file)
    assert any("no header was found" in warning for warning in inspection.warnings)


def test_a_workbook_without_a_table(tmp_path: Path) -> None:
    """I17: sheets of prose are skipped, and the proposal is valid."""
    file = tmp_path / "notes.xlsx"
    workbook = xlsxwriter.Workbook(file)
    sheet = workbook.add_worksheet("Заметки")
    sheet.write(3, 1, "Уважаемые клиенты! Прайс-лист будет позже.")
    workbook.close()
    inspection = inspect_valid(file)
    assert any("no header was found" in warning for warning in inspection.warnings)


def test_a_header_alone_is_mapped_by_its_words(tmp_path: Path) -> None:
    """I17: without rows, types are guessed from the headers, with a warning."""
    file = tmp_path / "header.csv"
    file.write_text("Артикул;Цена;Остаток\n", encoding="utf-8")
    inspection = inspect_valid(file)
    types = {name: column["type"] for name, column in inspection.config["columns"].items()}
    assert types == {"sku": "string", "price_minor": "money", "qty": "integer"}
    assert any("no rows below the header" in warning for warning in inspection.warnings)


@pytest.mark.parametrize("seed", range(25))
def test_any_text_gives_a_valid_proposal(seed: int, tmp_path: Path) -> None:
    """I17: the proposal is valid for any content of the cells."""
    chance = random.Random(seed)
    letters = "aя0 ,;\t\n\"'-.:#{}[]&*!|>%@`№\u00a0\\/()$€"
    file = tmp_path / "odd.csv"
    file.write_text("x;y\n" + "".join(chance.choice(letters) for _ in range(1_500)), encoding="utf-8")
    try:
        inspect_valid(file)
    except RunFailed as failed:
        assert failed.code in FailureCode  # noqa: PT017 - a refusal is as good


def test_unusual_names_in_json_and_yaml(tmp_path: Path) -> None:
    """I17: records with any names are mapped to plain names."""
    file = tmp_path / "odd.json"
    names = [
        "# a",
        "b: c",
        "- d",
        "{e}",
        "да",
        "1",
        "",
        " ",
        "💡",
        "Ёж & Ко",
        "a.b",
        "x" * 250,
        "null",
        "on\ttab",
        "Price",
        "price ",
    ]
    file.write_text(json.dumps([dict.fromkeys(names, f"v{n}") for n in range(5)]), encoding="utf-8")
    inspection = inspect_valid(file)
    assert all(name.isascii() and name for name in inspection.config["columns"])
