"""`penstock` itself: what it imports, its version, its configuration, and `doctor`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import penstock

HEAVY = {"asyncpg", "fastapi", "rich", "uvicorn", "structlog", "opentelemetry", "confluent_kafka", "redis", "obstore"}


def test_help_is_quick_because_it_loads_little() -> None:
    """`penstock --help` imports none of the heavy libraries, whatever commands will."""
    code = (
        "import sys; sys.argv = ['penstock', '--help']\n"
        "from penstock.cli.main import run\n"
        "try: run()\n"
        "except SystemExit: pass\n"
        f"print('LOADED', sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "LOADED []" in done.stdout


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_an_option_too(option: str, tmp_path: Path) -> None:
    """`penstock --version` and `-V` print the same as `penstock version`, and end with 0."""
    assert penstock(option, cwd=tmp_path) == penstock("version", cwd=tmp_path)
    assert penstock(option, cwd=tmp_path).code == 0
