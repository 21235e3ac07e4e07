"""What programs import: a module that a command does not need costs its start and its memory."""

import subprocess
import sys

import pytest


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("penstock.app.platform", ["fastapi", "polars", "lxml", "penstock.flows.engine"]),
        ("penstock.app.doctor", ["fastapi", "polars", "lxml", "penstock.flows.engine"]),
        ("penstock.refdata.pod.serve.main", ["fastapi", "polars", "asyncpg", "penstock.refdata.api"]),
        ("penstock.ingest.sdk", ["fastapi", "polars", "lxml", "penstock.ingest.supplier"]),
        ("penstock.ingest.workspace", ["fastapi", "lxml", "ijson"]),
    ],
)
def test_a_program_loads_only_what_it_needs(module: str, unneeded: list[str]) -> None:
    """Commands start fast, and a process of a pod or a program that uses an SDK stays small."""
    code = f"import sys, {module}; print(*(name for name in {unneeded!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
