"""JSON documents read as a stream: what is none, how deep it goes, and how long a record may be."""

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.ingest.extract import json_stream
from tests.ingest.extract.json_files import LIST, A, B, written
from tests.ingest.extraction import STOCK, made, refused, supplier


@pytest.mark.parametrize(
    "document",
    [
        LIST,
        {"data": {"items": LIST}},
        {"made": "today", "tags": ["x", "y"], "lineitem": {"n": 1}, "rows": LIST, "n": 2},
    ],
)
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_document_of_records(file: Path, document: Any, end: bytes) -> None:
    """I17: the first list of objects is the records, numbered from 1; a line end behind it changes nothing."""
    for indent in (None, 2):
        content = json.dumps(document, indent=indent).encode() + end
        assert made(written(file, content)).rows == [(1, A), (2, B)]


def test_where_the_records_are_can_be_told(file: Path) -> None:
    """I17: of several lists, the one that is configured."""
    document = {"brands": [{"sku": "no"}], "data": {"items": LIST}}
    assert made(written(file, document), supplier(STOCK, source={"records": "data.items"})).rows == [(1, A), (2, B)]


@pytest.mark.parametrize("is_lines", [True, False])
def test_numbers_are_kept_as_they_are_written(file: Path, is_lines: bool) -> None:
    """I8: no number passes through a float."""
    numbers = [
        "12345678901234567890123",
        "0.1",
        "1.10",
        "100.00",
        "-0.000000000000000000001",
        "1e3",
        "9007199254740993",
    ]
    kept = [*numbers[:5], "1000", numbers[6]]
    lines = [f'{{"n": {number}}}' for number in numbers]
    content = "\n".join(lines) if is_lines else f"[{','.join(lines)}]"
    found = made(written(file, content.encode()), supplier({"n": {"from": "n"}}))
    assert [payload["n"] for _, payload in found.rows] == kept


@pytest.mark.parametrize(
    "content",
    [
        b'[{"sku": "A"}, {"sku": ',
        b'[{"sku": "A"}',
        b"[1, 2",
        b"[garbage]",
        b'{"data": {"items": [{"sku": "A"}',
        b'{"sku"}',
        b'[{"sku": "A"}] trailing',
        b'[{"sku": "\xff"}, {"sku": "\xd0\xb0\xd0\xb1"}, {"sku": "\xd0\xb0\xd0\xb1"}]',
        b'[{"sku": ' + b"9" * 5000 + b"}]",
        b'[{"sku": "A"},' + b" " * 65_500 + b'{"sku": -' + b"9" * 5000 + b"}]",
        b'[{"sku": 1e99999999999999999999999}]',
        codecs.BOM_UTF16_LE + b"[\0{\0\x00\xd8",
    ],
)
def test_what_is_no_json(file: Path, content: bytes) -> None:
    """I6: a document that breaks off, or never was one, is not readable: its records are not published."""
    refused(written(file, content))


def test_deep_nesting(file: Path) -> None:
    """I19: however deep it goes, it ends in a text or in a refusal."""
    nested: Any = "x"
    for _ in range(40):
        nested = {"a": nested}
    found = made(written(file, [{"sku": "A", "deep": nested}]), supplier({"sku": {"from": "sku"}}))
    assert found.rows == [(1, {"sku": "A"})]
    refused(written(file, b'[{"sku": ' + b"[" * 100_000))
    refused(written(file, b'[{"sku": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]"))


def test_half_characters(file: Path) -> None:
    """I17: an escape that spells half a character is no reason to fall over."""
    for content in (b'[{"sku": "\\ud83d"}]', b'{"sku": "\\ud83d"}\n{"sku": "\\ud83d\\ude00"}\n'):
        found = made(written(file, content), supplier({"sku": {"from": "sku"}}))
        assert len(found.facts) + len(found.bad) == content.count(b"sku")


LONG = [
    b'{"sku": "' + b"x" * (3 << 20) + b'"}',
    b'{"sku": "' + b'\\"' * (3 << 20) + b'"}',
    b'{"sku": "x\\\\", "' + b'\\\\\\"' * (1 << 20) + b'": 1}',
    b'{"sku": [' + b'"x",' * (1 << 20) + b"1]}",
    b'{"sku": [' + b"1," * (2 << 20) + b"1]}",
    b"[" + b"1," * (2 << 20) + b"1]",
]


@pytest.mark.parametrize("record", LONG)
def test_a_record_without_end(file: Path, monkeypatch: pytest.MonkeyPatch, record: bytes) -> None:
    """I19: no text and no record of a document may take all memory, nor be read again and again."""
    monkeypatch.setattr(json_stream, "LIMIT", 1 << 20)
    said = refused(written(file, b'[{"sku": "A"}, ' + record + b"]"))
    assert f"{1 << 20:,} bytes" in said


def test_what_is_long_but_no_record(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: many records, and lists beside them, may be as long as they are."""
    monkeypatch.setattr(json_stream, "LIMIT", 1 << 18)
    beside = [1] * (1 << 18)
    document = {"beside": beside, "texts": ['a\\"', "\\"] * (1 << 16), "items": [{"sku": 'a"' * 50_000}] * 20}
    assert len(made(written(file, document), supplier({"sku": {"from": "sku"}})).facts) == 20
