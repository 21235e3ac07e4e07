"""Properties of storage on S3 only. The guarantees of every storage are in test_storage."""

import asyncio
import socket
from pathlib import Path

import httpx
import pytest

from penstock.kernel.errors import Transient
from penstock.kernel.storage import RESERVED
from penstock.kernel.storage.objects import ObjectStorage
from tests.kernel.storage.contents import assert_down, object_url, paths
from tests.services.s3 import S3Bucket


async def test_a_dead_server_is_detected_quickly(s3: S3Bucket, tmp_path: Path) -> None:
    """If no server listens, every method is STORAGE_DOWN with a hint within seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bucket = ObjectStorage(s3.url, {**s3.options, "endpoint": f"http://127.0.0.1:{port}"})
    await assert_down(bucket, tmp_path, within=10)


async def test_a_silent_server_is_detected(s3: S3Bucket, tmp_path: Path) -> None:
    """A server that accepts the connection and never answers does not block a call beyond its timeout."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        bucket = ObjectStorage(s3.url, {**s3.options, "endpoint": endpoint, "read_timeout": "50ms"})
        await assert_down(bucket, tmp_path, within=10)


async def test_a_missing_bucket_is_down(s3: S3Bucket) -> None:
    """A missing bucket is STORAGE_DOWN, not a missing object."""
    bucket = ObjectStorage("s3://penstock-nowhere/prefix", s3.options)
    calls = [bucket.put("a", b""), bucket.create("a", b""), bucket.replace("a", b"", etag="any")]
    for call in [*calls, bucket.get("a"), bucket.delete("a"), bucket.check(), anext(bucket.list())]:
        with pytest.raises(Transient) as down:
            await call
        assert down.value.code == "STORAGE_DOWN"


async def test_only_objects_are_listed(s3: S3Bucket) -> None:
    """Folder markers of consoles and probes of the check are not listed, also after a crash."""
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


async def test_a_broken_stream_never_ends_early(s3: S3Bucket) -> None:
    """A connection that breaks during an object is an error, never a shorter object."""

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
