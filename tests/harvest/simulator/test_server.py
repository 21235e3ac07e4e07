"""H17: connections of the simulator, on a raw socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import orjson
import pytest

from penstock.harvest.simulator.faults import Faults, Rates
from penstock.harvest.simulator.server import LocalOptions, LocalSource, run_local_source
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import Conflict, Invalid
from tests.harvest.simulator.client import LocalSourceClient, sort_by_price
from tests.support.types import Json


class RawConnection:
    """A connection with access to its bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read_response(self) -> tuple[int, Json]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        length = next(int(line.split()[1]) for line in head if line.startswith("content-length"))
        return int(head[0].split()[1]), orjson.loads(await self.reader.readexactly(length))


@pytest.fixture
async def raw(source: LocalSource) -> AsyncIterator[RawConnection]:
    reader, writer = await asyncio.open_connection(*source.url.removeprefix("http://").split(":"))
    yield RawConnection(reader, writer)
    writer.close()
    await writer.wait_closed()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.mark.parametrize("faults", [Faults(), Faults(latency_ms=1), Faults(rate_timeout=0.5, timeout_for=0.01)])
async def test_pipelined_requests(raw: RawConnection, source: LocalSource, faults: Faults) -> None:
    """H17: pipelined requests, split at any byte, get their responses in order, even with delays."""
    source.set_faults(faults)
    body = b'{"updates":0}'
    post = b"POST /admin/changes HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    sent = b"".join(get(f"/records?offset={offset}&limit=1") for offset in range(40)) + post + get("/records/count")
    for start in range(0, len(sent), 701):
        raw.writer.write(sent[start : start + 701])
        await raw.writer.drain()
    pages = [await raw.read_response() for _ in range(40)]
    assert [page["items"][0] for _, page in pages] == sort_by_price(source.read_truth())[:40]
    assert (await raw.read_response())[1]["updated"] == []
    assert await raw.read_response() == (200, {"total": 400})


async def test_invalid_http(raw: RawConnection) -> None:
    """H17: the response is 400, and the connection ends."""
    raw.writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    assert (await raw.reader.read()).startswith(b"HTTP/1.1 400 Bad Request\r\n")


async def test_size_of_a_body_is_limited(raw: RawConnection) -> None:
    """H17: a body has at most one megabyte."""
    raw.writer.write(b"POST /graphql HTTP/1.1\r\nContent-Length: 1000001\r\n\r\n" + b" " * 1_000_001)
    assert (await raw.read_response())[0] == 400


async def test_connection_close(raw: RawConnection) -> None:
    """H17: the connection is closed on request, also after a response in pieces."""
    raw.writer.write(b"GET /admin/records HTTP/1.1\r\nConnection: close\r\n\r\n")
    response = await raw.reader.read()
    assert response.count(b"\n{") == 400
    assert b"connection: close\r\n" in response


async def test_long_response(clock: ManualClock) -> None:
    """H17: a response larger than any buffer is complete, and so is the response after it."""
    async with run_local_source(LocalOptions(records=20_000), clock) as source:
        reader, writer = await asyncio.open_connection(*source.url.removeprefix("http://").split(":"))
        writer.write(get("/admin/records") + get("/records/count"))
        await reader.readuntil(b"\r\n\r\n")
        lines = [await reader.readline() for _ in range(20_000)]
        assert [orjson.loads(line)["id"] for line in lines] == sorted(source.read_truth())
        assert await RawConnection(reader, writer).read_response() == (200, {"total": 20_000})
        writer.close()
        await writer.wait_closed()


async def test_only_loopback_addresses_are_served(source: LocalSource) -> None:
    """H17: other addresses and used ports are errors."""
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.com"):
        with pytest.raises(Invalid):
            await run_local_source(LocalOptions(records=1, host=host)).__aenter__()
    with pytest.raises(Conflict):
        await run_local_source(LocalOptions(records=1, port=int(source.url.rpartition(":")[2]))).__aenter__()
    async with (
        run_local_source(LocalOptions(records=3, host="localhost")) as other,
        LocalSourceClient.of(other.url) as client,
    ):
        assert (await client.get("/records"))["total"] == 3


async def test_end_of_the_block_ends_every_connection(clock: ManualClock) -> None:
    """H17: waiting clients are disconnected, and background changes end."""
    options = LocalOptions(records=1, faults=Faults(rate_timeout=1), churn=Rates(inserts=1))
    async with run_local_source(options, clock) as source:
        reader, writer = await asyncio.open_connection(*source.url.removeprefix("http://").split(":"))
        writer.write(get("/records") + get("/admin/stats"))
        await writer.drain()
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    assert source._routes.churn._timer is None
    assert reader.at_eof() or reader.exception() is not None
    writer.close()
