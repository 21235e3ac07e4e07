"""The SDK against a real server: a daemon is a plain loop, and loses nothing however it ends."""

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from penstock.kernel.errors import Conflict, NotFound
from penstock.tracking.sdk import Item, StageDaemon, SyncStageDaemon
from tests.support.processes import PipelineApid
from tests.tracking.harness import BASE, FILE, SPLITTER, WORKER, TrackingHarness, reported

ROOT = Path(__file__).parents[3]
WITHIN = 30.0
Daemon = StageDaemon | SyncStageDaemon
Body = Callable[[Daemon, Item], bool | None]  # what to do with an item; True leaves the loop


class Run(Protocol):
    """A daemon on a stage, in one of its two forms, until its loop ends."""

    def __call__(self, url: str, body: Body, **options: Any) -> Coroutine[Any, Any, None]: ...


async def run_async(url: str, body: Body, **options: Any) -> None:
    async with StageDaemon(WORKER, url, handle_signals=False, **options) as daemon:
        async for item in daemon:
            if body(daemon, item):
                break


def run_in_thread(url: str, body: Body, **options: Any) -> None:
    with SyncStageDaemon(WORKER, url, handle_signals=False, **options) as daemon:
        for item in daemon:
            if body(daemon, item):
                break


async def run_sync(url: str, body: Body, **options: Any) -> None:
    await asyncio.to_thread(run_in_thread, url, body, **options)


@pytest.fixture(params=[run_async, run_sync], ids=["async", "sync"])
def run(request: pytest.FixtureRequest) -> Run:
    """Both forms keep the same promises."""
    form: Run = request.param
    return form


class Until:
    """The body of a loop that ends after so many items."""

    def __init__(self, number: int, each: Callable[[Item], object] = lambda item: None) -> None:
        self._number, self._each = number, each
        self.items: list[Item] = []

    def __call__(self, daemon: Daemon, item: Item) -> None:
        self.items.append(item)
        self._each(item)
        if len(self.items) == self._number:
            daemon.stop()

    @property
    def shards(self) -> list[int]:
        return [item.shard for item in self.items]


async def statuses(api: TrackingHarness, filename: str = FILE) -> list[str]:
    rows = (await api.get(f"/files/{filename}"))["shards"]
    return [row["shard_worker_status"] for row in rows]


async def attempts_left_as_they_were(api: TrackingHarness, *shards: int) -> bool:
    """Whether just these rows can be claimed at once, as if for the first time."""
    items = await api.claim(WORKER, "next")
    return [(item["shard"], item["attempt"]) for item in items] == [(shard, 1) for shard in shards]


async def test_items_are_done_when_the_loop_goes_on(run: Run, live: TrackingHarness, server: str) -> None:
    """T18: the loop gets every row once, oldest first; asking for the next one is the report of the last."""
    await live.queue_up(WORKER, FILE, *range(7))
    body = Until(7)
    await run(server, body, worker="me", batch=3)
    assert body.shards == list(range(7))
    assert {(item.filename, item.attempt, item.is_lost) for item in body.items} == {(FILE, 1, False)}
    assert await statuses(live) == ["done"] * 7
    moves = (await live.get(f"/files/{FILE}/history"))["moves"]
    assert {move["actor"] for move in moves if move["stage"] == WORKER} == {"me"}


async def test_an_item_says_how_it_ended(run: Run, live: TrackingHarness, server: str) -> None:
    """T18: done, fail, retry and release, each as it was said; what the loop does after does not change it."""
    await live.queue_up(WORKER, FILE, *range(4))

    def end(item: Item) -> None:
        ends: list[Callable[[], None]] = [
            item.done,
            lambda: item.fail("broken"),
            lambda: item.retry("busy", after=3600),
            item.release,
        ]
        ends[item.shard]()
        item.done()  # too late: it has ended

    await run(server, Until(4, end), batch=4)
    assert await statuses(live) == ["done", "failed", "new", "new"]
    reasons = {
        move["shard"]: move["reason"] for move in (await live.get(f"/files/{FILE}/history"))["moves"] if move["reason"]
    }
    assert reasons == {1: "broken", 2: "busy"}
    assert await attempts_left_as_they_were(live, 3)


