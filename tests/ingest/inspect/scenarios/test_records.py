"""Tests of proposals for JSON, NDJSON and XML."""

import json
from pathlib import Path
from typing import Any

from penstock.ingest.contract import IngestRunStatus
from tests.ingest.inspect.proposals import columns, inspect_valid, run_proposal


def offers(number: int) -> list[dict[str, Any]]:
    return [
        {
            "vendorCode": f"N-{n:04}",
            "title": f"Насос {n}",
            "price": {"amount": f"{n * 7}.50", "currency": "RUB"},
            "stock": {"moscow": n % 9, "kazan": n % 4},
            "active": n % 3 > 0,
            "updatedAt": f"2026-02-{n % 28 + 1:02}T10:{n % 60:02}:00",
        }
        for n in range(1, number + 1)
    ]


def expected(number: int) -> list[dict[str, Any]]:
    return [
        {
            "sku": o["vendorCode"], "name": o["title"], "price_minor": round(float(o["price"]["amount"]) * 100),
            "currency": "RUB", "qty_moscow": o["stock"]["moscow"], "qty_kazan": o["stock"]["kazan"],
            "active": o["active"], "date": o["updatedAt"],
        }
        for o in offers(number)
    ]  # fmt: skip


def test_nested_json(tmp_path: Path) -> None:
    """I17: the records are the longest list, and nested values have dotted names."""
    file = tmp_path / "offers.json"
    currencies = [{"code": "RUB"}, {"code": "USD"}]
    file.write_text(json.dumps({"meta": {"currencies": currencies}, "data": {"offers": offers(120)}}), encoding="utf-8")
    inspection = inspect_valid(file)
    assert inspection.config["source"] == {"format": "json", "records": "data.offers"}
    assert columns(inspection)["price_minor"]["from"] == "price.amount"
    assert columns(inspection)["active"]["values"] == {"true": True, "false": False}
    assert inspection.config["key"] == ["sku"]
    result = run_proposal(file, inspection, tmp_path)
    assert result.manifest.status is IngestRunStatus.PASS
    assert result.payloads == expected(120)


def test_ndjson_with_malformed_lines(tmp_path: Path) -> None:
    """I17: each line is a record; malformed lines are reported."""
    file = tmp_path / "offers.ndjson"
    lines = [json.dumps(offer) for offer in offers(80)]
    file.write_text("\n".join([*lines[:40], '{"vendorCode": "N-', *lines[40:]]), encoding="utf-8")
    inspection = inspect_valid(file)
    assert inspection.format == "ndjson"
    assert any(warning.startswith("1 line") for warning in inspection.warnings)
    result = run_proposal(file, inspection, tmp_path)
    assert result.payloads == expected(80)
    assert result.manifest.bad_rows == 1


def test_xml(tmp_path: Path) -> None:
    """I17: the element with the most values is the record, with its attributes and children as fields."""
    categories = "".join(f'<category id="{n}">Раздел {n}</category>' for n in range(1, 4))
    products = "".join(
        f'<offer id="{n:05}" available="{"true" if n % 2 else "false"}"><name>Лампа {n}</name>'
        f"<price>{n},90</price><vendor>Свет</vendor><barcode>46{n:011}</barcode></offer>"
        for n in range(1, 101)
    )
    file = tmp_path / "catalogue.xml"
    file.write_text(
        f"<?xml version='1.0' encoding='UTF-8'?><yml_catalog><shop><categories>{categories}</categories>"
        f"<offers>{products}</offers></shop></yml_catalog>",
        encoding="utf-8",
    )
    inspection = inspect_valid(file)
    assert inspection.config["source"] == {"format": "xml", "records": "offer"}
    result = run_proposal(file, inspection, tmp_path)
    assert inspection.config["key"] == ["barcode"]
    assert result.payloads == [
        {
            "id": f"{n:05}", "in_stock": n % 2 == 1, "name": f"Лампа {n}", "price_minor": n * 100 + 90,
            "brand": "Свет", "barcode": f"46{n:011}",
        }
        for n in range(1, 101)
    ]  # fmt: skip
