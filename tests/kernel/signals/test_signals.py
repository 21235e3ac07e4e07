"""Signals: every listener hears each one, or is told to look for itself; the same promises for every implementation."""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.kernel.db import listener as notifications
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import embedded_postgres
from penstock.kernel.db.listener import Heard, Inbox, Missed
from penstock.kernel.errors import BadConfig, Invalid, Transient
from penstock.kernel.signals import BODY_LIMIT, Resync, Signal, Signals
from penstock.kernel.signals.feed import Feed
from penstock.kernel.signals.postgres import PostgresSignals
from penstock.kernel.signals.redis import RedisSignals
from penstock.kernel.signals.redis import listener as redis_listener
from tests.kernel.signals.backends import PostgresSignalsBackend, RedisSignalsBackend, SignalsBackend, redis_backend
from tests.services.redis import RedisCluster, RedisServer, redis_binary
from tests.support.require import require

WITHIN = 20.0
AT_ONCE = 2.0
ROOT = Path(__file__).parents[3]

Items = AsyncIterator[Signal | Resync]


def server_binary() -> Path:
    return redis_binary() or require("redis", "there is no redis-server here")


@pytest.fixture(scope="session")
def cluster() -> Iterator[RedisCluster]:
    """Three masters for the whole test process; nobody kills them."""
    service = RedisCluster(server_binary())
    yield service
    service.stop()


@pytest.fixture(scope="session")
def single() -> Iterator[RedisServer]:
    service = RedisServer(server_binary())
    yield service
    service.stop()


@pytest.fixture
def private_cluster() -> Iterator[RedisCluster]:
    """Three masters of the test's own, to be killed."""
    service = RedisCluster(server_binary())
    yield service
    service.stop()


@pytest.fixture
async def postgres_backend(db: Database) -> PostgresSignalsBackend:
    return PostgresSignalsBackend(db)


@pytest.fixture
async def cluster_backend(cluster: RedisCluster) -> AsyncIterator[RedisSignalsBackend]:
    async with redis_backend(cluster) as backend:
        yield backend


@pytest.fixture
async def single_backend(single: RedisServer) -> AsyncIterator[RedisSignalsBackend]:
    async with redis_backend(single) as backend:
        yield backend


@pytest.fixture(params=["postgres", "cluster", "single"])
def backend(request: pytest.FixtureRequest) -> SignalsBackend:
    """Every implementation in turn."""
    found: SignalsBackend = request.getfixturevalue(f"{request.param}_backend")
    return found


async def heard(feed: Items, *bodies: str, within: float = WITHIN) -> list[Signal | Resync]:
    """Everything up to the moment when each of *bodies* has come."""
    items: list[Signal | Resync] = []
    async with asyncio.timeout(within):
        while not {Signal(body) for body in bodies} <= set(items):
            items.append(await anext(feed))
    return items


async def resynced(feed: Items, *reasons: str) -> list[Signal | Resync]:
    """Everything up to the next Resync, or the next for one of *reasons*."""
    items: list[Signal | Resync] = []
    async with asyncio.timeout(WITHIN):
        while True:
            items.append(item := await anext(feed))
            if isinstance(item, Resync) and item.reason in (reasons or (item.reason,)):
                return items


async def becomes(claim: Callable[[], bool]) -> None:
    """Ask the server again and again until *claim* is true."""
    async with asyncio.timeout(WITHIN):
        while not await asyncio.to_thread(claim):
            pass


def first_arrivals(items: list[Signal | Resync]) -> list[str]:
    return list(dict.fromkeys(item.body for item in items if isinstance(item, Signal)))


# Every implementation


async def test_the_first_thing_a_listener_receives_is_resync(backend: SignalsBackend) -> None:
    """R22: whatever happened before, a listener first looks at the source of truth."""
    await backend.signals.announce(["before"])
    async with backend.signals.listen("pod") as feed, asyncio.timeout(WITHIN):
        assert await anext(feed) == Resync("the listener began")


