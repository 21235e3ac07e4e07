"""What is no price list: refused by the extractor, or told of."""

import json
import random
from pathlib import Path

import pytest
import xlsxwriter  # type: ignore[import-untyped]

from penstock.ingest.contract import FailureCode
from penstock.ingest.inspect.inspection import inspect_file
from penstock.ingest.model import RunFailed
from tests.ingest.inspect.proposals import proposed


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
def test_what_the_extractor_refuses_is_refused(content: bytes, code: FailureCode, tmp_path: Path) -> None:
    """I6, I17: Failed of the extractor comes through as it is."""
    file = tmp_path / "rubbish"
    file.write_bytes(content)
    with pytest.raises(RunFailed) as told:
        inspect_file(file)
    assert told.value.code is code


def test_prose_is_no_table(tmp_path: Path) -> None:
    """I17: a text that is no table still gives a valid proposal, and says what is missing."""
    file = tmp_path / "letter.txt"
    file.write_text("Dear customer,\n\nprices will follow. Regards!\nThe supplier\n")
    inspection = proposed(file)
    assert any("no header was found" in warning for warning in inspection.warnings)


def test_a_workbook_without_a_table_says_so(tmp_path: Path) -> None:
    """I17: sheets of prose are skipped, and still the configuration is valid."""
    file = tmp_path / "notes.xlsx"
    workbook = xlsxwriter.Workbook(file)
    sheet = workbook.add_worksheet("Заметки")
    sheet.write(3, 1, "Уважаемые клиенты! Прайс-лист будет позже.")
    workbook.close()
    inspection = proposed(file)
    assert any("no header was found" in warning for warning in inspection.warnings)


def test_a_header_alone_is_mapped_by_its_words(tmp_path: Path) -> None:
    """I17: without rows only names tell what columns are, and that is message."""
    file = tmp_path / "header.csv"
    file.write_text("Артикул;Цена;Остаток\n", encoding="utf-8")
    inspection = proposed(file)
    types = {name: one["type"] for name, one in inspection.config["columns"].items()}
    assert types == {"sku": "string", "price_minor": "money", "qty": "integer"}
    assert any("no rows below the header" in warning for warning in inspection.warnings)


@pytest.mark.parametrize("seed", range(25))
def test_any_text_gives_a_valid_proposal(seed: int, tmp_path: Path) -> None:
    """I17: whatever is in the cells, the proposal can be read back."""
    chance = random.Random(seed)
    letters = "aя0 ,;\t\n\"'-.:#{}[]&*!|>%@`№\u00a0\\/()$€"
    file = tmp_path / "odd.csv"
    file.write_text("x;y\n" + "".join(chance.choice(letters) for _ in range(1_500)), encoding="utf-8")
    try:
        proposed(file)
    except RunFailed as failed:
        assert failed.code in FailureCode  # noqa: PT017 - a refusal is as good


def test_odd_names_survive_json_and_yaml(tmp_path: Path) -> None:
    """I17: records with names of any kind are mapped under names that are plain."""
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
    inspection = proposed(file)
    assert all(name.isascii() and name for name in inspection.config["columns"])
