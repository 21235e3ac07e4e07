"""The storage port's promises, kept by the folder and by S3 alike."""

import asyncio
import errno
import fcntl
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from penstock.kernel.errors import BadConfig, Conflict, Invalid, NotFound, PenstockError, Transient
from penstock.kernel.storage import PATH_LIMIT, RESERVED, SEGMENT_LIMIT, Storage
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.storage.objects import ObjectStorage
from tests.services.s3 import S3Bucket, open_s3_bucket

MB = 1 << 20
LARGE = 40 * MB
BAD_PATHS = {
    "empty": "",
    "absolute": "/etc/passwd",
    "parent": "a/../../b",
    "parent only": "..",
    "here": "./a",
    "empty segment": "a//b",
    "trailing slash": "a/",
    "NUL": "a\0b",
    "newline": "a\nb",
    "backslash": "a\\b",
    "lone surrogate": "a\ud800",
    "long path": "/".join(["x" * 99] * 10),
    "long segment": "x" * (SEGMENT_LIMIT + 1),
    "long in bytes": "é" * (SEGMENT_LIMIT // 2 + 1),
    "reserved": f"{RESERVED}/locks/00",
}
ODD_NAMES = ["größe/λ/日本語.txt", "😀", "a b+c%20&d=e?f#g", "é", "quote'\"<x>", "~tilde*", "x" * SEGMENT_LIMIT]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Bucket]:
    with open_s3_bucket() as place:
        yield place


