"""Fixtures of tests of the definitions of flows."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.kernel.clock import ManualClock
from tests.flows.definition.catalogue_folder import CatalogueFolder


@pytest.fixture
def folder(tmp_path: Path, clock: ManualClock) -> CatalogueFolder:
    (tmp_path / "flows").mkdir()
    return CatalogueFolder(tmp_path / "flows", clock)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path; modules imported from it are removed after the test."""
    before = set(sys.modules)
    (tmp_path / "modules").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    yield tmp_path / "modules"
    for name in set(sys.modules) - before:
        del sys.modules[name]
