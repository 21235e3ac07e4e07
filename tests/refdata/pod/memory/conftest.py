"""Fixtures of the memory of a pod."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.refdata.pod.memory.reader import MemoryView
from penstock.refdata.pod.memory.writer import MemoryWriter
from tests.refdata.pod.memory.memory_content import LIMIT


@pytest.fixture
def held(tmp_path: Path) -> Iterator[MemoryWriter]:
    kept = MemoryWriter(tmp_path, limit=LIMIT)
    yield kept
    kept.close()


@pytest.fixture
def view(held: MemoryWriter) -> Iterator[MemoryView]:
    seen = held.open_view()
    yield seen
    seen.txn.abort()
