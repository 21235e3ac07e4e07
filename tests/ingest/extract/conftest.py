"""Fixtures of tests of formats; a module may define its own `file` instead."""

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stock.json"
