"""Fixtures of the memory of a pod."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.refdata.pod.memory.reader import MemoryView
from penstock.refdata.pod.memory.writer import MemoryWriter
from tests.refdata.pod.memory.memory_content import LIMIT


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryWriter]:
    writer = MemoryWriter(tmp_path, limit=LIMIT)
    yield writer
    writer.close()


@pytest.fixture
def view(memory: MemoryWriter) -> Iterator[MemoryView]:
    memory_view = memory.open_view()
    yield memory_view
    memory_view.txn.abort()
