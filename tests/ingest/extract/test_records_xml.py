"""Tests of XML: repeated elements are records, and the content of a file is never executed."""

from pathlib import Path

import pytest

from penstock.ingest.contract import FailureCode
from tests.ingest.extraction import STOCK, extract_file, make_supplier, read_refusal

A = {"sku": "A", "qty": 1, "price_minor": 1050}
B = {"sku": "B", "qty": 2, "price_minor": 700}
ITEM_A = "<item><sku>A</sku><qty>1</qty><price>10.50</price></item>"
ITEM_B = "<item><sku>B</sku><qty>2</qty><price>7</price></item>"
ITEMS = ITEM_A + ITEM_B
SKU = make_supplier({"sku": {"from": "sku"}})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stock.xml"


def write_file(file: Path, text: str, encoding: str = "utf-8") -> Path:
    file.write_bytes(text.encode(encoding))
    return file


@pytest.mark.parametrize(
    "text",
    [
        f"<stock>{ITEMS}</stock>",
        f'<?xml version="1.0"?>\n<!-- made today -->\n<shop><name>x</name><name>y</name><items>{ITEMS}</items></shop>',
        f'<s:stock xmlns:s="urn:s" xmlns="urn:other">{ITEMS}</s:stock>',
        f"<!DOCTYPE stock><stock><?php evil ?>{ITEMS}</stock>",
        f"<a><b>{ITEMS}</b></a>".replace("<item>", '<n:item xmlns:n="urn:n">').replace("</item>", "</n:item>"),
        f"<stock>{ITEMS}</stock>".replace("<sku>A</sku>", "<sku><![CDATA[A]]></sku>"),
    ],
)
def test_the_repeated_element_is_the_record(file: Path, text: str) -> None:
    """I17: the repeated element is the record, also with namespaces, comments and other elements."""
    assert extract_file(write_file(file, text)).rows == [(1, A), (2, B)]


def test_records_of_attributes(file: Path) -> None:
    """I17: the names of attributes start with @."""
    text = '<stock><i sku="A" qty="1" price="10.50"/><i sku="B" qty="2" price="7"/></stock>'
    columns = {name: {**column, "from": f"@{column['from']}"} for name, column in STOCK.items()}
    assert extract_file(write_file(file, text), make_supplier(columns)).rows == [(1, A), (2, B)]


def test_nested_elements_and_attributes(file: Path) -> None:
    """I17: nested elements have dotted names, the first of several counts, and attributes have no namespace."""
    offer = (
        '<offer id="1" xmlns:x="urn:x" x:kind="k"><price cur="RUB">10.50</price><pic>a</pic><pic>b</pic>'
        "<size><w>205</w><h u='mm'>55</h></size>text</offer>"
    )
    columns = {
        "id": {"from": "@id"},
        "kind": {"from": "@kind"},
        "price": {"from": "price", "type": "money"},
        "currency": {"from": "price.@cur"},
        "pic": {"from": "pic"},
        "w": {"from": "size.w", "type": "integer"},
        "unit": {"from": "size.h.@u"},
    }
    extracted = extract_file(write_file(file, f"<shop><offers>{offer}{offer}</offers></shop>"), make_supplier(columns))
    payload = {"id": "1", "kind": "k", "price": 1050, "currency": "RUB", "pic": "a", "w": 205, "unit": "mm"}
    assert extracted.rows == [(1, payload), (2, payload)]


def test_the_element_of_the_record_can_be_configured(file: Path) -> None:
    """I17: a single element is a record if it is configured; else it is not a record."""
    assert "source.records" in read_refusal(write_file(file, f"<stock>{ITEM_A}</stock>"))
    assert extract_file(file, make_supplier(STOCK, source={"records": "item"})).rows == [(1, A)]
    config = make_supplier(STOCK, source={"records": "item"})
    text = f"<shop><brand><id>1</id></brand><brand><id>2</id></brand>{ITEMS}</shop>"
    assert extract_file(write_file(file, text), config).rows == [(1, A), (2, B)]
    read_refusal(file, make_supplier(STOCK), FailureCode.COLUMNS_MISSING)


def test_records_in_groups(file: Path) -> None:
    """I19: elements are freed after reading, also the groups around them; records are numbered over all groups."""
    groups = "".join(f"<group>{ITEMS}</group>" for _ in range(3_000))
    extracted = extract_file(write_file(file, f"<stock>{groups}</stock>"))
    assert [number for number, _ in extracted.rows] == list(range(1, 6_001))
    assert {payload["sku"] for _, payload in extracted.rows} == {"A", "B"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "windows-1251", "koi8-r"])
def test_the_declared_encoding_is_used(file: Path, encoding: str) -> None:
    """I17: the encoding in the XML declaration is used."""
    item = "<item><sku>Ш-1</sku><qty>1</qty></item>"
    text = f'<?xml version="1.0" encoding="{encoding}"?><stock>{item * 2}</stock>'
    assert [payload for _, payload in extract_file(write_file(file, text, encoding), SKU).rows] == [{"sku": "Ш-1"}] * 2


def test_plain_references_are_characters(file: Path) -> None:
    """I17: character references such as &amp; are decoded."""
    item = "<item><sku>A &amp; B &lt;&#1071;&#x42F;</sku><n/></item>"
    assert extract_file(write_file(file, f"<stock>{item * 2}</stock>"), SKU).rows[0] == (1, {"sku": "A & B <ЯЯ"})


LAUGHS = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))


@pytest.mark.parametrize(
    "definition",
    [
        f'<!ENTITY a0 "ha">{LAUGHS}<!ENTITY x "&a11;">',
        '<!ENTITY x SYSTEM "file:///etc/passwd">',
        '<!ENTITY x SYSTEM "http://127.0.0.1:1/x">',
        '<!ENTITY x "hello">',
    ],
)
def test_entities_are_not_read(file: Path, definition: str) -> None:
    """I17: entities are not expanded, and files of the server are not read; a file that uses an entity is rejected."""
    text = f"<!DOCTYPE stock [{definition}]><stock>{ITEMS}<item><sku>&x;</sku><qty>1</qty></item></stock>"
    message = read_refusal(write_file(file, text))
    assert "root:" not in message
    unused = f"<!DOCTYPE stock [{definition}]><stock>{ITEMS}</stock>"
    assert extract_file(write_file(file, unused)).rows == [(1, A), (2, B)]


def test_entities_in_attributes(file: Path) -> None:
    """I17: entities in attributes are not expanded either."""
    text = '<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><s><i sku="&x;"/><i sku="&x;"/></s>'
    read_refusal(write_file(file, text), make_supplier({"sku": {"from": "@sku"}}))
    laughs = f'<!DOCTYPE s [<!ENTITY a0 "ha">{LAUGHS}]><s><i sku="&a11;"/><i sku="&a11;"/></s>'
    read_refusal(write_file(file, laughs), make_supplier({"sku": {"from": "@sku"}}))


@pytest.mark.parametrize(
    "text",
    [
        f"<stock>{ITEMS}",
        f"<stock>{ITEMS}<item><sku>C</s",
        f"<stock>{ITEMS}</wrong>",
        "<",
        "<stock",
        "<stock>",
        f"<stock>{ITEMS}</stock>trailing",
        f'<?xml version="1.0" encoding="unknown"?><stock>{ITEMS}</stock>',
        f'<?xml version="1.0" encoding="utf-8"?><stock>{ITEMS}</stock>\x01',
        "<a>" * 10_000,
    ],
)
def test_invalid_xml(file: Path, text: str) -> None:
    """I6: a truncated or invalid document is rejected."""
    read_refusal(write_file(file, text))
