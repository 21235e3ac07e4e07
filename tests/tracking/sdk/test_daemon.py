"""The SDK against a real server: a daemon is a plain loop, and loses no item however it ends."""

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
from tests.tracking.harness import BASE, FILE, SPLITTER, WORKER, TrackingHarness, make_report

ROOT = Path(__file__).parents[3]
WITHIN = 30.0
Daemon = StageDaemon | SyncStageDaemon
Body = Callable[[Daemon, Item], bool | None]  # what to do with an item; True leaves the loop


class Run(Protocol):
    """A daemon on a stage, in one of its two forms, that runs until its loop ends."""

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
    """Return one form of the daemon; both give the same guarantees."""
    form: Run = request.param
    return form


class Until:
    """The body of a loop that ends after *number* items."""

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


async def can_be_claimed_first(api: TrackingHarness, *shards: int) -> bool:
    """Return whether exactly these rows can be claimed at once, as a first attempt."""
    items = await api.claim(WORKER, "next")
    return [(item["shard"], item["attempt"]) for item in items] == [(shard, 1) for shard in shards]


async def test_items_are_done_when_the_loop_continues(run: Run, live: TrackingHarness, server: str) -> None:
    """T18: the loop gets every row once, oldest first; asking for the next item reports the last one as done."""
    await live.queue_up(WORKER, FILE, *range(7))
    body = Until(7)
    await run(server, body, worker="me", batch=3)
    assert body.shards == list(range(7))
    assert {(item.filename, item.attempt, item.is_lost) for item in body.items} == {(FILE, 1, False)}
    assert await statuses(live) == ["done"] * 7
    moves = (await live.get(f"/files/{FILE}/history"))["moves"]
    assert {move["actor"] for move in moves if move["stage"] == WORKER} == {"me"}


async def test_first_outcome_of_an_item_counts(run: Run, live: TrackingHarness, server: str) -> None:
    """T18: done, fail, retry and release have their effect; a later call does not change it."""
    await live.queue_up(WORKER, FILE, *range(4))

    def end(item: Item) -> None:
        ends: list[Callable[[], None]] = [
            item.done,
            lambda: item.fail("broken"),
            lambda: item.retry("busy", after=3600),
            item.release,
        ]
        ends[item.shard]()
        item.done()  # too late: the item has ended

    await run(server, Until(4, end), batch=4)
    assert await statuses(live) == ["done", "failed", "new", "new"]
    reasons = {
        move["shard"]: move["reason"] for move in (await live.get(f"/files/{FILE}/history"))["moves"] if move["reason"]
    }
    assert reasons == {1: "broken", 2: "busy"}
    assert await can_be_claimed_first(live, 3)


async def test_retried_item_is_delivered_again(run: Run, live: TrackingHarness, server: str) -> None:
    """T18: a retried item is delivered again, as the next attempt."""
    await live.queue_up(WORKER, FILE)
    body = Until(3, lambda item: item.retry("busy", after=0) if item.attempt < 3 else item.done())
    await run(server, body)
    assert [item.attempt for item in body.items] == [1, 2, 3]
    assert await statuses(live) == ["done"]


@pytest.mark.parametrize("batch", [1, 3])
async def test_leaving_the_loop_releases_unfinished_items(
    run: Run, live: TrackingHarness, server: str, batch: int
) -> None:
    """T18: after `break` the current item and the unprocessed ones can be claimed again at once."""
    await live.queue_up(WORKER, FILE, *range(3))
    await run(server, lambda _daemon, item: item.shard == batch - 1, batch=batch)
    done = ["done"] * (batch - 1)
    assert await statuses(live) == [*done, *["new"] * (3 - len(done))]
    assert await can_be_claimed_first(live, *range(len(done), 3))


async def test_item_done_before_the_break_is_done(run: Run, live: TrackingHarness, server: str) -> None:
    """T18: an outcome that was set before `break` is reported."""
    await live.queue_up(WORKER, FILE, 0, 1)

    def body(_daemon: Daemon, item: Item) -> bool:
        item.done()
        return True

    await run(server, body, batch=2)
    assert await statuses(live) == ["done", "new"]


