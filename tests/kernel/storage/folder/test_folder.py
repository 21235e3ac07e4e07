"""Properties of storage in a folder only. The guarantees of every storage are in test_storage."""

import asyncio
import fcntl
import os
import threading
from pathlib import Path

import pytest

from penstock.kernel.errors import Invalid, Transient
from penstock.kernel.storage.folder import FolderStorage
from tests.kernel.storage.contents import paths, run_together


async def test_a_put_waits_for_a_replacement(folder: FolderStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other writer runs between the check of the etag and the rename of a replacement."""
    seen = await folder.put("a", b"seen")
    rename, flock, met = os.replace, fcntl.flock, threading.Event()

    def put() -> None:
        asyncio.run(folder.put("a", b"put"))
        met.set()

    def meet(lock: int, operation: int) -> None:
        met.set()
        flock(lock, operation)

    other = threading.Thread(target=put)

    def rename_late(source: Path, target: str, *, dst_dir_fd: int) -> None:
        monkeypatch.setattr(os, "replace", rename)
        monkeypatch.setattr(fcntl, "flock", meet)
        other.start()
        met.wait()
        rename(source, target, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "replace", rename_late)
    await folder.replace("a", b"replaced", etag=seen.etag)
    await asyncio.to_thread(other.join)
    assert (await folder.get("a")).data == b"put"


async def test_every_write_has_its_own_etag(folder: FolderStorage) -> None:
    """Writes of the same size in the same millisecond, on reused inodes, have different etags."""
    etags = [(await folder.put("a", b"same")).etag for _ in range(100)]
    assert len(set(etags)) == 100


async def test_an_object_is_not_a_folder(folder: FolderStorage) -> None:
    """A path cannot be an object and the folder of others: the second one is refused."""
    await folder.put("a/b", b"")
    for path in ("a", "a/b/c"):
        for call in (folder.put(path, b""), folder.create(path, b"")):
            with pytest.raises(Invalid) as refused:
                await call
            assert refused.value.code == "BAD_PATH"
    assert await paths(folder) == ["a/b"]


async def test_a_root_that_is_not_a_folder_is_down(tmp_path: Path) -> None:
    """If the root cannot be used, every method is Transient STORAGE_DOWN with a hint."""
    (tmp_path / "file").write_bytes(b"not a folder")
    folder = FolderStorage(tmp_path / "file")
    calls = [folder.check(), folder.put("a", b""), folder.create("a", b""), folder.get("a"), folder.delete("a")]
    for call in [*calls, anext(folder.list())]:
        with pytest.raises(Transient) as down:
            await call
        assert down.value.code == "STORAGE_DOWN"
        assert down.value.hint


async def test_one_of_many_processes_creates(root: Path) -> None:
    """Of concurrent processes that create the same objects, one succeeds for each object."""
    program = """
    won = 0
    for number in range(20):
        try:
            await storage.create(f"deep/{number}", name.encode())
            won += 1
        except Conflict:
            pass
    print(won)
"""
    assert sum(await run_together(program, root)) == 20
    assert len(await paths(FolderStorage(root))) == 20


async def test_processes_lose_no_update(root: Path) -> None:
    """Concurrent processes that read, add and replace until it succeeds lose no update."""
    await FolderStorage(root).create("counter", b"0")
    program = """
    left = 15
    while left:
        seen = await storage.get("counter")
        try:
            await storage.replace("counter", str(int(seen.data) + 1).encode(), etag=seen.info.etag)
            left -= 1
        except Conflict:
            pass
    print(15)
"""
    assert sum(await run_together(program, root)) == 60
    assert (await FolderStorage(root).get("counter")).data == b"60"