async def test_a_retried_item_comes_again(run: Run, live: TrackingHarness, server: str) -> None:
    """T18: an item that is retried is handed out again, as the next attempt."""
    await live.queue_up(WORKER, FILE)
    body = Until(3, lambda item: item.retry("busy", after=0) if item.attempt < 3 else item.done())
    await run(server, body)
    assert [item.attempt for item in body.items] == [1, 2, 3]
    assert await statuses(live) == ["done"]


@pytest.mark.parametrize("batch", [1, 3])
async def test_leaving_the_loop_gives_back_what_is_not_done(
    run: Run, live: TrackingHarness, server: str, batch: int
) -> None:
    """T18: `break` says nothing of the current item: it and those not begun can be claimed again at once."""
    await live.queue_up(WORKER, FILE, *range(3))
    await run(server, lambda _daemon, item: item.shard == batch - 1, batch=batch)
    done = ["done"] * (batch - 1)
    assert await statuses(live) == [*done, *["new"] * (3 - len(done))]
    assert await attempts_left_as_they_were(live, *range(len(done), 3))


async def test_an_item_done_before_the_break_is_done(run: Run, live: TrackingHarness, server: str) -> None:
    """T18: what was said stands, also when the loop is left right after."""
    await live.queue_up(WORKER, FILE, 0, 1)

    def body(_daemon: Daemon, item: Item) -> bool:
        item.done()
        return True

    await run(server, body, batch=2)
    assert await statuses(live) == ["done", "new"]


@pytest.mark.parametrize("batch", [1, 2])
async def test_an_exception_is_a_retry_of_its_item(run: Run, live: TrackingHarness, server: str, batch: int) -> None:
    """T18: an exception that leaves the loop is raised, is the reason of a retry, and gives back the others."""
    await live.queue_up(WORKER, FILE, *range(batch))

    def body(_daemon: Daemon, _item: Item) -> None:
        raise ValueError("no such column")

    with pytest.raises(ValueError, match="no such column"):
        await run(server, body, batch=batch)
    assert await statuses(live) == ["new"] * batch
    moves = (await live.get(f"/files/{FILE}/history"))["moves"]
    assert {move["shard"]: move["reason"] for move in moves if move["reason"]} == {0: "ValueError: no such column"}
    items = await live.claim(WORKER, "next", wait_seconds=5, limit=100)
    later = items if len(items) == batch else [*items, *await live.claim(WORKER, "next", wait_seconds=5)]
    assert {item["shard"]: item["attempt"] for item in later} == {0: 2, **dict.fromkeys(range(1, batch), 1)}


async def test_stop_ends_the_loop_after_the_current_item(run: Run, live: TrackingHarness, server: str) -> None:
    """T18: `stop()` lets the current item end, and gives back those not begun."""
    await live.queue_up(WORKER, FILE, *range(4))
    body = Until(2)
    await run(server, body, batch=4)
    assert body.shards == [0, 1]
    assert await statuses(live) == ["done", "done", "new", "new"]
    assert await attempts_left_as_they_were(live, 2, 3)


async def test_stop_ends_a_loop_that_waits(live: TrackingHarness, server: str) -> None:
    """T18: a daemon without work can be stopped, in both forms."""
    async with asyncio.timeout(WITHIN), StageDaemon(WORKER, server, handle_signals=False) as daemon:
        waiting = asyncio.create_task(anext(daemon, None))
        asyncio.get_running_loop().call_soon(daemon.stop)
        assert await waiting is None

    def wait_in_thread() -> None:
        with SyncStageDaemon(WORKER, server, handle_signals=False) as daemon:
            stopper = threading.Thread(target=daemon.stop)
            stopper.start()
            assert list(daemon) == []
            stopper.join()

    await asyncio.to_thread(wait_in_thread)


async def test_a_daemon_waits_for_work(live: TrackingHarness, server: str) -> None:
    """T18: a loop that found nothing gets the row that comes later."""
    body = Until(1)
    async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
        group.create_task(run_async(server, body))
        await live.queue_up(WORKER, FILE)
    assert await statuses(live) == ["done"]


async def test_flush_waits_for_the_record(live: TrackingHarness, server: str) -> None:
    """T18: after `flush` everything said so far can be read back."""
    await live.queue_up(WORKER, FILE)
    async with StageDaemon(WORKER, server, handle_signals=False) as daemon:
        item = await anext(daemon)
        item.done()
        await daemon.flush()
        assert await statuses(live) == ["done"]


