"""Runs by format: from the inbox to the published state, or to quarantine."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.ingest.contract import FailureCode, IngestRunStatus
from penstock.ingest.model import RunManifest
from penstock.ingest.run.run import Ingestion
from penstock.ingest.tree.folder import FolderTree
from tests.ingest.extract.test_workbook import ROWS, WRITERS
from tests.ingest.extraction import DQ, STOCK

PLAIN = b"sku;qty;price\nA;1;10,50\nB;2;7\n"
EXPECTED = [{"sku": "A", "qty": 1, "price_minor": 1050}, {"sku": "B", "qty": 2, "price_minor": 700}]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    configs = tmp_path / "etl_ops" / "config"
    configs.mkdir(parents=True)
    config = {**DQ, "file_stability_window": 0, "columns": STOCK}
    (configs / "acme.yaml").write_text(json.dumps(config))  # JSON is YAML
    (tmp_path / "etl_data" / "raw_v1" / "inbox" / "acme").mkdir(parents=True)
    return tmp_path


def run(root: Path, name: str, content: bytes) -> RunManifest:
    (root / "etl_data/raw_v1/inbox/acme" / name).write_bytes(content)
    manifest = Ingestion(FolderTree(root), "test").run("acme", waits=False).manifest
    assert manifest is not None
    return manifest


def read_payloads(root: Path) -> list[Any]:
    facts = (root / "etl_data/raw_v1/state/current/acme/facts.ndjson").read_text().splitlines()
    return [json.loads(line)["payload"] for line in facts]


@pytest.mark.parametrize("name", ["stock.csv", "stock.csv.gz", "stock.json", "stock.xlsx", "stock.xlsb"])
def test_valid_file_is_published(root: Path, tmp_path: Path, name: str) -> None:
    """I17: the state has the same payloads in every format."""
    contents = {
        "stock.csv": PLAIN,
        "stock.csv.gz": gzip.compress(PLAIN),
        "stock.json": json.dumps([{"sku": "A", "qty": 1, "price": 10.5}, {"sku": "B", "qty": 2, "price": 7}]).encode(),
    }
    kind = name.rpartition(".")[2]
    content = contents.get(name) or WRITERS[kind](tmp_path / "w", {"s": ROWS}).read_bytes()
    manifest = run(root, name, content)
    assert manifest.status is IngestRunStatus.PASS, manifest.failure
    assert read_payloads(root) == EXPECTED


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("empty.csv", b"", FailureCode.FILE_EMPTY),
        ("empty.csv.gz", gzip.compress(b"", mtime=0), FailureCode.FILE_EMPTY),
        ("cut.csv.gz", gzip.compress(PLAIN, mtime=0)[:-9], FailureCode.FILE_UNREADABLE),
        ("setup.xlsx", b"MZ\x90\0" + bytes(range(256)), FailureCode.FORMAT_UNKNOWN),
        ("page.xls", b"<html><table></table></html>", FailureCode.FORMAT_UNKNOWN),
        ("other.csv", b"code,count\nA,1\n", FailureCode.COLUMNS_MISSING),
        ("twice.csv", b"sku,sku,qty,price\nA,A,1,1\n", FailureCode.HEADER_MISMATCH),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_file_is_quarantined(root: Path, name: str, content: bytes, code: FailureCode) -> None:
    """I6: the file is in quarantine, the manifest has the reason and a hint, and the state is unchanged."""
    run(root, "good.csv", PLAIN)
    manifest = run(root, name, content)
    assert manifest.status is IngestRunStatus.FAIL
    failure = manifest.failure
    assert failure is not None
    assert failure.code is code
    assert name in failure.message
    assert failure.hint
    assert (root / "etl_data/raw_v1/quarantine/acme/broken" / f"{name}").exists()
    assert read_payloads(root) == EXPECTED
