"""R17–R25: order, limits, grants and versions on the fast path."""

import asyncio
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest

from penstock.kernel.http.client import HttpResponse
from penstock.refdata.client import PodClient
from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.memory.writer import MemoryWriter
from penstock.refdata.pod.serve.connection import PodConnection
from penstock.refdata.pod.serve.router import Router
from penstock.refdata.sdk import Dictionaries
from penstock.settings import Settings
from tests.refdata.pod.harness import PodHarness, running_pod
from tests.refdata.pod.raw_client import (
    ACME,
    LOCAL,
    RawConnection,
    SlowPage,
    connected,
    make_request,
    wait_until_blocked,
)
from tests.refdata.pod.serve.test_router import bearer, guard, token
from tests.support.wait import becomes

A = make_request(f"{ACME}/items/a")
LOOSE = DictionaryKey("acme", "LOOSE")


async def warm(raw: RawConnection, request: bytes = A) -> None:
    """Send requests until the next one uses the fast path."""
    assert [(await raw.ask(request)).status for _ in range(3)] == [200] * 3


@pytest.fixture
async def filled(pod: PodHarness) -> PodHarness:
    await pod.put_and_load("LOOSE", {"a": 1})
    return pod


def _only(pod: PodHarness) -> PodConnection:
    (connection,) = pod.server._connections
    return connection


async def test_the_fast_path_respects_the_barrier_after_a_pin(filled: PodHarness) -> None:
    """R21, R30: known headers do not allow a version below their barrier after a pin."""
    first = await filled.harness.refdata.retention.retain(LOOSE)
    version = await filled.put_and_load("LOOSE", {"a": 2})
    request = make_request(f"{ACME}/items/a", LOCAL, f"X-Min-Version: {version}")
    async with connected(filled.address) as raw:
        await warm(raw, request)
        await filled.harness.refdata.retention.pin(LOOSE, first)

        async def is_pinned() -> bool:
            return (await filled.get("LOOSE/items/a")).version == first

        await becomes(is_pinned, "the pinned version")
        refused = await raw.ask(request)
        assert (refused.status, refused.code) == (409, "VERSION_PINNED")


