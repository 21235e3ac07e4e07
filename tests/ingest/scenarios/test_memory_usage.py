"""The memory usage of a run, which does not depend on the size of the file."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.ingest.tree import paths
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness
from tests.ingest.supplier_folder import make_writable

# The program; it prints its peak memory in kilobytes at the end.
MEASURED = """
import atexit
from pathlib import Path
from penstock.cli.main import run

@atexit.register
def print_peak_memory():
    print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

run()
"""
FILLER = "x" * 400
FORMATS: dict[str, tuple[str, Callable[[int], str]]] = {
    "csv": ("sku,price\n", lambda number: f"{number}{FILLER},{number}\n"),
    "ndjson": ("", lambda number: f'{{"sku": "{number}{FILLER}", "price": {number}}}\n'),
}


@pytest.fixture
def large_folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    make_writable(tmp_path)
    shutil.rmtree(tmp_path)  # pytest would keep the large files


@pytest.mark.full
@pytest.mark.parametrize("form", FORMATS)
def test_larger_file_needs_no_more_memory(large_folder: Path, form: str) -> None:
    """I19: 120 MB more to read, and more to write, need hardly more memory."""
    small, small_peak = measure_run(IngestHarness(large_folder / "small", KEYED), form, 150_000)
    large, large_peak = measure_run(IngestHarness(large_folder / "large", KEYED), form, 450_000)
    assert large - small > 120_000_000
    message = f"{small_peak >> 20} MB for {small >> 20} MB, {large_peak >> 20} for {large >> 20}"
    assert large_peak - small_peak < (large - small) / 2, message


def measure_run(harness: IngestHarness, form: str, rows: int) -> tuple[int, int]:
    """Return the size of a file with *rows* rows, and the peak memory of its run, in bytes."""
    head, row = FORMATS[form]
    file = harness.root / paths.make_inbox_path(SUPPLIER) / f"{rows}.{form}"
    with file.open("w") as out:
        out.write(head)
        out.writelines(map(row, range(rows)))
    size = file.stat().st_size
    command = [sys.executable, "-c", MEASURED, "ingest", "run", SUPPLIER, "--root", str(harness.root)]
    words = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout.split()
    assert words[0] == "PASS"
    return size, int(words[-1]) * 1024
