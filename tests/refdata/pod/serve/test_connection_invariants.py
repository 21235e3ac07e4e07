"""R17–R25: what a connection keeps to also where requests are answered straight: order, limits, grants, versions."""

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
from tests.refdata.pod.raw_client import ACME, LOCAL, RawConnection, SlowPage, asking, connected, stuck
from tests.refdata.pod.serve.test_router import bearer, guard, token
from tests.support.wait import becomes

A = asking(f"{ACME}/items/a")
LOOSE = DictionaryKey("acme", "LOOSE")


async def warm(raw: RawConnection, request: bytes = A) -> None:
    """Ask so often that the next answer is a straight one."""
    assert [(await raw.ask(request)).status for _ in range(3)] == [200] * 3


@pytest.fixture
async def filled(pod: PodHarness) -> PodHarness:
    await pod.hold("LOOSE", {"a": 1})
    return pod


def _only(pod: PodHarness) -> PodConnection:
    (connection,) = pod.server._connections
    return connection


async def test_a_warm_connection_is_refused_what_was_taken_back(filled: PodHarness) -> None:
    """R21, R30: a head that was good once is no leave to read less than it names, when readers are sent back."""
    first = await filled.harness.refdata.retention.retain(LOOSE)
    version = await filled.hold("LOOSE", {"a": 2})
    request = asking(f"{ACME}/items/a", LOCAL, f"X-Min-Version: {version}")
    async with connected(filled.address) as raw:
        await warm(raw, request)
        await filled.harness.refdata.retention.pin(LOOSE, first)

        async def is_pinned() -> bool:
            return (await filled.get("LOOSE/items/a")).version == first

        await becomes(is_pinned, "the pinned version")
        refused = await raw.ask(request)
        assert (refused.status, refused.code) == (409, "VERSION_PINNED")


