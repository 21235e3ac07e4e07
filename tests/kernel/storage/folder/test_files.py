"""Files of a folder storage: links, failed writes, and what a killed writer left."""

import asyncio
import errno
import os
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pytest

from penstock.kernel.errors import Invalid, Transient
from penstock.kernel.storage import RESERVED
from penstock.kernel.storage.folder import FolderStorage
from tests.kernel.storage.contents import drafts, paths


async def test_a_link_never_leads_out(folder: FolderStorage, root: Path, tmp_path: Path) -> None:
    """What lies outside the root is neither read, written, listed nor deleted through a symbolic link."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    await folder.put("inside/object", b"")
    (root / "folder-link").symlink_to(outside)
    (root / "file-link").symlink_to(outside / "secret")
    (root / "inside" / "loop").symlink_to(root)
    for path in ("folder-link/secret", "file-link", "inside/loop/inside/object"):
        calls = [
            folder.get(path),
            anext(folder.stream(path)),
            folder.read_info(path),
            folder.put(path, b"x"),
            folder.create(path, b"x"),
            folder.replace(path, b"x", etag="any"),
            folder.put_file(path, Path(__file__)),
            folder.delete(path),
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [getattr(outcome, "code", None) for outcome in outcomes] == ["BAD_PATH"] * len(calls)
    with pytest.raises(Invalid):
        await paths(folder, "folder-link")
    assert await paths(folder) == ["inside/object"]
    assert {file.name: file.read_bytes() for file in outside.iterdir()} == {"secret": b"secret"}


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("cause", [errno.ENOSPC, errno.EACCES])
async def test_a_failed_write_keeps_the_old_content(
    folder: FolderStorage, root: Path, monkeypatch: pytest.MonkeyPatch, step: str, cause: int
) -> None:
    """A full disk or a missing permission is Transient with a hint, and no content is half written."""
    await folder.put("a", b"old")

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(cause, os.strerror(cause))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(Transient) as failed:
            await folder.put("a", b"new")
    assert failed.value.code == "STORAGE_DOWN"
    assert os.strerror(cause) in failed.value.message
    assert failed.value.hint
    assert (await folder.get("a")).data == b"old"
    assert drafts(root) == []


@pytest.mark.parametrize(("step", "call"), [("replace", "put('a', b'new')"), ("link", "create('b', b'new')")])
async def test_a_crash_keeps_the_old_content(folder: FolderStorage, root: Path, step: str, call: str) -> None:
    """A writer that is killed before the rename changes nothing, and its draft is not listed."""
    await folder.put("a", b"old")
    program = f"""
import asyncio, os, pathlib, signal, sys
from penstock.kernel.storage.folder import FolderStorage
os.{step} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(FolderStorage(pathlib.Path(sys.argv[1])).{call})
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(root))
    assert await process.wait() == -signal.SIGKILL
    assert [draft.read_bytes() for draft in drafts(root)] == [b"new"]
    assert await paths(folder) == ["a"]
    assert (await folder.get("a")).data == b"old"
    await folder.put("a", b"the lock of the dead writer is free")


async def test_the_check_removes_stale_drafts(folder: FolderStorage, root: Path) -> None:
    """The draft of a killed writer is deleted after a day, and not before, because the writer may still run."""
    await folder.put("a", b"")
    for name, age in (("young", timedelta(hours=23)), ("stale", timedelta(hours=25))):
        draft = root / RESERVED / "drafts" / name
        draft.touch()
        then = (datetime.now(UTC) - age).timestamp()
        os.utime(draft, (then, then))
    await folder.check()
    assert [draft.name for draft in drafts(root)] == ["young"]
