"""Tests of JSON documents that are read as a stream: invalid documents, nesting, and the size of records."""

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.ingest.extract import json_stream
from tests.ingest.extract.json_files import LIST, A, B, write_file
from tests.ingest.extraction import STOCK, extract_file, make_supplier, read_refusal


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
    """I17: the first list of objects has the records, numbered from 1; a line end after the document is ignored."""
    for indent in (None, 2):
        content = json.dumps(document, indent=indent).encode() + end
        assert extract_file(write_file(file, content)).rows == [(1, A), (2, B)]


def test_the_path_of_the_records_can_be_configured(file: Path) -> None:
    """I17: of several lists, the configured list is read."""
    document = {"brands": [{"sku": "no"}], "data": {"items": LIST}}
    assert extract_file(write_file(file, document), make_supplier(STOCK, source={"records": "data.items"})).rows == [
        (1, A),
        (2, B),
    ]


@pytest.mark.parametrize("is_lines", [True, False])
def test_numbers_keep_their_digits(file: Path, is_lines: bool) -> None:
    """I8: numbers are not converted to floats."""
    numbers = [
        "12345678901234567890123",
        "0.1",
        "1.10",
        "100.00",
        "-0.000000000000000000001",
        "1e3",
        "9007199254740993",
    ]
    texts = [*numbers[:5], "1000", numbers[6]]
    lines = [f'{{"n": {number}}}' for number in numbers]
    content = "\n".join(lines) if is_lines else f"[{','.join(lines)}]"
    extracted = extract_file(write_file(file, content.encode()), make_supplier({"n": {"from": "n"}}))
    assert [payload["n"] for _, payload in extracted.rows] == texts


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
def test_invalid_json(file: Path, content: bytes) -> None:
    """I6: a truncated or invalid document is rejected, and its records are not published."""
    read_refusal(write_file(file, content))


def test_deep_nesting(file: Path) -> None:
    """I19: deep nesting becomes a text or a rejection."""
    nested: Any = "x"
    for _ in range(40):
        nested = {"a": nested}
    extracted = extract_file(write_file(file, [{"sku": "A", "deep": nested}]), make_supplier({"sku": {"from": "sku"}}))
    assert extracted.rows == [(1, {"sku": "A"})]
    read_refusal(write_file(file, b'[{"sku": ' + b"[" * 100_000))
    read_refusal(write_file(file, b'[{"sku": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]"))


def test_lone_surrogates(file: Path) -> None:
    """I17: an escape of a lone surrogate is read without an error."""
    for content in (b'[{"sku": "\\ud83d"}]', b'{"sku": "\\ud83d"}\n{"sku": "\\ud83d\\ude00"}\n'):
        extracted = extract_file(write_file(file, content), make_supplier({"sku": {"from": "sku"}}))
        assert len(extracted.facts) + len(extracted.bad) == content.count(b"sku")


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
    """I19: an endless text or record is rejected in bounded memory and linear time."""
    monkeypatch.setattr(json_stream, "LIMIT", 1 << 20)
    message = read_refusal(write_file(file, b'[{"sku": "A"}, ' + record + b"]"))
    assert f"{1 << 20:,} bytes" in message


def test_long_lists(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: the number of records, and the length of other lists, is not limited."""
    monkeypatch.setattr(json_stream, "LIMIT", 1 << 18)
    beside = [1] * (1 << 18)
    document = {"beside": beside, "texts": ['a\\"', "\\"] * (1 << 16), "items": [{"sku": 'a"' * 50_000}] * 20}
    assert len(extract_file(write_file(file, document), make_supplier({"sku": {"from": "sku"}})).facts) == 20