@pytest.mark.parametrize("batch", [1, 2])
async def test_exception_retries_its_item(run: Run, live: TrackingHarness, server: str, batch: int) -> None:
    """T18: an exception that leaves the loop is raised, is the reason of a retry, and releases the other items."""
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
    """T18: `stop()` lets the current item end, and releases the unprocessed ones."""
    await live.queue_up(WORKER, FILE, *range(4))
    body = Until(2)
    await run(server, body, batch=4)
    assert body.shards == [0, 1]
    assert await statuses(live) == ["done", "done", "new", "new"]
    assert await can_be_claimed_first(live, 2, 3)


async def test_stop_ends_a_waiting_loop(live: TrackingHarness, server: str) -> None:
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


async def test_daemon_waits_for_work(live: TrackingHarness, server: str) -> None:
    """T18: a loop on an empty queue gets a row that is registered later."""
    body = Until(1)
    async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
        group.create_task(run_async(server, body))
        await live.queue_up(WORKER, FILE)
    assert await statuses(live) == ["done"]


async def test_flush_waits_for_the_reports(live: TrackingHarness, server: str) -> None:
    """T18: after `flush` the server has every outcome reported so far."""
    await live.queue_up(WORKER, FILE)
    async with StageDaemon(WORKER, server, handle_signals=False) as daemon:
        item = await anext(daemon)
        item.done()
        await daemon.flush()
        assert await statuses(live) == ["done"]


async def test_heartbeats_extend_the_lease_of_long_work(run: Run, live: TrackingHarness, server: str) -> None:
    """T14, T18: an item that takes longer than its lease is not reaped; one without heartbeats is."""
    await live.queue_up(WORKER, FILE, 0, 1)
    started, may_end = threading.Event(), threading.Event()

    def work(_item: Item) -> None:
        started.set()
        assert may_end.wait(WITHIN)

    async def run_daemon() -> None:
        if run is run_sync:
            await run(server, Until(1, work), batch=1, lease=1)
            return
        async with StageDaemon(WORKER, server, batch=1, lease=1, handle_signals=False) as daemon:
            async for item in daemon:
                await asyncio.to_thread(work, item)
                daemon.stop()

    async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
        group.create_task(run_daemon())
        await asyncio.to_thread(started.wait)
        for _ in range(2):  # a lease of the same length, claimed later and without heartbeats, expires first
            (other,) = await live.claim(WORKER, "silent", lease_seconds=1, wait_seconds=20)
            assert other["shard"] == 1
        assert await statuses(live) == ["started", "started"]
        may_end.set()
    assert (await statuses(live))[0] == "done"
    assert await live.steps(FILE, WORKER, 0) == [("new", "started"), ("started", "done")]


async def test_lost_item_is_marked(live: TrackingHarness, server: str) -> None:
    """T13, T14, T18: the next heartbeat marks an item that was taken away; lost items in the batch are skipped."""
    await live.queue_up(WORKER, FILE, 0, 1, 2)
    async with asyncio.timeout(WITHIN), StageDaemon(WORKER, server, batch=3, lease=1.5, handle_signals=False) as daemon:
        item = await anext(daemon)
        for shard in (0, 1):  # an operator fails the rows
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
        asyncio.get_running_loop().call_soon(sent.set)  # after its caller has read the answer
        return lost

    daemon._client.heartbeat = heartbeat  # type: ignore[method-assign]
    await sent.wait()
    daemon._client.heartbeat = send  # type: ignore[method-assign]


async def test_late_report_marks_the_item_as_lost(run: Run, live: TrackingHarness, server: str) -> None:
    """T13, T18: the report of an item that was taken away changes nothing, and marks the item as lost."""
    await live.queue_up(WORKER, FILE)
    body = Until(1, lambda item: httpx.post(f"{server}{BASE}/stages/{WORKER}/fail", json=row(item)))
    await run(server, body)
    assert body.items[0].is_lost
    assert await statuses(live) == ["failed"]


def row(item: Item) -> dict[str, Any]:
    return {"filename": item.filename, "shard": item.shard}