async def test_a_warm_connection_sees_a_swap_at_once(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18: the next request after a load sees it, without a tick."""
    async with connected(filled.address) as raw:
        await warm(raw)
        monkeypatch.setattr(Router, "tick", lambda _router: None)
        version = await filled.put_and_load("LOOSE", {"a": 2})
        answer = await raw.ask(A)
        assert (answer.body, answer.headers["x-dict-version"]) == (b"2", str(version))


async def test_a_grant_ends_on_the_fast_path(
    pod_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R25: an expired grant is verified again on a warm connection, even if the dictionary is read by others."""
    async with running_pod(pod_settings, tmp_path, guard()) as pod:
        await pod.put_and_load("LOOSE", {"a": 1})
        authorization = bearer(token())
        request = make_request(f"{ACME}/items/a", LOCAL, authorization)
        async with connected(pod.address) as raw:
            await warm(raw, request)
            given, grants = authorization.removeprefix("Authorization: ").encode(), pod.server.router.grants
            asked = pod.server._authenticator.authenticate
            seen: list[str | None] = []

            async def noted(authorization: str | None) -> object:
                seen.append(authorization)
                return await asked(authorization)

            monkeypatch.setattr(pod.server._authenticator, "authenticate", noted)
            grants[given] = grants[given]._replace(until=pod.server.router.now - 1)
            assert pod.server.router.find_entry(LOOSE) is not None  # as after a read by another client
            assert (await raw.ask(request)).status == 200
            assert seen == [given.decode()]


async def test_the_fast_path_keeps_the_order(filled: PodHarness) -> None:
    """R17: a request behind a slow one is answered after it."""
    await filled.session.close()
    slow = SlowPage(filled)
    async with connected(filled.address) as raw:
        await warm(raw)
        raw.writer.write(make_request(slow.path))
        await slow.is_asked.wait()
        first, connection = asyncio.create_task(raw.reply()), _only(filled)
        assert filled.server.router.find_entry(LOOSE) is not None  # so that the fast path is possible
        raw.writer.write(A)

        async def is_taken() -> bool:
            return bool(connection._waiting) or first.done()

        await becomes(is_taken, "the second request to be taken")
        slow.may_answer.set()
        assert [(await first).body, (await raw.reply()).body] == [b"at last", b"1"]


async def test_the_fast_path_counts_as_activity(filled: PodHarness) -> None:
    """R17: a client on the fast path is not closed as idle."""
    await filled.session.close()
    async with connected(filled.address) as raw:
        await warm(raw)
        connection = _only(filled)
        connection._since -= 1_000
        assert (await raw.ask(A)).status == 200
        connection.sweep(monotonic())
        assert (await raw.ask(A)).status == 200


async def test_a_drain_closes_warm_connections(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: the last response on the fast path has `Connection: close`, and the connection ends."""
    monkeypatch.setattr("penstock.refdata.pod.serve.server._SWEEP_INTERVAL", 3600.0)  # no timeout closes them
    async with connected(filled.address) as raw, connected(filled.address) as other:
        for connection in (raw, other):
            await warm(connection)
        filled.server.router.drain()
        for connection in (other, raw):
            assert (await connection.ask(A)).is_last
            assert await connection.rest() == b""


async def test_a_stream_waits_for_its_reader(filled: PodHarness) -> None:
    """R17: for a client that does not read, the pod buffers one piece of a stream."""
    for part in range(10):
        version = await filled.put("LOOSE", {f"k{part}.{number}": "x" * 4_000 for number in range(200)})
    await filled.load("LOOSE", version)
    async with connected(filled.address, is_narrow=True) as raw:
        raw.writer.write(make_request(f"{ACME}/all", LOCAL, "Accept: application/x-ndjson"))
        transport = await wait_until_blocked(filled)
        for _ in range(200):  # turns of the event loop: enough for all pieces
            await asyncio.sleep(0)
        assert transport.get_write_buffer_size() < 4_000_000


async def test_pipelined_requests_are_limited(filled: PodHarness) -> None:
    """R17: while a response is pending, the pod stops reading after a number of requests."""
    await filled.session.close()
    slow = SlowPage(filled)
    async with connected(filled.address) as raw:
        raw.writer.write(make_request(slow.path))
        await slow.is_asked.wait()
        raw.writer.write(A * 1_000)

        async def is_read_no_more() -> bool:
            return not _only(filled)._transport.is_reading()

        await becomes(is_read_no_more, "the pod to have enough", within=10)
        slow.may_answer.set()
        assert (await raw.reply()).body == b"at last"
        assert {(await raw.reply()).body for _ in range(1_000)} == {b"1"}


async def test_a_client_reads_no_older_than_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """R31: the Python client requires the versions it has seen, by dictionary, in every pod."""
    asked: list[int | None] = []
    versions = iter([5, 9, 7, 9])

    async def item(
        _pod: PodClient, _tenant: str, _code: str, _key: str, *, min_version: int | None = None
    ) -> HttpResponse:
        asked.append(min_version)
        return HttpResponse(200, {"X-Dict-Version": str(next(versions))}, b"1")

    monkeypatch.setattr(PodClient, "item", item)
    client = Dictionaries("http://localhost", "http://localhost", "acme")
    for code in ("LOOSE", "LOOSE", "LOOSE", "LOOSE"):
        assert await client.get(code, "a") == 1
    assert (asked, client.versions) == ([None, 5, 9, 9], {"LOOSE": 9})


async def test_pages_that_are_full_before_their_limit_go_on(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a page can end at its size; all pages together contain all items."""
    monkeypatch.setattr("penstock.refdata.pod.serve.handlers._PAGE_SIZE", 300)
    items = {f"k{number:02}": number for number in range(20)}
    await pod.put_and_load("LOOSE", items)
    found: dict[str, int] = {}
    after, pages = "", 0
    while after is not None:
        page = (await pod.get(f"LOOSE/all{after and '?cursor=' + after}")).json
        found |= {item["key"]: item["value"] for item in page["items"]}
        after, pages = page["next"], pages + 1
    assert found == items
    assert pages > 3


async def test_requests_are_counted_by_status(filled: PodHarness) -> None:
    """R26: each response is counted by status on both paths, and waits for a version are counted."""

    def counted(name: str = "requests", **labels: str) -> float:
        found = filled.pod._telemetry.registry.get_sample_value(f"penstock_query_{name}_total", labels)
        assert found is not None
        return found

    statuses = ("2xx", "304", "4xx", "404", "409", "5xx")
    async with connected(filled.address) as raw:
        await warm(raw)
        filled.server._tick()  # responses on the fast path are counted at a tick
        before, waits = [counted(status=status) for status in statuses], counted("barrier_waits")
        await warm(raw)
        for path, header, status in [
            ("items/a", "If-None-Match: *", 304),
            ("items/a", "X-Min-Version: x", 400),
            ("items/none", "Accept: */*", 404),
            ("items/a", "X-Min-Version: 99", 409),
        ]:
            assert (await raw.ask(make_request(f"{ACME}/{path}", LOCAL, header))).status == status
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.refdata.pod.serve.streams._STREAM_LIMIT", 0)
            assert (await raw.ask(make_request(f"{ACME}/changes"))).status == 503
        filled.server._tick()
        after = [counted(status=status) for status in statuses]
        assert [now - then for now, then in zip(after, before, strict=True)] == [3, 1, 1, 1, 1, 1]
        assert counted("barrier_waits") == waits + 1


async def test_a_broken_stream_aborts_the_connection(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: an incomplete stream has no end of chunks; the next request gets all items."""
    request = make_request(f"{ACME}/all", LOCAL, "Accept: application/x-ndjson")
    async with connected(filled.address) as raw:
        with monkeypatch.context() as patch:
            patch.setattr("penstock.refdata.pod.serve.streams._STREAM_TIMEOUT", -1.0)
            raw.writer.write(request)
            data = b""
            with suppress(ConnectionResetError):
                async with asyncio.timeout(10):
                    while piece := await raw.reader.read(1):
                        data += piece
        assert not data.endswith(b"0\r\n\r\n")
    async with connected(filled.address) as raw:
        assert (await raw.ask(request)).body == b'{"key":"a","value":1}\n'


async def test_internal_errors_are_answered(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: an exception in the loader or the server is 500 with a request id, and the connection continues."""

    async def broken(_given: object) -> None:
        raise RuntimeError("a mistake of ours")

    async with connected(filled.address) as raw:
        for owner, name in ((filled.pod.request_handler, "_pages"), (filled.server, "handle")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, broken)
                refused = await raw.ask(make_request("/docs"))
            assert (refused.status, refused.code) == (500, "INTERNAL")
        assert (await raw.ask(A)).status == 200


async def test_closed_connections_are_not_counted(filled: PodHarness) -> None:
    """R26: the metric contains only open connections."""

    def count() -> float | None:
        return filled.pod._telemetry.registry.get_sample_value("penstock_query_connections")

    before = count()
    async with connected(filled.address) as raw:
        await warm(raw)
        assert count() != before

    async def has_left() -> bool:
        return count() == before

    await becomes(has_left, "one connection less", within=10)


def test_only_one_previous_generation_is_kept(tmp_path: Path) -> None:
    """R29: during frequent full loads memory contains the last two generations."""
    memory = MemoryWriter(tmp_path, limit=16 * 1024 * 1024)
    for version in range(1, 6):
        generation = memory.begin_generation()
        memory.publish(LOOSE, generation, VersionStamp(version, version), memory.fill(generation, [("a", "1")]))
    while memory.free():
        pass
    assert memory._env.stat()["entries"] == 1 + 2 * 2  # the header, and for each generation its record and its item
    memory.close()