async def test_heartbeats_keep_long_work(run: Run, live: TrackingHarness, server: str) -> None:
    """T14, T18: an item worked on for longer than its lease is not taken away; one without heartbeats is."""
    await live.queue_up(WORKER, FILE, 0, 1)
    begun, may_end = threading.Event(), threading.Event()

    def work(_item: Item) -> None:
        begun.set()
        assert may_end.wait(WITHIN)

    async def worked() -> None:
        if run is run_sync:
            await run(server, Until(1, work), batch=1, lease=1)
            return
        async with StageDaemon(WORKER, server, batch=1, lease=1, handle_signals=False) as daemon:
            async for item in daemon:
                await asyncio.to_thread(work, item)
                daemon.stop()

    async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
        group.create_task(worked())
        await asyncio.to_thread(begun.wait)
        for _ in range(2):  # a lease of the same length, claimed after the daemon's, runs out before it
            (other,) = await live.claim(WORKER, "silent", lease_seconds=1, wait_seconds=20)
            assert other["shard"] == 1
        assert await statuses(live) == ["started", "started"]
        may_end.set()
    assert (await statuses(live))[0] == "done"
    assert await live.steps(FILE, WORKER, 0) == [("new", "started"), ("started", "done")]


async def test_who_lost_its_item_is_told(live: TrackingHarness, server: str) -> None:
    """T13, T14, T18: an item somebody took away is marked lost, by the next heartbeat; items not begun are skipped."""
    await live.queue_up(WORKER, FILE, 0, 1, 2)
    async with asyncio.timeout(WITHIN), StageDaemon(WORKER, server, batch=3, lease=1.5, handle_signals=False) as daemon:
        item = await anext(daemon)
        for shard in (0, 1):  # an operator takes them away
            await live.move(WORKER, "fail", FILE, shard)
        while not item.is_lost:
            await next_heartbeat(daemon)
        assert (await anext(daemon)).shard == 2
        daemon.stop()
        assert await anext(daemon, None) is None
    assert await statuses(live) == ["failed", "failed", "done"]


async def next_heartbeat(daemon: StageDaemon) -> None:
    """Wait until the daemon has sent one more heartbeat and read its answer."""
    sent, send = asyncio.Event(), daemon._client.heartbeat

    async def heartbeat(*args: Any, **options: Any) -> Any:
        lost = await send(*args, **options)
        asyncio.get_running_loop().call_soon(sent.set)  # when its caller has gone on
        return lost

    daemon._client.heartbeat = heartbeat  # type: ignore[method-assign]
    await sent.wait()
    daemon._client.heartbeat = send  # type: ignore[method-assign]


async def test_a_late_report_is_told_that_it_is_lost(run: Run, live: TrackingHarness, server: str) -> None:
    """T13, T18: the report of an item that was taken away changes nothing, and marks the item as lost."""
    await live.queue_up(WORKER, FILE)
    body = Until(1, lambda item: httpx.post(f"{server}{BASE}/stages/{WORKER}/fail", json=row(item)))
    await run(server, body)
    assert body.items[0].is_lost
    assert await statuses(live) == ["failed"]


def row(item: Item) -> dict[str, Any]:
    return {"filename": item.filename, "shard": item.shard}


async def test_a_daemon_that_holds_a_row_again_knows_the_old_item_is_lost(live: TrackingHarness, server: str) -> None:
    """T14, T18: the same daemon gets the row it lost once more; only the new item is its own."""
    await live.queue_up(WORKER, FILE)
    async with asyncio.timeout(WITHIN), StageDaemon(WORKER, server, batch=1, lease=1.5, handle_signals=False) as daemon:
        old = await anext(daemon)
        await live.move(WORKER, "fail", FILE)
        await live.move(WORKER, "retry", FILE)
        (held,) = await daemon._claim()
        assert held.fence > old.fence
        await next_heartbeat(daemon)
        assert (old.is_lost, held.is_lost) == (True, False)


@pytest.mark.parametrize("form", ["async", "sync"])
async def test_sigterm_gives_back_the_rest(live: TrackingHarness, server: str, form: str) -> None:
    """T18: SIGTERM in mid-batch: the current item is ended, the others are given back at once, the exit is clean."""
    await live.queue_up(WORKER, FILE, *range(5))
    async with child(form, server) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        for shard in (0, 1):
            assert await process.stdout.readline() == f"begun {shard}\n".encode()
            if shard == 0:
                process.stdin.write(b"\n")
        assert (await statuses(live))[1:] == ["started"] * 4
        process.send_signal(signal.SIGTERM)
        assert await process.stdout.readline() == b"stopping\n"
        process.stdin.write(b"\n")
        assert await process.wait() == 0
    assert await statuses(live) == ["done", "done", "new", "new", "new"]
    assert await attempts_left_as_they_were(live, 2, 3, 4)