async def test_a_warm_connection_sees_a_swap_at_once(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18: the next request after a swap sees it, not the next after the pod looked at its clock."""
    async with connected(filled.address) as raw:
        await warm(raw)
        monkeypatch.setattr(Router, "tick", lambda _router: None)
        version = await filled.hold("LOOSE", {"a": 2})
        answer = await raw.ask(A)
        assert (answer.body, answer.headers["x-dict-version"]) == (b"2", str(version))


async def test_a_grant_ends_though_others_read_on(
    pod_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R25: a token that is good no more is looked at again on a warm connection, however busy its dictionary is."""
    async with running_pod(pod_settings, tmp_path, guard()) as pod:
        await pod.hold("LOOSE", {"a": 1})
        authorization = bearer(token())
        request = asking(f"{ACME}/items/a", LOCAL, authorization)
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
            assert pod.server.router.find_entry(LOOSE) is not None  # as whoever else reads it just now leaves it
            assert (await raw.ask(request)).status == 200
            assert seen == [given.decode()]


async def test_a_straight_answer_waits_for_its_turn(filled: PodHarness) -> None:
    """R17: a request that comes alone, behind a slow one that is under way, is answered after it."""
    await filled.session.close()
    slow = SlowPage(filled)
    async with connected(filled.address) as raw:
        await warm(raw)
        raw.writer.write(asking(slow.path))
        await slow.is_asked.wait()
        first, connection = asyncio.create_task(raw.reply()), _only(filled)
        assert filled.server.router.find_entry(LOOSE) is not None  # so that there is a straight way
        raw.writer.write(A)

        async def is_taken() -> bool:
            return bool(connection._waiting) or first.done()

        await becomes(is_taken, "the second request to be taken")
        slow.may_answer.set()
        assert [(await first).body, (await raw.reply()).body] == [b"at last", b"1"]


async def test_who_is_answered_straight_is_not_silent(filled: PodHarness) -> None:
    """R17: a client that asks is not let go, though nobody reads its heads any more."""
    await filled.session.close()
    async with connected(filled.address) as raw:
        await warm(raw)
        connection = _only(filled)
        connection._since -= 1_000
        assert (await raw.ask(A)).status == 200
        connection.sweep(monotonic())
        assert (await raw.ask(A)).status == 200


async def test_a_pod_that_stops_lets_warm_connections_go(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: the last straight answer says that it is the last, and is."""
    monkeypatch.setattr("penstock.refdata.pod.serve.server._SWEEP_INTERVAL", 3600.0)  # nobody else lets them go
    async with connected(filled.address) as raw, connected(filled.address) as other:
        for one in (raw, other):
            await warm(one)
        filled.server.router.drain()
        for one in (other, raw):
            assert (await one.ask(A)).is_last
            assert await one.rest() == b""


async def test_a_stream_is_no_quicker_than_its_reader(filled: PodHarness) -> None:
    """R17: of all items the pod holds a piece for whoever does not read, not all of them."""
    for part in range(10):
        version = await filled.put("LOOSE", {f"k{part}.{number}": "x" * 4_000 for number in range(200)})
    await filled.holds("LOOSE", version)
    async with connected(filled.address, is_narrow=True) as raw:
        raw.writer.write(asking(f"{ACME}/all", LOCAL, "Accept: application/x-ndjson"))
        transport = await stuck(filled)
        for _ in range(200):  # turns of the loop: enough for every piece, if nobody waits
            await asyncio.sleep(0)
        assert transport.get_write_buffer_size() < 4_000_000


async def test_requests_behind_a_slow_one_are_not_piled_up(filled: PodHarness) -> None:
    """R17: while an answer is due, whoever sends on and on is not read on and on."""
    await filled.session.close()
    slow = SlowPage(filled)
    async with connected(filled.address) as raw:
        raw.writer.write(asking(slow.path))
        await slow.is_asked.wait()
        raw.writer.write(A * 1_000)

        async def is_read_no_more() -> bool:
            return not _only(filled)._transport.is_reading()

        await becomes(is_read_no_more, "the pod to have enough", within=10)
        slow.may_answer.set()
        assert (await raw.reply()).body == b"at last"
        assert {(await raw.reply()).body for _ in range(1_000)} == {b"1"}


async def test_a_client_reads_no_older_than_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """R31: whatever pod answers next: what was seen is asked for, by dictionary, and nothing forgets it."""
    asked: list[int | None] = []
    told = iter([5, 9, 7, 9])

    async def item(
        _pod: PodClient, _tenant: str, _code: str, _key: str, *, min_version: int | None = None
    ) -> HttpResponse:
        asked.append(min_version)
        return HttpResponse(200, {"X-Dict-Version": str(next(told))}, b"1")

    monkeypatch.setattr(PodClient, "item", item)
    client = Dictionaries("http://localhost", "http://localhost", "acme")
    for code in ("LOOSE", "LOOSE", "LOOSE", "LOOSE"):
        assert await client.get(code, "a") == 1
    assert (asked, client.versions) == ([None, 5, 9, 9], {"LOOSE": 9})


async def test_pages_that_are_full_before_their_limit_go_on(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a page may end at its size, too; whatever ends it, all pages together are all items."""
    monkeypatch.setattr("penstock.refdata.pod.serve.handlers._PAGE_SIZE", 300)
    items = {f"k{number:02}": number for number in range(20)}
    await pod.hold("LOOSE", items)
    found: dict[str, int] = {}
    after, pages = "", 0
    while after is not None:
        page = (await pod.get(f"LOOSE/all{after and '?cursor=' + after}")).json
        found |= {item["key"]: item["value"] for item in page["items"]}
        after, pages = page["next"], pages + 1
    assert found == items
    assert pages > 3


async def test_requests_are_counted_by_what_became_of_them(filled: PodHarness) -> None:
    """R26: each answer is one, straight or not, under its status; who waits for a version is counted, too."""

    def counted(name: str = "requests", **labels: str) -> float:
        found = filled.pod._telemetry.registry.get_sample_value(f"penstock_query_{name}_total", labels)
        assert found is not None
        return found

    statuses = ("2xx", "304", "4xx", "404", "409", "5xx")
    async with connected(filled.address) as raw:
        await warm(raw)
        filled.server._tick()  # straight answers are added up then
        before, waits = [counted(status=status) for status in statuses], counted("barrier_waits")
        await warm(raw)
        for path, header, status in [
            ("items/a", "If-None-Match: *", 304),
            ("items/a", "X-Min-Version: x", 400),
            ("items/none", "Accept: */*", 404),
            ("items/a", "X-Min-Version: 99", 409),
        ]:
            assert (await raw.ask(asking(f"{ACME}/{path}", LOCAL, header))).status == status
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.refdata.pod.serve.streams._STREAM_LIMIT", 0)
            assert (await raw.ask(asking(f"{ACME}/changes"))).status == 503
        filled.server._tick()
        after = [counted(status=status) for status in statuses]
        assert [now - then for now, then in zip(after, before, strict=True)] == [3, 1, 1, 1, 1, 1]
        assert counted("barrier_waits") == waits + 1


async def test_a_stream_that_breaks_is_not_taken_for_all(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: half an answer ends with the connection, not as a whole one does; the next is told everything."""
    request = asking(f"{ACME}/all", LOCAL, "Accept: application/x-ndjson")
    async with connected(filled.address) as raw:
        with monkeypatch.context() as patch:
            patch.setattr("penstock.refdata.pod.serve.streams._STREAM_TIMEOUT", -1.0)
            raw.writer.write(request)
            said = b""
            with suppress(ConnectionResetError):
                async with asyncio.timeout(10):
                    while piece := await raw.reader.read(1):
                        said += piece
        assert not said.endswith(b"0\r\n\r\n")
    async with connected(filled.address) as raw:
        assert (await raw.ask(request)).body == b'{"key":"a","value":1}\n'


async def test_what_goes_wrong_here_is_answered(filled: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: 500 under an id, from the loader or from who serves, and the connection goes on."""

    async def broken(_given: object) -> None:
        raise RuntimeError("a mistake of ours")

    async with connected(filled.address) as raw:
        for owner, name in ((filled.pod.request_handler, "_pages"), (filled.server, "handle")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, broken)
                refused = await raw.ask(asking("/docs"))
            assert (refused.status, refused.code) == (500, "INTERNAL")
        assert (await raw.ask(A)).status == 200


async def test_who_left_is_counted_no_more(filled: PodHarness) -> None:
    """R26: the connections that are open are those that are open now."""

    def count() -> float | None:
        return filled.pod._telemetry.registry.get_sample_value("penstock_query_connections")

    before = count()
    async with connected(filled.address) as raw:
        await warm(raw)
        assert count() != before

    async def has_left() -> bool:
        return count() == before

    await becomes(has_left, "one connection less", within=10)


def test_one_generation_before_is_kept_and_no_more(tmp_path: Path) -> None:
    """R29: however fast full loads follow each other, memory has the last two of them, not all of a minute."""
    memory = MemoryWriter(tmp_path, limit=16 * 1024 * 1024)
    for version in range(1, 6):
        generation = memory.begin_generation()
        memory.publish(LOOSE, generation, VersionStamp(version, version), memory.fill(generation, [("a", "1")]))
    while memory.free():
        pass
    assert memory._env.stat()["entries"] == 1 + 2 * 2  # the shelf, and of each generation its record and its item
    memory.close()
