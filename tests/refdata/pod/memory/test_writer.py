"""R18, R29: the memory of a pod: atomic changes, recovery from a full memory, freeing in pieces."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from pathlib import Path

import pytest

from penstock.kernel.errors import Transient
from penstock.refdata.config import TenantSection
from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.memory import layout, writer
from penstock.refdata.pod.memory.reader import MemoryView, VersionChange
from penstock.refdata.pod.memory.writer import MemoryWriter
from penstock.refdata.pod.serve import responses
from penstock.refdata.pod.serve.handlers import StreamResponse
from penstock.refdata.pod.serve.request import parse_path
from penstock.refdata.pod.serve.router import Router
from penstock.refdata.pod.serve.streams import ActiveStreams
from tests.refdata.pod.memory.memory_content import LIMIT, TARGET, Items, load, numbered

LONG_KEY = "k" * 500


def read_items(view: MemoryView, target: DictionaryKey = TARGET) -> Items:
    """Return all current items."""
    with view.open_all(target) as found:
        assert found is not None
        return {
            layout.decode_key(*item).decode(): layout.read_body(layout.decode_response(*item)).decode()
            for item in found[1]
        }


def entries(memory: MemoryWriter) -> int:
    return int(memory._env.stat()["entries"])


def test_a_key_that_comes_twice_is_counted_once(memory: MemoryWriter) -> None:
    """R3: a repeated key is detected, in one batch or several, also a long one."""
    generation = memory.begin_generation()
    assert memory.fill(generation, [("a", "1"), ("b", "2"), ("a", "3"), (LONG_KEY, "4"), (LONG_KEY, "5")]) == 3
    assert memory.fill(generation, [("b", "2"), (LONG_KEY, "4"), ("c", "6")]) == 1
    assert memory.fill(memory.begin_generation(), [("a", "1")]) == 1


@pytest.mark.parametrize(("batch", "size"), [(1, 10), (1, 30_000), (50, 1_000), (5_000, 10), (5_000, 600)])
def test_a_full_memory_goes_on_serving_and_recovers(tmp_path: Path, batch: int, size: int) -> None:
    """R18, R23: a load that does not fit is refused; the old version stays, and changes work again after freeing."""
    items, payload = numbered(100, '"there"'), '"' + "x" * size + '"'
    with ExitStack() as closing:
        memory = MemoryWriter(tmp_path, limit=LIMIT if batch == 5_000 else 2 * 1024 * 1024)
        closing.callback(memory.close)
        load(memory, VersionStamp(1, 1), items)
        generation = memory.begin_generation()
        with pytest.raises(Transient) as refused:
            for start in range(0, 10**6, batch):
                memory.fill(generation, [(f"n{number}", payload) for number in range(start, start + batch)])
        assert (refused.value.code, "memoryLimitMb" in str(refused.value.hint)) == ("MEMORY_FULL", True)
        view = memory.open_view()
        closing.callback(lambda: view.txn.abort())
        assert read_items(view) == items
        memory.discard(generation)
        while memory.free():
            view.refresh()
        view.refresh()
        assert entries(memory) == len(items) + 2
        assert memory.change_items(TARGET, VersionStamp(2, 2), {"k0": '"new"'}, []) == ["k0"]
        load(memory, VersionStamp(3, 3), items | {"k1": '"new"'})
        assert read_items(view) == items | {"k1": '"new"'}


def test_a_change_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """R18: a failed change leaves the items and the header unchanged."""
    memory = MemoryWriter(tmp_path, limit=1024 * 1024)
    load(memory, VersionStamp(1, 1), numbered(10))
    header = memory.get_header(TARGET)
    with pytest.raises(Transient) as refused:
        memory.change_items(TARGET, VersionStamp(2, 2), numbered(2_500, '"' + "x" * 20_000 + '"'), ["k1"])
    view = memory.open_view()
    assert refused.value.code == "MEMORY_FULL"
    assert (memory.get_header(TARGET), view.read_header(TARGET), read_items(view)) == (header, header, numbered(10))
    assert memory.change_items(TARGET, VersionStamp(2, 2), {"k1": "2"}, []) == ["k1"]
    view.txn.abort()
    memory.close()


def test_old_generations_are_freed_in_pieces(memory: MemoryWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """R29: old generations are freed in pieces, and not before the retention of pages."""
    now = 1_000.0
    monkeypatch.setattr(writer, "monotonic", lambda: now)
    monkeypatch.setattr(writer, "_FREE_BATCH", 100)
    load(memory, VersionStamp(1, 1), numbered(950))
    for version in range(2, 12):
        memory.change_items(TARGET, VersionStamp(version, version), {"k0": str(version)}, [])
    load(memory, VersionStamp(12, 12), numbered(30))
    full = entries(memory)
    assert (memory.free(), entries(memory)) == (False, full)
    now += writer.PAGE_RETENTION
    left = []
    while memory.free():
        left.append(entries(memory))
    assert len(left) >= 9
    assert all(0 < before - after <= 101 for before, after in zip([full, *left], left, strict=False))
    assert (entries(memory), memory.free()) == (30 + 2, False)


def test_changes_of_long_keys_contain_the_key(memory: MemoryWriter, view: MemoryView) -> None:
    """R31: a change contains the key even if the item did not exist before or does not exist now."""
    load(memory, VersionStamp(1, 1), {"a": "1"})
    memory.change_items(TARGET, VersionStamp(2, 2), {LONG_KEY: "1"}, [])
    memory.change_items(TARGET, VersionStamp(3, 3), {}, [LONG_KEY])
    view.refresh()
    header = view.read_header(TARGET)
    assert header is not None
    key = LONG_KEY.encode()
    assert view.read_changes(header, 1) == [VersionChange(1, 2, [key]), VersionChange(2, 3, [key])]


async def test_a_lower_version_resets_the_stream(memory: MemoryWriter, view: MemoryView) -> None:
    """R24, R31: after a restore of the primary the version is lower, and the stream of changes sends `reset`."""
    load(memory, VersionStamp(9, 9), {"a": "9"})
    changed = asyncio.Event()
    router = Router(view, memory.counters, TenantSection(), None, stale_after=60.0)
    address = parse_path(b"/v1/tenants/acme/dictionaries/LOOSE/changes")
    async with aclosing(ActiveStreams(router, lambda: changed).open(StreamResponse(address, responses.EVENTS))) as feed:
        assert b"X-Dict-Version: 9" in await anext(feed)
        assert await anext(feed) == b": 9\n\n"
        event = asyncio.create_task(read_event(feed))
        await asyncio.sleep(0)
        load(memory, VersionStamp(5, 5), {"a": "5"})
        router.refresh()
        before, changed = changed, asyncio.Event()
        before.set()
        async with asyncio.timeout(5):
            assert (await event).startswith(b"event: reset\nid: 5\n")


async def read_event(feed: AsyncIterator[bytes]) -> bytes:
    return await anext(feed)
