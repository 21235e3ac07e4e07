"""How much memory a run takes, whatever the size of its file."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.ingest.tree import paths
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness
from tests.ingest.supplier_folder import unlocked

# The program; its last word is the most memory it had, in kilobytes.
MEASURED = """
import atexit
from pathlib import Path
from penstock.cli.main import run

@atexit.register
def tell():
    print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

run()
"""
FILLER = "x" * 400
FORMATS: dict[str, tuple[str, Callable[[int], str]]] = {
    "csv": ("sku,price\n", lambda number: f"{number}{FILLER},{number}\n"),
    "ndjson": ("", lambda number: f'{{"sku": "{number}{FILLER}", "price": {number}}}\n'),
}


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    unlocked(tmp_path)
    shutil.rmtree(tmp_path)  # it is large


@pytest.mark.full
@pytest.mark.parametrize("form", FORMATS)
def test_a_larger_file_takes_no_more_memory(room: Path, form: str) -> None:
    """I19: of 120 MB more to read, and more than that to write, hardly anything is held."""
    small, few = published(IngestHarness(room / "small", KEYED), form, 150_000)
    large, many = published(IngestHarness(room / "large", KEYED), form, 450_000)
    assert large - small > 120_000_000
    assert many - few < (large - small) / 2, f"{few >> 20} MB for {small >> 20} MB, {many >> 20} for {large >> 20}"


def published(harness: IngestHarness, form: str, rows: int) -> tuple[int, int]:
    """The size of a file of so many rows, and the most memory that its run had."""
    head, row = FORMATS[form]
    file = harness.root / paths.inbox(SUPPLIER) / f"{rows}.{form}"
    with file.open("w") as out:
        out.write(head)
        out.writelines(map(row, range(rows)))
    size = file.stat().st_size
    command = [sys.executable, "-c", MEASURED, "ingest", "run", SUPPLIER, "--root", str(harness.root)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout.split()
    assert said[0] == "PASS"
    return size, int(said[-1]) * 1024
