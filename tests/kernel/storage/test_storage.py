"""The guarantees of the storage port, for the folder and for S3."""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.kernel.errors import Conflict, Invalid, NotFound
from penstock.kernel.storage import PATH_LIMIT, RESERVED, SEGMENT_LIMIT, Storage
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.storage.objects import ObjectStorage
from tests.kernel.storage.contents import paths
from tests.services.s3 import S3Bucket

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


def winners(outcomes: Sequence[object], code: str) -> int:
    """Return the number of successes; all others must have failed with *code*."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert {failure.code for failure in failures if isinstance(failure, Conflict)} <= {code}
    assert all(isinstance(failure, Conflict) for failure in failures)
    return len(outcomes) - len(failures)


# One caller.


async def test_a_put_object_is_read(storage: Storage) -> None:
    """A read returns the whole object, and all methods return the same metadata."""
    written = await storage.put("a/b/object", b"content")
    stored = await storage.get("a/b/object")
    assert stored.data == b"content"
    assert (stored.info.path, stored.info.size, stored.info.etag) == ("a/b/object", 7, written.etag)
    assert await storage.read_info("a/b/object") == stored.info
    assert [info async for info in storage.list()] == [stored.info]
    assert b"".join([piece async for piece in storage.stream("a/b/object")]) == b"content"
    assert abs(written.modified_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert abs(stored.info.modified_at - written.modified_at) < timedelta(minutes=1)


async def test_put_replaces(storage: Storage) -> None:
    """A put replaces any content, and the etag changes with the content."""
    first = await storage.put("a", b"old content")
    second = await storage.put("a", b"new")
    assert (await storage.get("a")).data == b"new"
    assert first.etag != second.etag


async def test_an_object_may_be_empty(storage: Storage, tmp_path: Path) -> None:
    """An empty object can be stored from bytes and from a file."""
    (tmp_path / "empty").touch()
    await storage.create("created", b"")
    await storage.put_file("filed", tmp_path / "empty")
    for path in ("created", "filed"):
        assert (await storage.get(path)).data == b""
        assert [piece async for piece in storage.stream(path)] == []
        assert (await storage.get(path)).info.size == 0


async def test_a_missing_object_is_not_found(storage: Storage) -> None:
    """Reading a missing object is NotFound; its info is None."""
    await storage.put("a/b", b"")
    for path in ("nothing", "a", "a/nothing", "a/b/c"):
        with pytest.raises(NotFound) as got:
            await storage.get(path)
        with pytest.raises(NotFound) as streamed:
            await anext(storage.stream(path))
        assert got.value.code == streamed.value.code == "OBJECT_NOT_FOUND"
        assert await storage.read_info(path) is None


async def test_deleting_twice_succeeds(storage: Storage) -> None:
    """A deletion succeeds whether or not the object existed."""
    await storage.put("a/b/c", b"")
    for path in ("a/b/c", "a/b/c", "a", "never/was"):
        await storage.delete(path)
    assert await paths(storage) == []
    await storage.put("a", b"the name of a deleted folder is free")
    assert await paths(storage) == ["a"]


async def test_a_missing_source_file_is_refused(storage: Storage, tmp_path: Path) -> None:
    """Storing from a missing file or a folder is Invalid, and stores nothing."""
    for source in (tmp_path / "nothing", tmp_path):
        with pytest.raises(Invalid) as refused:
            await storage.put_file("a", source)
        assert refused.value.code == "NO_SOURCE"
    assert await paths(storage) == []


@pytest.mark.parametrize("path", BAD_PATHS.values(), ids=BAD_PATHS.keys())
async def test_a_bad_path_is_refused(storage: Storage, path: str, tmp_path: Path) -> None:
    """Every method refuses a path that is not safe in every store, before it does anything."""
    calls = [
        storage.put(path, b""),
        storage.create(path, b""),
        storage.replace(path, b"", etag="any"),
        storage.put_file(path, Path(__file__)),
        storage.get(path),
        storage.read_info(path),
        storage.delete(path),
        anext(storage.stream(path)),
        *([anext(storage.list(path))] if path else []),
        asyncio.to_thread(storage.make_uri, path),
    ]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [outcome.code for outcome in outcomes if isinstance(outcome, Invalid)] == ["BAD_PATH"] * len(calls)
    assert not list(tmp_path.iterdir())


async def test_unusual_names_are_allowed(storage: Storage) -> None:
    """Every printable text is a valid name, and is listed unchanged."""
    longest = "/".join(["y" * 99] * 9)
    assert len(longest) == PATH_LIMIT - 1
    for path in [*ODD_NAMES, longest]:
        await storage.create(path, path.encode())
    assert await paths(storage) == sorted([*ODD_NAMES, longest])
    for path in [*ODD_NAMES, longest]:
        assert (await storage.get(path)).data == path.encode()


async def test_a_uri_locates_the_object(folder: FolderStorage, root: Path, s3: S3Bucket) -> None:
    """A person or another program can find the object by its URI."""
    assert folder.make_uri("a/ü b") == (root / "a" / "ü b").as_uri()
    assert ObjectStorage(f"{s3.url}/p/", s3.options).make_uri("a/b") == f"{s3.url}/p/a/b"


async def test_check_leaves_nothing(storage: Storage) -> None:
    """A working store passes the check, which leaves no listed object."""
    await storage.put("a", b"")
    await storage.check()
    assert await paths(storage) == ["a"]


# Listing.


async def test_a_prefix_is_whole_segments(storage: Storage) -> None:
    """A listing of a folder contains its objects, and no others with the same prefix of characters."""
    for path in ("a/b", "a/bc", "a/b.d/e", "a/c/d", "a/c/e/f", "a/cd/x"):
        await storage.put(path, b"")
    assert await paths(storage, "a/c") == ["a/c/d", "a/c/e/f"]
    assert await paths(storage, "a/b") == []
    assert await paths(storage, "nowhere") == []


async def test_a_listing_is_ordered_by_path(storage: Storage) -> None:
    """Objects are ordered by their whole paths, not folder by folder."""
    for path in ("b", "a0", "a/z", "a/b/c", "a.x", "a-x/y", "a/b.c", "A", "ä", "a/b-"):
        await storage.put(path, b"")
    assert await paths(storage) == ["A", "a-x/y", "a.x", "a/b-", "a/b.c", "a/b/c", "a/z", "a0", "b", "ä"]


@pytest.mark.full
async def test_a_long_listing_is_complete(storage: Storage) -> None:
    """More objects than fit on a page of the store are all listed once and in order."""
    expected = [f"many/{number:04}" for number in range(1_050)]
    gate = asyncio.Semaphore(16)

    async def put(path: str) -> None:
        async with gate:
            await storage.put(path, b"x")

    await asyncio.gather(*map(put, reversed(expected)))
    assert await paths(storage) == expected


async def test_a_stream_can_require_an_etag(storage: Storage) -> None:
    """A stream with an etag has this content, or fails if the object was changed or deleted."""
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
    """A file of many megabytes is stored and streamed unchanged, in pieces of limited size."""
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
    info = await storage.read_info("large")
    assert info is not None
    assert info.etag == written.etag


# Concurrent callers.


async def test_one_of_many_creators_succeeds(storage: Storage) -> None:
    """Of concurrent creations of one object one succeeds, and its content remains."""
    contents = [f"creator {number}".encode() for number in range(24)]
    outcomes = await asyncio.gather(*(storage.create("a/b", content) for content in contents), return_exceptions=True)
    assert winners(outcomes, "OBJECT_EXISTS") == 1
    [written] = [content for content, got in zip(contents, outcomes, strict=True) if not isinstance(got, BaseException)]
    assert (await storage.get("a/b")).data == written
    with pytest.raises(Conflict):
        await storage.create("a/b", b"too late")
    assert (await storage.get("a/b")).data == written


async def test_one_of_many_replacements_succeeds(storage: Storage) -> None:
    """I11: of concurrent replacements of one content one succeeds, and its content remains."""
    seen = await storage.create("a/b", b"old")
    contents = [f"replacer {number}".encode() for number in range(24)]
    outcomes = await asyncio.gather(
        *(storage.replace("a/b", content, etag=seen.etag) for content in contents), return_exceptions=True
    )
    assert winners(outcomes, "OBJECT_CHANGED") == 1
    [written] = [content for content, got in zip(contents, outcomes, strict=True) if not isinstance(got, BaseException)]
    assert (await storage.get("a/b")).data == written


async def test_an_old_etag_replaces_nothing(storage: Storage) -> None:
    """I11: an object that was changed or deleted, or never existed, cannot be replaced with an old etag."""
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


async def test_a_replacement_never_overwrites_a_concurrent_put(storage: Storage) -> None:
    """The content of a put remains, whether a concurrent replacement of older content is before or after it."""
    for number in range(20):
        seen = await storage.put("a", f"seen {number}".encode())
        await asyncio.gather(
            storage.put("a", f"put {number}".encode()),
            storage.replace("a", b"replaced", etag=seen.etag),
            return_exceptions=True,
        )
        assert (await storage.get("a")).data == f"put {number}".encode()


async def test_no_update_is_lost(storage: Storage) -> None:
    """Concurrent callers that read, add and replace until it succeeds lose no update."""
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


async def test_readers_see_complete_contents_only(storage: Storage) -> None:
    """A read during replacements returns one content completely."""
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


async def test_a_stream_has_one_content(storage: Storage) -> None:
    """A stream that started before a replacement continues with the old content."""
    old = bytes(range(256)) * (12 * MB // 256)
    await storage.put("a", old)
    stream = storage.stream("a")
    first = await anext(stream)
    await storage.put("a", b"new" * len(old))
    assert first + b"".join([piece async for piece in stream]) == old
    await storage.delete("a")


async def test_deletions_do_not_disturb_writers(storage: Storage) -> None:
    """Concurrent writes and deletions in one folder do not fail."""

    async def come_and_go(name: str) -> None:
        for _ in range(15):
            await storage.create(f"deep/er/{name}", b"")
            await storage.delete(f"deep/er/{name}")

    await asyncio.gather(*(come_and_go(name) for name in "abcd"))
    assert await paths(storage) == []