async def test_a_signal_arrives_at_once(backend: SignalsBackend) -> None:
    """R16: from announcement to listener there is no waiting for a poll."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        await backend.signals.announce(["now"])
        await heard(feed, "now", within=AT_ONCE)


async def test_every_listener_hears_every_signal(backend: SignalsBackend) -> None:
    """R22: listeners do not share signals among them; each gets all."""
    bodies = [f"v{n}" for n in range(20)]
    async with contextlib.AsyncExitStack() as stack:
        feeds = [await stack.enter_async_context(backend.signals.listen(f"pod-{n}")) for n in range(4)]
        for feed in feeds:
            await resynced(feed)
        for body in bodies:
            await backend.signals.announce([body])
        for feed in feeds:
            assert first_arrivals(await heard(feed, *bodies)) == bodies


async def test_signals_of_one_announcer_arrive_in_order(backend: SignalsBackend) -> None:
    """R16: what was announced first is heard first, within an announcement and among several."""
    bodies = [f"{n:04}" for n in range(500)]
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        for start in range(0, 500, 250):
            await backend.signals.announce(bodies[start : start + 250])
        assert first_arrivals(await heard(feed, *bodies)) == bodies


@pytest.mark.parametrize(
    "body",
    ["Größe 🌊 \N{GREEK SMALL LETTER OMEGA}", "x" * BODY_LIMIT, "ü" * (BODY_LIMIT // 2), ' {"a": "\'\\"}\r\n\t\x01 '],
    ids=["unicode", "largest", "largest in bytes", "quotes and controls"],
)
async def test_a_body_arrives_as_it_was_written(backend: SignalsBackend, body: str) -> None:
    """R16: any text of up to the limit in bytes comes through unchanged."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        await backend.signals.announce([body])
        await heard(feed, body)


@pytest.mark.parametrize("body", ["x" * (BODY_LIMIT + 1), "ü" * BODY_LIMIT, "", "a\0b", "\ud800"])
async def test_a_body_nobody_could_carry_is_refused_with_all_its_company(backend: SignalsBackend, body: str) -> None:
    """R16: one bad body is Invalid, and none of the announcement goes out."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        with pytest.raises(Invalid, match="bytes of text without NUL") as refused:
            await backend.signals.announce(["in bad company", body])
        await backend.signals.announce(["after"])
        assert Signal("in bad company") not in await heard(feed, "after")
    assert refused.value.code == "SIGNAL_TOO_LARGE"
    assert refused.value.hint


async def test_announcing_nothing_is_no_signal(backend: SignalsBackend) -> None:
    """R15: an empty announcement is not an error."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        await backend.signals.announce([])
        await backend.signals.announce(["something"])
        assert first_arrivals(await heard(feed, "something")) == ["something"]


async def test_a_lost_connection_is_told_and_mended(backend: SignalsBackend) -> None:
    """R22: every reconnect is a Resync, after which what was announced meanwhile is known; later signals arrive."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        for n in range(3):
            await backend.cut()
            await backend.signals.announce([f"meanwhile-{n}"])
            await resynced(feed, "the connection was lost", "Pub/Sub was lost")
            await backend.signals.announce([f"later-{n}"])
            await heard(feed, f"later-{n}")


async def test_a_listener_that_comes_back_hears_again(backend: SignalsBackend) -> None:
    """R22: after a restart under the same name a listener resyncs, and hears what comes, not what came."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
    await backend.signals.announce(["while away"])
    async with backend.signals.listen("pod") as feed:
        assert await resynced(feed) == [Resync("the listener began")]
        await backend.signals.announce(["back"])
        assert first_arrivals(await heard(feed, "back")) == ["back"]


async def test_whoever_stops_waiting_loses_nothing(backend: SignalsBackend) -> None:
    """R19: a listener may wait with a limit; what comes afterwards is still handed out."""
    async with backend.signals.listen("pod") as feed:
        await resynced(feed)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(feed), 0.01)
        await backend.signals.announce(["after all"])
        await heard(feed, "after all")


