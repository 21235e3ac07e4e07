"""Tests of the sample of a file."""

from pathlib import Path

import pytest

from penstock.ingest.inspect import sample
from tests.ingest.inspect.proposals import inspect_valid


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: of a large file only the start is read, with a warning."""
    monkeypatch.setattr(sample, "_CHEAP", 1_000_000)
    file = tmp_path / "large.csv"
    file.write_text("sku,name,price\n" + "".join(f"A{n:07},Item number {n},{n}.00\n" for n in range(150_000)))
    inspection = inspect_valid(file)
    assert not inspection.tables[0].is_whole
    assert inspection.tables[0].rows < 150_000
    assert any("not read to its end" in warning for warning in inspection.warnings)
