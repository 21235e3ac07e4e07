"""Fixtures of the tests of published states."""

from pathlib import Path

import pytest

from penstock.kernel.clock import ManualClock
from tests.ingest.harness import KEYED, IngestHarness, make_clock


@pytest.fixture
def harness(tmp_path: Path) -> IngestHarness:
    return IngestHarness(tmp_path / "root", {**KEYED, "max_bad_ratio": 0.1})


@pytest.fixture
def clock() -> ManualClock:
    return make_clock()