@asynccontextmanager
async def child(form: str, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A daemon in a process of its own; killed at the end, should it still live."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "tests.tracking.sdk.daemon_process", form, url]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
    try:
        async with asyncio.timeout(WITHIN):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_daemon_loses_nothing(live: TrackingHarness, server: str) -> None:
    """T14, T18: what a daemon held when it was killed is handed to another one, as the next attempt."""
    await live.queue_up(WORKER, FILE)
    (item,) = await live.claim(WORKER, "killed", lease_seconds=0.5)
    body = Until(1)
    async with asyncio.timeout(WITHIN):
        await run_async(server, body)
    assert [(one.attempt, one.fence > item["fence"]) for one in body.items] == [(2, True)]
    assert await live.report(WORKER, reported(item, "failed")) == [("superseded", "done")]


async def test_a_server_that_was_away_loses_nothing(run: Run, database_url: str, tmp_path: Path) -> None:
    """T18: killed in mid-work and started again, the server finds every row, and the daemon goes on by itself."""
    with ExitStack() as stack:
        first = stack.enter_context(PipelineApid(tmp_path, "--database", database_url))
        async with httpx.AsyncClient(base_url=first.api + BASE) as client:
            await TrackingHarness(client).queue_up(WORKER, FILE, *range(6))
        body = Until(6, lambda item: first.kill() if item.shard == 1 else None)
        async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
            group.create_task(run(first.api, body, batch=4))
            await asyncio.to_thread(first.ended)
            second = await asyncio.to_thread(
                stack.enter_context, PipelineApid(tmp_path, "--database", database_url, port=first.port)
            )
        async with httpx.AsyncClient(base_url=second.api + BASE) as client:
            assert await statuses(TrackingHarness(client)) == ["done"] * 6
            moves = (await TrackingHarness(client).get(f"/files/{FILE}/history"))["moves"]
    done = sorted(move["shard"] for move in moves if (move["stage"], move["to"]) == (WORKER, "done"))
    assert done == list(range(6))
    assert sorted(set(body.shards)) == list(range(6))


async def test_a_daemon_says_what_the_server_will_not_take(live: TrackingHarness, server: str) -> None:
    """T18: a stage that does not exist, or is not handed out, is told before anything begins, and leaves no thread."""
    threads = set(threading.enumerate())
    for stage, kind in (("no-such", NotFound), ("event-ingest", Conflict)):
        with pytest.raises(kind):
            StageDaemon(stage, server)
        with pytest.raises(kind), SyncStageDaemon(stage, server, handle_signals=False):
            pass
    assert set(threading.enumerate()) == threads


async def test_two_daemons_share_the_work(live: TrackingHarness, server: str) -> None:
    """T12, T18: two daemons on one stage get every row between them, and none of them twice."""
    await live.queue_up(WORKER, FILE, *range(20))
    got: list[int] = []

    async def work(name: str) -> None:
        async with StageDaemon(WORKER, server, worker=name, batch=3, handle_signals=False) as daemon:
            daemons.append(daemon)
            async for item in daemon:
                got.append(item.shard)
                await daemon.flush()
                if len(got) == 20:
                    for one in daemons:
                        one.stop()

    daemons: list[StageDaemon] = []
    async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
        for name in ("a", "b"):
            group.create_task(work(name))
    assert sorted(got) == list(range(20))
    assert await statuses(live) == ["done"] * 20


async def test_stages_follow_one_another(live: TrackingHarness, server: str) -> None:
    """T18: a row goes through the stages from daemon to daemon, as fast as they report."""

    async def pass_on(stage: str) -> None:
        async with StageDaemon(stage, server, handle_signals=False) as daemon:
            async for _ in daemon:
                daemon.stop()

    async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
        for stage in ("mysql-sender", "shard-worker", "shard-splitter"):
            group.create_task(pass_on(stage))
        await live.queue_up(SPLITTER, FILE)
    assert (await live.get(f"/files/{FILE}/0/why"))["stage"] is None