@pytest.fixture
def bucket(s3: S3Bucket) -> ObjectStorage:
    return ObjectStorage(f"{s3.url}/{uuid.uuid4().hex}/nested", s3.options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "made" / "at first write"


@pytest.fixture
def folder(root: Path) -> FolderStorage:
    return FolderStorage(root)


@pytest.fixture(params=["folder", "bucket"])
def storage(request: pytest.FixtureRequest) -> Storage:
    chosen: Storage = request.getfixturevalue(request.param)
    return chosen


async def paths(storage: Storage, prefix: str = "") -> list[str]:
    return [info.path async for info in storage.list(prefix)]


def winners(outcomes: Sequence[object], code: str) -> int:
    """How many succeeded, when all others failed with *code*."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert {failure.code for failure in failures if isinstance(failure, Conflict)} <= {code}
    assert all(isinstance(failure, Conflict) for failure in failures)
    return len(outcomes) - len(failures)


# What one caller sees.


async def test_what_was_put_is_read(storage: Storage) -> None:
    """An object is read back whole, and every way of asking names it alike."""
    written = await storage.put("a/b/object", b"content")
    stored = await storage.get("a/b/object")
    assert stored.data == b"content"
    assert (stored.info.path, stored.info.size, stored.info.etag) == ("a/b/object", 7, written.etag)
    assert await storage.info("a/b/object") == stored.info
    assert [info async for info in storage.list()] == [stored.info]
    assert b"".join([piece async for piece in storage.stream("a/b/object")]) == b"content"
    assert abs(written.modified_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert abs(stored.info.modified_at - written.modified_at) < timedelta(minutes=1)


async def test_put_replaces(storage: Storage) -> None:
    """A put wins over whatever was there, and the etag changes with the content."""
    first = await storage.put("a", b"old content")
    second = await storage.put("a", b"new")
    assert (await storage.get("a")).data == b"new"
    assert first.etag != second.etag


async def test_an_object_may_be_empty(storage: Storage, tmp_path: Path) -> None:
    """No content is a content, for bytes and for files."""
    (tmp_path / "empty").touch()
    await storage.create("created", b"")
    await storage.put_file("filed", tmp_path / "empty")
    for path in ("created", "filed"):
        assert (await storage.get(path)).data == b""
        assert [piece async for piece in storage.stream(path)] == []
        assert (await storage.get(path)).info.size == 0


async def test_a_missing_object_is_told(storage: Storage) -> None:
    """Reading what is not there is NotFound; asking for its info is None."""
    await storage.put("a/b", b"")
    for path in ("nothing", "a", "a/nothing", "a/b/c"):
        with pytest.raises(NotFound) as got:
            await storage.get(path)
        with pytest.raises(NotFound) as streamed:
            await anext(storage.stream(path))
        assert got.value.code == streamed.value.code == "OBJECT_NOT_FOUND"
        assert await storage.info(path) is None


async def test_deleting_twice_succeeds(storage: Storage) -> None:
    """A deletion says the object is gone, whether or not it was there."""
    await storage.put("a/b/c", b"")
    for path in ("a/b/c", "a/b/c", "a", "never/was"):
        await storage.delete(path)
    assert await paths(storage) == []
    await storage.put("a", b"the name of what was a folder is free again")
    assert await paths(storage) == ["a"]


async def test_a_file_must_be_there_to_be_stored(storage: Storage, tmp_path: Path) -> None:
    """Storing from a file that is none is Invalid, and stores nothing."""
    for source in (tmp_path / "nothing", tmp_path):
        with pytest.raises(Invalid) as refused:
            await storage.put_file("a", source)
        assert refused.value.code == "NO_SOURCE"
    assert await paths(storage) == []


@pytest.mark.parametrize("path", BAD_PATHS.values(), ids=BAD_PATHS.keys())
async def test_a_bad_path_is_refused(storage: Storage, path: str, tmp_path: Path) -> None:
    """A path that is not safe in every store is refused by every call, before anything happens."""
    calls = [
        storage.put(path, b""),
        storage.create(path, b""),
        storage.replace(path, b"", etag="any"),
        storage.put_file(path, Path(__file__)),
        storage.get(path),
        storage.info(path),
        storage.delete(path),
        anext(storage.stream(path)),
        *([anext(storage.list(path))] if path else []),
        asyncio.to_thread(storage.uri, path),
    ]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [outcome.code for outcome in outcomes if isinstance(outcome, Invalid)] == ["BAD_PATH"] * len(calls)
    assert not list(tmp_path.iterdir())


async def test_odd_names_are_names(storage: Storage) -> None:
    """Whatever can be printed is a name, and comes back letter by letter."""
    longest = "/".join(["y" * 99] * 9)
    assert len(longest) == PATH_LIMIT - 1
    for path in [*ODD_NAMES, longest]:
        await storage.create(path, path.encode())
    assert await paths(storage) == sorted([*ODD_NAMES, longest])
    for path in [*ODD_NAMES, longest]:
        assert (await storage.get(path)).data == path.encode()


async def test_a_uri_tells_where_the_object_is(folder: FolderStorage, root: Path, s3: S3Bucket) -> None:
    """A person or another program finds the object by its uri."""
    assert folder.uri("a/ü b") == (root / "a" / "ü b").as_uri()
    assert ObjectStorage(f"{s3.url}/p/", s3.options).uri("a/b") == f"{s3.url}/p/a/b"


async def test_check_leaves_nothing(storage: Storage) -> None:
    """A working store passes the check, and no listing tells of it."""
    await storage.put("a", b"")
    await storage.check()
    assert await paths(storage) == ["a"]


# Listing.


async def test_a_prefix_is_whole_segments(storage: Storage) -> None:
    """Listing a folder lists what is in it, not what merely begins alike."""
    for path in ("a/b", "a/bc", "a/b.d/e", "a/c/d", "a/c/e/f", "a/cd/x"):
        await storage.put(path, b"")
    assert await paths(storage, "a/c") == ["a/c/d", "a/c/e/f"]
    assert await paths(storage, "a/b") == []
    assert await paths(storage, "nowhere") == []


async def test_a_listing_is_ordered_by_path(storage: Storage) -> None:
    """The order is that of the whole paths, not folder by folder."""
    for path in ("b", "a0", "a/z", "a/b/c", "a.x", "a-x/y", "a/b.c", "A", "ä", "a/b-"):
        await storage.put(path, b"")
    assert await paths(storage) == ["A", "a-x/y", "a.x", "a/b-", "a/b.c", "a/b/c", "a/z", "a0", "b", "ä"]


@pytest.mark.full
async def test_a_long_listing_is_complete(storage: Storage) -> None:
    """More objects than a page of the store holds are listed all, once, in order."""
    expected = [f"many/{number:04}" for number in range(1_050)]
    gate = asyncio.Semaphore(16)

    async def put(path: str) -> None:
        async with gate:
            await storage.put(path, b"x")

    await asyncio.gather(*map(put, reversed(expected)))
    assert await paths(storage) == expected


async def test_a_stream_can_be_of_one_content_only(storage: Storage) -> None:
    """Who names the content it means gets that or nothing: never another's, be it new or gone."""
    old = await storage.put("a", b"old")
    assert [piece async for piece in storage.stream("a", etag=old.etag)] == [b"old"]
    await storage.put("a", b"new")
    with pytest.raises(Conflict) as refused:
        await anext(storage.stream("a", etag=old.etag))
    assert refused.value.code == "OBJECT_CHANGED"
    await storage.delete("a")
    with pytest.raises(NotFound):
        await anext(storage.stream("a", etag=old.etag))


# Large objects.


@pytest.mark.full
async def test_a_large_object_moves_in_pieces(storage: Storage, tmp_path: Path) -> None:
    """A file of many megabytes is stored and streamed back unchanged, in pieces of bounded size."""
    block = os.urandom(MB)
    with (tmp_path / "large").open("wb") as source:
        for number in range(LARGE // MB):
            source.write(number.to_bytes(4, "big") + block[4:])
    written = await storage.put_file("large", tmp_path / "large")
    digest, sizes = hashlib.sha256(), []
    async for piece in storage.stream("large"):
        digest.update(piece)
        sizes.append(len(piece))
    assert written.size == sum(sizes) == LARGE
    assert max(sizes) <= 2 * MB
    with (tmp_path / "large").open("rb") as source:
        assert digest.hexdigest() == hashlib.file_digest(source, "sha256").hexdigest()
    info = await storage.info("large")
    assert info is not None
    assert info.etag == written.etag


# Many callers at once.


async def test_of_many_creators_one_wins(storage: Storage) -> None:
    """However many create the same object at once, one succeeds and its content stays."""
    contents = [f"creator {number}".encode() for number in range(24)]
    outcomes = await asyncio.gather(*(storage.create("a/b", it) for it in contents), return_exceptions=True)
    assert winners(outcomes, "OBJECT_EXISTS") == 1
    [won] = [it for it, got in zip(contents, outcomes, strict=True) if not isinstance(got, BaseException)]
    assert (await storage.get("a/b")).data == won
    with pytest.raises(Conflict):
        await storage.create("a/b", b"too late")
    assert (await storage.get("a/b")).data == won


async def test_of_many_replacers_one_wins(storage: Storage) -> None:
    """I11: however many replace the same content at once, one succeeds and its content stays."""
    seen = await storage.create("a/b", b"old")
    contents = [f"replacer {number}".encode() for number in range(24)]
    outcomes = await asyncio.gather(
        *(storage.replace("a/b", it, etag=seen.etag) for it in contents), return_exceptions=True
    )
    assert winners(outcomes, "OBJECT_CHANGED") == 1
    [won] = [it for it, got in zip(contents, outcomes, strict=True) if not isinstance(got, BaseException)]
    assert (await storage.get("a/b")).data == won


async def test_an_old_etag_replaces_nothing(storage: Storage) -> None:
    """I11: who did not see the present content cannot replace it, be it changed, removed or never there."""
    old = await storage.put("a", b"1st")
    new = await storage.replace("a", b"2nd", etag=old.etag)
    for path, etag in (("a", old.etag), ("never", old.etag)):
        with pytest.raises(Conflict) as refused:
            await storage.replace(path, b"3rd", etag=etag)
        assert refused.value.code == "OBJECT_CHANGED"
    assert (await storage.get("a")).data == b"2nd"
    await storage.delete("a")
    with pytest.raises(Conflict):
        await storage.replace("a", b"3rd", etag=new.etag)
    assert await paths(storage) == []


async def test_a_replacement_never_buries_a_put(storage: Storage) -> None:
    """A put that meets a replacement of older content stays: before it or after it, never beneath it."""
    for number in range(20):
        seen = await storage.put("a", f"seen {number}".encode())
        await asyncio.gather(
            storage.put("a", f"put {number}".encode()),
            storage.replace("a", b"replaced", etag=seen.etag),
            return_exceptions=True,
        )
        assert (await storage.get("a")).data == f"put {number}".encode()


async def test_no_update_is_lost(storage: Storage) -> None:
    """Callers who read, add and replace until it succeeds add up, whatever they do to each other."""
    await storage.create("counter", b"0")

    async def add(times: int) -> None:
        while times:
            seen = await storage.get("counter")
            try:
                await storage.replace("counter", str(int(seen.data) + 1).encode(), etag=seen.info.etag)
            except Conflict:
                continue
            times -= 1

    await asyncio.gather(*(add(5) for _ in range(6)))
    assert (await storage.get("counter")).data == b"30"


async def test_readers_see_whole_contents_only(storage: Storage) -> None:
    """Whoever reads during replacements gets one content from its first byte to its last."""
    contents = {bytes([letter]) * (2 * MB + letter) for letter in b"abcd"}
    await storage.put("a", min(contents))
    done = asyncio.Event()

    async def read() -> int:
        count = 0
        while not done.is_set():
            assert (await storage.get("a")).data in contents
            assert b"".join([piece async for piece in storage.stream("a")]) in contents
            count += 1
        return count

    readers = [asyncio.create_task(read()) for _ in range(2)]
    for content in sorted(contents) * 3:
        await storage.put("a", content)
    done.set()
    assert min(await asyncio.gather(*readers)) > 0


async def test_a_stream_stays_with_its_content(storage: Storage) -> None:
    """A reader that began before a replacement ends with the content it began with."""
    old = bytes(range(256)) * (12 * MB // 256)
    await storage.put("a", old)
    stream = storage.stream("a")
    begun = await anext(stream)
    await storage.put("a", b"new" * len(old))
    assert begun + b"".join([piece async for piece in stream]) == old
    await storage.delete("a")


async def test_deletions_do_not_disturb_writers(storage: Storage) -> None:
    """Objects written and deleted in one folder at the same time come and go without failures."""

    async def come_and_go(name: str) -> None:
        for _ in range(15):
            await storage.create(f"deep/er/{name}", b"")
            await storage.delete(f"deep/er/{name}")

    await asyncio.gather(*(come_and_go(name) for name in "abcd"))
    assert await paths(storage) == []


# The folder alone.


async def test_a_put_waits_for_a_replacement(folder: FolderStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes between a replacement's look at the etag and its rename."""
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
    """Even writes of equal size in the same millisecond, on inodes used again, are told apart."""
    etags = [(await folder.put("a", b"same")).etag for _ in range(100)]
    assert len(set(etags)) == 100


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
            folder.info(path),
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


async def test_an_object_is_no_folder(folder: FolderStorage) -> None:
    """In a folder a path cannot be an object and lead to others; the second one is refused."""
    await folder.put("a/b", b"")
    for path in ("a", "a/b/c"):
        for call in (folder.put(path, b""), folder.create(path, b"")):
            with pytest.raises(Invalid) as refused:
                await call
            assert refused.value.code == "BAD_PATH"
    assert await paths(folder) == ["a/b"]


async def test_a_root_that_is_no_folder_is_down(tmp_path: Path) -> None:
    """When the root cannot be used every call says the storage is down, and what to check."""
    (tmp_path / "file").write_bytes(b"not a folder")
    folder = FolderStorage(tmp_path / "file")
    calls = [folder.check(), folder.put("a", b""), folder.create("a", b""), folder.get("a"), folder.delete("a")]
    for call in [*calls, anext(folder.list())]:
        with pytest.raises(Transient) as down:
            await call
        assert down.value.code == "STORAGE_DOWN"
        assert down.value.hint


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("cause", [errno.ENOSPC, errno.EACCES])
async def test_a_failed_write_leaves_the_old(
    folder: FolderStorage, root: Path, monkeypatch: pytest.MonkeyPatch, step: str, cause: int
) -> None:
    """A full disk or a lost permission is a transient failure with a hint, and nothing is half written."""
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
async def test_a_crash_leaves_the_old(folder: FolderStorage, root: Path, step: str, call: str) -> None:
    """A writer killed between writing aside and renaming changes nothing, and its rest is not listed."""
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
    await folder.put("a", b"newer: the dead writer's lock is free")


async def test_the_check_removes_stale_drafts(folder: FolderStorage, root: Path) -> None:
    """What a killed writer left is removed after a day, and not before: it may still be at work."""
    await folder.put("a", b"")
    for name, age in (("young", timedelta(hours=23)), ("stale", timedelta(hours=25))):
        draft = root / RESERVED / "drafts" / name
        draft.touch()
        then = (datetime.now(UTC) - age).timestamp()
        os.utime(draft, (then, then))
    await folder.check()
    assert [draft.name for draft in drafts(root)] == ["young"]


async def test_of_many_processes_one_creates(root: Path) -> None:
    """Processes that create the same objects at once get one winner for each."""
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
    """Processes that read, add and replace until it succeeds add up."""
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


def drafts(root: Path) -> list[Path]:
    return sorted((root / RESERVED / "drafts").iterdir())


async def run_together(program: str, root: Path, processes: int = 4) -> list[int]:
    """Run *program* in several processes that begin at the same moment; the numbers they print."""
    whole = f"""
import asyncio, pathlib, sys
from penstock.kernel.errors import Conflict
from penstock.kernel.storage.folder import FolderStorage
storage, name = FolderStorage(pathlib.Path(sys.argv[1])), sys.argv[2]
async def main():
{program}
print("ready", flush=True)
sys.stdin.readline()
asyncio.run(main())
"""
    started = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", whole, str(root), f"process {number}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(processes)
    ]
    for process in started:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
    outputs = await asyncio.gather(*(process.communicate(b"go\n") for process in started))
    return [int(output) for output, _ in outputs]


# S3 alone.


async def test_a_dead_server_is_told_quickly(s3: S3Bucket, tmp_path: Path) -> None:
    """When nobody listens every call says the storage is down within seconds, and what to check."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bucket = ObjectStorage(s3.url, {**s3.options, "endpoint": f"http://127.0.0.1:{port}"})
    await assert_down(bucket, tmp_path, within=10)


async def test_a_silent_server_is_told(s3: S3Bucket, tmp_path: Path) -> None:
    """A server that takes the connection and never answers does not hold a call beyond its time-out."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        bucket = ObjectStorage(s3.url, {**s3.options, "endpoint": endpoint, "read_timeout": "50ms"})
        await assert_down(bucket, tmp_path, within=10)


async def assert_down(bucket: ObjectStorage, tmp_path: Path, *, within: float) -> None:
    (tmp_path / "file").write_bytes(b"content")
    calls = [
        bucket.put("a", b""),
        bucket.create("a", b""),
        bucket.replace("a", b"", etag="any"),
        bucket.put_file("a", tmp_path / "file"),
        bucket.get("a"),
        bucket.info("a"),
        bucket.delete("a"),
        bucket.check(),
        anext(bucket.list()),
        anext(bucket.stream("a")),
    ]
    async with asyncio.timeout(within):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, Transient) and outcome.hint for outcome in outcomes)
    assert {outcome.code for outcome in outcomes if isinstance(outcome, PenstockError)} == {"STORAGE_DOWN"}


async def test_a_missing_bucket_is_down(s3: S3Bucket) -> None:
    """A bucket that is not there is a storage that does not work, not an object that is missing."""
    bucket = ObjectStorage("s3://penstock-nowhere/prefix", s3.options)
    calls = [bucket.put("a", b""), bucket.create("a", b""), bucket.replace("a", b"", etag="any")]
    for call in [*calls, bucket.get("a"), bucket.delete("a"), bucket.check(), anext(bucket.list())]:
        with pytest.raises(Transient) as down:
            await call
        assert down.value.code == "STORAGE_DOWN"


async def test_only_objects_are_listed(s3: S3Bucket) -> None:
    """Neither a console's folder markers are listed, nor a check's probe, be it left behind by a crash."""
    outer = ObjectStorage(f"{s3.url}/outer", s3.options)
    inner = ObjectStorage(f"{s3.url}/outer/inner", s3.options)
    await inner.check()
    assert await paths(outer) == []
    await outer.put(f"inner/{RESERVED}/probe", b"")
    await inner.put("folder/empty", b"")
    async with httpx.AsyncClient(trust_env=False) as console:
        for marker in ("", "folder/"):
            (await console.put(object_url(s3, f"outer/inner/{marker}"))).raise_for_status()
    assert await paths(inner) == await paths(inner, "folder") == ["folder/empty"]


def object_url(s3: S3Bucket, key: str) -> str:
    return f"{s3.options['endpoint']}/{s3.url.removeprefix('s3://')}/{key}"


async def test_a_broken_stream_never_ends_early(s3: S3Bucket) -> None:
    """A connection that breaks amid an object is a failure, never a shorter object."""

    async def answer_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = 'HTTP/1.1 200 OK\r\nETag: "x"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n'
        writer.write(head.encode() + b"Content-Length: 2000000\r\n\r\n" + b"x" * 1_000_000)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_half, "127.0.0.1", 0)
    async with server:
        endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        bucket = ObjectStorage(s3.url, {**s3.options, "endpoint": endpoint})
        with pytest.raises(Transient):
            _ = [piece async for piece in bucket.stream("a")]


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("nonsense", {}),
        ("file:///tmp", {}),
        ("s3://", {}),
        ("s3://bucket", {"regoin": "us-east-1"}),
        ("s3://bucket", {"timeout": "soon"}),
    ],
)
def test_a_bad_bucket_is_refused_at_once(url: str, options: dict[str, str]) -> None:
    """A url or an option that makes no sense is told when the storage is set up."""
    with pytest.raises(BadConfig) as refused:
        ObjectStorage(url, options)
    assert refused.value.code == "BAD_STORAGE"