async def test_a_listener_that_is_too_slow_is_told_so(backend: SignalsBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: what waits for a slow listener is bounded; beyond it there is a Resync in place of the signals."""
    monkeypatch.setattr(notifications, "INBOX_LIMIT", 10)
    told = Missed("the listener was too slow")
    async with backend.signals.listen("pod") as feed:
        assert isinstance(feed, Feed)
        await resynced(feed)
        waiting: asyncio.Queue[Heard | Missed] = feed._inbox._queue
        await backend.signals.announce([f"v{n}" for n in range(100)])
        await becomes(lambda: told in list(waiting._queue))  # type: ignore[attr-defined]
        assert waiting.qsize() <= 10
        await resynced(feed, told.reason)


@pytest.mark.full
async def test_a_listener_in_another_process_hears(backend: SignalsBackend) -> None:
    """R16: signals cross processes; the listener there begins with its own Resync."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kernel.signals.listener", *backend.child, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(WITHIN):
            assert await child.stdout.readline() == b"resync\n"
            await backend.signals.announce(["over there"])
            while await child.stdout.readline() != b"over there\n":
                pass
    finally:
        child.kill()
        await child.wait()


async def test_a_cancelled_announcement_ends_as_cancelled(backend: SignalsBackend) -> None:
    """R15: whoever announces can be stopped at any moment, and the channel still works."""
    for steps in range(40):
        announcing = asyncio.create_task(backend.signals.announce(["perhaps"]))
        for _ in range(steps):
            await asyncio.sleep(0)
        if announcing.cancel():
            with pytest.raises(asyncio.CancelledError):
                await announcing
    await backend.signals.announce(["works"])


async def test_a_listener_can_be_closed_at_any_moment(backend: SignalsBackend) -> None:
    """R22: closing is prompt whatever the listener is just doing."""
    for steps in range(40):
        async with asyncio.timeout(WITHIN), backend.signals.listen("pod"):
            for _ in range(steps):
                await asyncio.sleep(0)


async def test_a_channel_that_works_passes_its_check(backend: SignalsBackend) -> None:
    """R23: health tells the truth in good times."""
    await backend.signals.check()


async def test_without_postgres_announcing_is_transient() -> None:
    """R23: with the server down an announcement says so, with what to do, and may be tried again."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:
        async with contextlib.AsyncExitStack() as server, contextlib.AsyncExitStack() as client:
            url = await server.enter_async_context(embedded_postgres(Path(folder)))
            db = await client.enter_async_context(Database.open(url))
            signals = PostgresSignals(db, "changes")
            await signals.announce(["works"])
            await server.aclose()
            await assert_down(signals)


async def test_without_redis_announcing_is_transient(private_cluster: RedisCluster) -> None:
    """R23: with the cluster down an announcement says so, with what to do, and may be tried again."""
    async with redis_backend(private_cluster) as backend:
        await backend.signals.announce(["works"])
        for number in range(len(private_cluster.addresses)):
            private_cluster.kill(number)
        await assert_down(backend.signals)


async def assert_down(signals: Signals) -> None:
    for attempt in (signals.announce(["lost"]), signals.check(), signals.lag()):
        with pytest.raises(Transient) as down:
            await attempt
        assert down.value.code == "SIGNALS_DOWN"
        assert down.value.hint


# PostgreSQL alone


async def test_a_stuck_listener_shows_in_the_lag_of_postgres(db: Database) -> None:
    """R26: a listener that takes nothing from PostgreSQL's queue makes the lag grow."""
    signals = PostgresSignals(db, "changes")
    async with db.connection() as stuck:
        await stuck.execute("LISTEN changes")
        async with stuck.transaction():
            await stuck.execute("SELECT 1")
            await signals.announce([f"{n:02}" + "x" * (BODY_LIMIT - 2) for n in range(40)])
            assert await signals.lag() > 0


@pytest.mark.parametrize("channel", ["", "c" * 64, "ü" * 32])
async def test_a_channel_postgres_would_cut_is_refused(db: Database, channel: str) -> None:
    """R16: a name that PostgreSQL cannot hold is bad configuration, not a channel that nobody hears."""
    with pytest.raises(BadConfig):
        PostgresSignals(db, channel)


# Redis alone


async def test_an_announcement_is_both_added_and_published(
    cluster: RedisCluster, cluster_backend: RedisSignalsBackend
) -> None:
    """R15: the stream has it in its field `body`, and whoever subscribes at any node of the cluster gets it."""
    elsewhere = cluster.node((cluster.owner(cluster_backend.stream) + 1) % 3).pubsub()  # type: ignore[no-untyped-call]
    elsewhere.subscribe(f"{cluster_backend.name}:pub")
    assert elsewhere.get_message(timeout=WITHIN)["type"] == "subscribe"
    await cluster_backend.signals.announce(["both"])
    assert elsewhere.get_message(timeout=WITHIN)["data"] == "both"
    elsewhere.close()
    assert [fields for _, fields in cluster_backend.server.xrange(cluster_backend.stream)] == [{"body": "both"}]


async def test_pubsub_alone_is_instant(cluster_backend: RedisSignalsBackend) -> None:
    """R15: what is published arrives without the stream's help."""
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        cluster_backend.publish("only published")
        await heard(feed, "only published", within=AT_ONCE)


async def test_what_pubsub_lost_is_caught_up_from_the_stream(cluster_backend: RedisSignalsBackend) -> None:
    """R15, R22: a signal that is only in the stream is heard, and heard once."""
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        for n in range(5):
            cluster_backend.add(f"only added {n}")
        items = await heard(feed, "only added 4")
    assert [item.body for item in items if isinstance(item, Signal)] == [f"only added {n}" for n in range(5)]


async def test_while_pubsub_is_cut_again_and_again_the_very_signals_arrive(
    cluster_backend: RedisSignalsBackend,
) -> None:
    """R22: a broken Pub/Sub costs no signal, and it is subscribed to again."""
    bodies = [f"v{n}" for n in range(10)]
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        for body in bodies:
            cluster_backend.redis.client_kill_pubsub()
            await cluster_backend.signals.announce([body])
        items = await heard(feed, *bodies)
        if Resync("Pub/Sub was lost") not in items:
            await resynced(feed, "Pub/Sub was lost")
        cluster_backend.publish("only published")
        await heard(feed, "only published", within=AT_ONCE)


async def test_silence_is_no_loss_so_long_as_the_server_answers(
    single_backend: RedisSignalsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: a quiet subscription is asked whether it lives, and goes on."""
    monkeypatch.setattr(redis_listener, "_PING_AFTER", 0.02)
    async with single_backend.signals.listen("pod") as feed:
        await resynced(feed)
        before = pings(single_backend)
        await becomes(lambda: pings(single_backend) > before + 3)
        single_backend.publish("after the silence")
        assert await heard(feed, "after the silence") == [Signal("after the silence")]


def pings(backend: RedisSignalsBackend) -> int:
    return int(backend.server.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"])


async def test_a_server_that_says_nothing_more_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: both paths notice a server that neither answers nor closes; when it is back there is a Resync of each."""
    monkeypatch.setattr(redis_listener, "_PING_AFTER", 0.02)
    monkeypatch.setattr(redis_listener, "ANSWER_WITHIN", 0.5)
    service = RedisServer(server_binary())
    try:
        async with (
            redis_backend(service, poll=timedelta(milliseconds=100)) as backend,
            backend.signals.listen("pod") as feed,
        ):
            await resynced(feed)
            with capture_logs() as logs:
                service.freeze()
                await becomes(lambda: {log.get("path") for log in logs} >= {"pubsub", "stream"})
                service.thaw()
            items = await resynced(feed, "the connection was lost")
            if Resync("Pub/Sub was lost") not in items:
                await resynced(feed, "Pub/Sub was lost")
            await backend.signals.announce(["later"])
            await heard(feed, "later")
    finally:
        service.stop()


async def test_a_signal_handed_to_a_dead_connection_is_handed_again(cluster_backend: RedisSignalsBackend) -> None:
    """R22: what Redis counts as delivered and nobody acknowledged is not lost."""
    lost = """
        redis.call('XADD', KEYS[1], '*', 'body', 'swallowed')
        redis.call('XREADGROUP', 'GROUP', ARGV[1], 'listener', 'STREAMS', KEYS[1], '>')
    """
    async with cluster_backend.signals.listen("pod") as feed:
        await begun(cluster_backend, feed)
        cluster_backend.server.eval(lost, 1, cluster_backend.stream, f"{cluster_backend.name}:pod")
        await heard(feed, "swallowed")


async def test_signals_are_acknowledged(cluster_backend: RedisSignalsBackend) -> None:
    """R22: Redis keeps nothing pending for a listener that has read all."""
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        await cluster_backend.signals.announce([f"v{n}" for n in range(150)])
        await heard(feed, *(f"v{n}" for n in range(150)))
        await becomes(
            lambda: (
                not cluster_backend.server.xpending(cluster_backend.stream, f"{cluster_backend.name}:pod")["pending"]
            )
        )


@pytest.mark.parametrize("kept", [0, 1])
async def test_a_stream_trimmed_past_the_listener_is_told(cluster_backend: RedisSignalsBackend, kept: int) -> None:
    """R22: entries that were trimmed before they were read become a Resync, whether or not any is left."""
    add_and_trim = """
        for i = 2, #ARGV do redis.call('XADD', KEYS[1], '*', 'body', ARGV[i]) end
        redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[1])
    """
    async with cluster_backend.signals.listen("pod") as feed:
        await begun(cluster_backend, feed)
        cluster_backend.server.eval(add_and_trim, 1, cluster_backend.stream, kept, "trimmed", "trimmed too", "last")
        items = await resynced(feed)
    assert items == [Signal("last")] * kept + [Resync("the stream was trimmed before it was read")]


async def test_a_listener_that_keeps_up_is_not_told_of_trimming(cluster_backend: RedisSignalsBackend) -> None:
    """R22: trimming what was read is no loss: no Resync without need."""
    async with cluster_backend.signals.listen("pod") as feed:
        await begun(cluster_backend, feed)
        for n in range(5):
            cluster_backend.server.xadd(cluster_backend.stream, {"body": f"v{n}"}, maxlen=2, approximate=False)
            assert await heard(feed, f"v{n}") == [Signal(f"v{n}")]


async def begun(backend: RedisSignalsBackend, feed: Items) -> None:
    """Past the first entry of an empty stream, which may cause a needless Resync, and quiet."""
    await resynced(feed)
    backend.add("first")
    await resynced(feed)
    backend.add("second")
    await heard(feed, "second")


async def test_a_wiped_redis_is_told_and_used_again(
    cluster: RedisCluster, cluster_backend: RedisSignalsBackend
) -> None:
    """R22: when Redis lost its data the listener resyncs, and both paths work as before."""
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        cluster.wipe()
        await resynced(feed, "the stream was lost")
        await cluster_backend.signals.announce(["later"])
        await heard(feed, "later")
        cluster_backend.add("only added")
        await heard(feed, "only added")


async def test_a_node_that_comes_back_empty_is_told_and_used_again(private_cluster: RedisCluster) -> None:
    """R22, R23: the node with the stream dies and returns without data: Transient, then Resync, then signals."""
    async with redis_backend(private_cluster) as backend, backend.signals.listen("pod") as feed:
        await resynced(feed)
        owner = private_cluster.owner(backend.stream)
        private_cluster.kill(owner)
        with pytest.raises(Transient):
            await backend.signals.announce(["nobody there"])
        await asyncio.to_thread(private_cluster.start, owner)
        await resynced(feed, "the stream was lost")
        await backend.signals.announce(["later"])
        await heard(feed, "later")


async def test_a_failover_is_told_and_the_new_node_used() -> None:
    """R22, R23: a replica takes over the stream from a frozen master: Resync, then signals from the new one."""
    service = await asyncio.to_thread(RedisCluster, server_binary(), replicas=True)
    try:
        async with redis_backend(service) as backend, backend.signals.listen("pod") as feed:
            await resynced(feed)
            owner = service.owner(backend.stream)
            service.freeze(owner)
            await asyncio.to_thread(service.wait_until_promoted, owner + 3)
            await resynced(feed, "the connection was lost", "the stream was lost")
            await backend.signals.announce(["to the new master"])
            await heard(feed, "to the new master")
            service.thaw(owner)
            await backend.signals.announce(["after the thaw"])
            await heard(feed, "after the thaw")
    finally:
        await asyncio.to_thread(service.stop)


async def test_a_stream_that_moves_to_another_node_is_followed(
    cluster: RedisCluster, cluster_backend: RedisSignalsBackend
) -> None:
    """R16, R22: while a slot is moved, for however long, and after it: Resync, and signals on both paths."""
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        await cluster_backend.signals.announce(["before"])
        cluster.open_slot(cluster_backend.stream)
        await resynced(feed, "the connection was lost")
        await cluster_backend.signals.announce(["meanwhile"])
        await heard(feed, "meanwhile")
        cluster.close_slot(cluster_backend.stream)
        await cluster_backend.signals.announce(["after"])
        await heard(feed, "after")


async def test_a_listener_that_closes_leaves_nothing_behind(cluster_backend: RedisSignalsBackend) -> None:
    """R22: a listener's group is its own, and gone when it closes."""
    async with cluster_backend.signals.listen("a") as one, cluster_backend.signals.listen("b") as other:
        await resynced(one)
        await resynced(other)
        assert cluster_backend.groups == {f"{cluster_backend.name}:a", f"{cluster_backend.name}:b"}
    assert cluster_backend.groups == set()


async def test_leftovers_of_dead_listeners_are_reaped(cluster: RedisCluster) -> None:
    """R22: groups of listeners long silent go, at the start of a listener and later; other groups stay."""
    quick = {"poll": timedelta(milliseconds=20), "leftover_after": timedelta(milliseconds=400)}
    async with redis_backend(cluster, **quick) as backend:
        leave_behind(backend, f"{backend.name}:dead", "another:group")
        async with backend.signals.listen("pod") as feed, backend.signals.listen("other") as other_feed:
            await resynced(feed)
            await resynced(other_feed)
            alive = {f"{backend.name}:pod", f"{backend.name}:other", "another:group"}
            await becomes(lambda: backend.groups == alive)
            leave_behind(backend, f"{backend.name}:died-later")
            await becomes(lambda: backend.groups == alive)


def leave_behind(backend: RedisSignalsBackend, *groups: str) -> None:
    for group in groups:
        backend.server.xgroup_create(backend.stream, group, mkstream=True)
        backend.server.xgroup_createconsumer(backend.stream, group, "listener")


async def test_a_quiet_listener_is_not_taken_for_dead(cluster: RedisCluster) -> None:
    """R22: a listener shows Redis that it lives also when there is nothing to hear."""
    async with (
        redis_backend(cluster, poll=timedelta(milliseconds=20)) as backend,
        backend.signals.listen("pod") as feed,
    ):
        await begun(backend, feed)
        idle = [0]

        def has_shown_itself() -> bool:
            (consumer,) = backend.server.xinfo_consumers(backend.stream, f"{backend.name}:pod")
            idle.append(consumer["idle"])
            return idle[-1] < idle[-2]  # without a sign of life it only grows

        await becomes(has_shown_itself)


async def test_a_listener_begins_afresh_where_its_namesake_died(cluster_backend: RedisSignalsBackend) -> None:
    """R22: the leftover group of the same name does not bring the signals of another life."""
    leave_behind(cluster_backend, f"{cluster_backend.name}:pod")
    cluster_backend.add("of another life")
    async with cluster_backend.signals.listen("pod") as feed:
        await resynced(feed)
        cluster_backend.add("of this life")
        assert first_arrivals(await heard(feed, "of this life")) == ["of this life"]


async def test_the_lag_is_that_of_the_slowest_listener(cluster_backend: RedisSignalsBackend) -> None:
    """R26: entries nobody was handed count for the group that is furthest behind, of this channel's groups."""
    assert await cluster_backend.signals.lag() == 0
    leave_behind(cluster_backend, f"{cluster_backend.name}:slow", "another:slower")
    await cluster_backend.signals.announce(["a", "b", "c"])
    assert await cluster_backend.signals.lag() == 3
    cluster_backend.server.xreadgroup(
        f"{cluster_backend.name}:slow", "listener", {cluster_backend.stream: ">"}, count=2
    )
    assert await cluster_backend.signals.lag() == 1
    async with cluster_backend.signals.listen("quick") as feed:
        await resynced(feed)
        assert await cluster_backend.signals.lag() == 1
    cluster_backend.server.xgroup_destroy(cluster_backend.stream, f"{cluster_backend.name}:slow")
    assert await cluster_backend.signals.lag() == 0


async def test_the_stream_is_trimmed(cluster: RedisCluster) -> None:
    """R15: however much is announced, the stream keeps about as many entries as it is told to."""
    async with redis_backend(cluster, stream_length=100) as backend:
        await backend.signals.announce([str(n) for n in range(1_000)])
        assert 100 <= backend.server.xlen(backend.stream) < 300


async def test_a_user_with_a_password_is_let_in_and_without_it_is_told(single: RedisServer) -> None:
    """R16: Redis may ask for user and password; a wrong one is Transient with a hint, as it may be mended there."""
    user = {"username": "pod", "password": "secret"}
    single.ask("ACL SETUSER", "pod", "on", ">secret", "~*", "&*", "+@all")
    async with redis_backend(single, **user) as backend, backend.signals.listen("pod") as feed:
        await resynced(feed)
        await backend.signals.announce(["known"])
        await heard(feed, "known")
    async with redis_backend(single, **user | {"password": "wrong"}) as backend:
        await assert_down(backend.signals)


@pytest.mark.parametrize("nodes", [[], ["no-port"], [":6379"], ["a:x"]])
def test_addresses_that_are_none_are_refused(nodes: list[str]) -> None:
    """R16: bad addresses are bad configuration."""
    with pytest.raises(BadConfig):
        RedisSignals(nodes, pub_channel="p", stream_key="s", group_prefix="g")


def test_a_single_redis_has_one_address() -> None:
    """R16: several addresses without a cluster are bad configuration."""
    with pytest.raises(BadConfig):
        RedisSignals(["a:1", "b:2"], mode="single", pub_channel="p", stream_key="s", group_prefix="g")


def test_a_listener_must_have_time_to_show_that_it_lives() -> None:
    """R22: a limit at which the living would be reaped is bad configuration."""
    with pytest.raises(BadConfig):
        RedisSignals(["a:1"], pub_channel="p", stream_key="s", group_prefix="g", leftover_after=timedelta(seconds=5))


async def test_a_listener_that_breaks_says_so() -> None:
    """R22: should a source of signals end by a fault of ours, its reader is not left waiting for ever."""

    async def broken() -> None:
        raise LookupError("a fault")

    feed = Feed(Inbox(), [asyncio.create_task(broken())])
    await resynced(feed)
    with pytest.raises(LookupError):
        await anext(feed)


# What the machine has


def test_a_missing_service_skips_unless_the_run_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    """PENSTOCK_REQUIRE turns a skip into a failure, and wants the machine's own redis-server."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PENSTOCK_REQUIRE", "kafka")
    with pytest.raises(pytest.skip.Exception, match="no redis-server"):
        require("redis", "no redis-server")
    monkeypatch.setenv("PENSTOCK_REQUIRE", "kafka, redis")
    with pytest.raises(pytest.fail.Exception, match="no redis-server"):
        require("redis", "no redis-server")
    assert redis_binary() is None
