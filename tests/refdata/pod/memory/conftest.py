"""Fixtures of tests of the memory of a pod."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.refdata.pod.memory.reader import View
from penstock.refdata.pod.memory.writer import Memory
from tests.refdata.pod.memory.held_memory import LIMIT


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Memory]:
    kept = Memory(tmp_path, limit=LIMIT)
    yield kept
    kept.close()


@pytest.fixture
def view(held: Memory) -> Iterator[View]:
    seen = held.view()
    yield seen
    seen.txn.abort()