async def test_old_item_of_a_row_claimed_again_is_lost(live: TrackingHarness, server: str) -> None:
    """T14, T18: if a daemon claims its lost row again, only the new item is valid."""
    await live.queue_up(WORKER, FILE)
    async with asyncio.timeout(WITHIN), StageDaemon(WORKER, server, batch=1, lease=1.5, handle_signals=False) as daemon:
        old = await anext(daemon)
        await live.move(WORKER, "fail", FILE)
        await live.move(WORKER, "retry", FILE)
        (new,) = await daemon._claim()
        assert new.fence > old.fence
        await next_heartbeat(daemon)
        assert (old.is_lost, new.is_lost) == (True, False)


@pytest.mark.parametrize("form", ["async", "sync"])
async def test_sigterm_releases_the_remaining_items(live: TrackingHarness, server: str, form: str) -> None:
    """T18: on SIGTERM the current item ends, the others are released at once, and the process exits with 0."""
    await live.queue_up(WORKER, FILE, *range(5))
    async with run_daemon_process(form, server) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        for shard in (0, 1):
            assert await process.stdout.readline() == f"started {shard}\n".encode()
            if shard == 0:
                process.stdin.write(b"\n")
        assert (await statuses(live))[1:] == ["started"] * 4
        process.send_signal(signal.SIGTERM)
        assert await process.stdout.readline() == b"stopping\n"
        process.stdin.write(b"\n")
        assert await process.wait() == 0
    assert await statuses(live) == ["done", "done", "new", "new", "new"]
    assert await can_be_claimed_first(live, 2, 3, 4)


@asynccontextmanager
async def run_daemon_process(form: str, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a daemon in a separate process; kill it at the end if it is still running."""
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


async def test_killed_daemon_loses_nothing(live: TrackingHarness, server: str) -> None:
    """T14, T18: the claims of a killed daemon go to another one, as the next attempt."""
    await live.queue_up(WORKER, FILE)
    (item,) = await live.claim(WORKER, "killed", lease_seconds=0.5)
    body = Until(1)
    async with asyncio.timeout(WITHIN):
        await run_async(server, body)
    assert [(claimed.attempt, claimed.fence > item["fence"]) for claimed in body.items] == [(2, True)]
    assert await live.report(WORKER, make_report(item, "failed")) == [("superseded", "done")]


async def test_server_restart_loses_nothing(run: Run, database_url: str, tmp_path: Path) -> None:
    """T18: a server that is killed and started again has every row, and the daemon continues by itself."""
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


async def test_daemon_refuses_an_unknown_stage(live: TrackingHarness, server: str) -> None:
    """T18: an unknown or unclaimable stage is refused before any work starts, and leaves no thread."""
    threads = set(threading.enumerate())
    for stage, kind in (("no-such", NotFound), ("event-ingest", Conflict)):
        with pytest.raises(kind):
            StageDaemon(stage, server)
        with pytest.raises(kind), SyncStageDaemon(stage, server, handle_signals=False):
            pass
    assert set(threading.enumerate()) == threads


async def test_two_daemons_share_the_work(live: TrackingHarness, server: str) -> None:
    """T12, T18: two daemons on one stage process every row, and no row twice."""
    await live.queue_up(WORKER, FILE, *range(20))
    got: list[int] = []

    async def work(name: str) -> None:
        async with StageDaemon(WORKER, server, worker=name, batch=3, handle_signals=False) as daemon:
            daemons.append(daemon)
            async for item in daemon:
                got.append(item.shard)
                await daemon.flush()
                if len(got) == 20:
                    for running in daemons:
                        running.stop()

    daemons: list[StageDaemon] = []
    async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
        for name in ("a", "b"):
            group.create_task(work(name))
    assert sorted(got) == list(range(20))
    assert await statuses(live) == ["done"] * 20


async def test_row_passes_all_stages(live: TrackingHarness, server: str) -> None:
    """T18: a row passes the stages from daemon to daemon, as fast as they report."""

    async def pass_on(stage: str) -> None:
        async with StageDaemon(stage, server, handle_signals=False) as daemon:
            async for _ in daemon:
                daemon.stop()

    async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
        for stage in ("mysql-sender", "shard-worker", "shard-splitter"):
            group.create_task(pass_on(stage))
        await live.queue_up(SPLITTER, FILE)
    assert (await live.get(f"/files/{FILE}/0/why"))["stage"] is None
