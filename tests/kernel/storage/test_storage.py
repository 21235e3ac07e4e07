"""The storage port's promises, kept by the folder and by S3 alike."""

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
