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

from penstock.kernel import listener as notifications
from penstock.kernel.db import Database
from penstock.kernel.embedded import embedded_postgres
from penstock.kernel.errors import BadConfig, Invalid, Transient
from penstock.kernel.listener import Heard, Inbox, Missed
from penstock.kernel.signals import BODY_LIMIT, Resync, Signal, Signals
from penstock.kernel.signals.feed import Feed
from penstock.kernel.signals.postgres import PostgresSignals
from penstock.kernel.signals.redis import RedisSignals
from penstock.kernel.signals.redis import listener as redis_listener
from tests.kernel.signals_backends import PostgresSignalsBackend, RedisSignalsBackend, SignalsBackend, redis_rig
from tests.services.redis import RedisCluster, RedisServer, redis_binary
from tests.support.require import require

WITHIN = 20.0
AT_ONCE = 2.0
ROOT = Path(__file__).parents[2]

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
async def postgres_rig(db: Database) -> PostgresSignalsBackend:
    return PostgresSignalsBackend(db)


@pytest.fixture
async def cluster_rig(cluster: RedisCluster) -> AsyncIterator[RedisSignalsBackend]:
    async with redis_rig(cluster) as rig:
        yield rig


@pytest.fixture
async def single_rig(single: RedisServer) -> AsyncIterator[RedisSignalsBackend]:
    async with redis_rig(single) as rig:
        yield rig


@pytest.fixture(params=["postgres", "cluster", "single"])
def rig(request: pytest.FixtureRequest) -> SignalsBackend:
    """Every implementation in turn."""
    found: SignalsBackend = request.getfixturevalue(f"{request.param}_rig")
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


async def test_the_first_thing_a_listener_receives_is_resync(rig: SignalsBackend) -> None:
    """R22: whatever happened before, a listener first looks at the source of truth."""
    await rig.signals.announce(["before"])
    async with rig.signals.listen("pod") as feed, asyncio.timeout(WITHIN):
        assert await anext(feed) == Resync("the listener began")


async def test_a_signal_arrives_at_once(rig: SignalsBackend) -> None:
    """R16: from announcement to listener there is no waiting for a poll."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        await rig.signals.announce(["now"])
        await heard(feed, "now", within=AT_ONCE)


async def test_every_listener_hears_every_signal(rig: SignalsBackend) -> None:
    """R22: listeners do not share signals among them; each gets all."""
    bodies = [f"v{n}" for n in range(20)]
    async with contextlib.AsyncExitStack() as stack:
        feeds = [await stack.enter_async_context(rig.signals.listen(f"pod-{n}")) for n in range(4)]
        for feed in feeds:
            await resynced(feed)
        for body in bodies:
            await rig.signals.announce([body])
        for feed in feeds:
            assert first_arrivals(await heard(feed, *bodies)) == bodies


async def test_signals_of_one_announcer_arrive_in_order(rig: SignalsBackend) -> None:
    """R16: what was announced first is heard first, within an announcement and among several."""
    bodies = [f"{n:04}" for n in range(500)]
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        for start in range(0, 500, 250):
            await rig.signals.announce(bodies[start : start + 250])
        assert first_arrivals(await heard(feed, *bodies)) == bodies


@pytest.mark.parametrize(
    "body",
    ["Größe 🌊 \N{GREEK SMALL LETTER OMEGA}", "x" * BODY_LIMIT, "ü" * (BODY_LIMIT // 2), ' {"a": "\'\\"}\r\n\t\x01 '],
    ids=["unicode", "largest", "largest in bytes", "quotes and controls"],
)
async def test_a_body_arrives_as_it_was_written(rig: SignalsBackend, body: str) -> None:
    """R16: any text of up to the limit in bytes comes through unchanged."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        await rig.signals.announce([body])
        await heard(feed, body)


@pytest.mark.parametrize("body", ["x" * (BODY_LIMIT + 1), "ü" * BODY_LIMIT, "", "a\0b", "\ud800"])
async def test_a_body_nobody_could_carry_is_refused_with_all_its_company(rig: SignalsBackend, body: str) -> None:
    """R16: one bad body is Invalid, and none of the announcement goes out."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        with pytest.raises(Invalid, match="bytes of text without NUL") as refused:
            await rig.signals.announce(["in bad company", body])
        await rig.signals.announce(["after"])
        assert Signal("in bad company") not in await heard(feed, "after")
    assert refused.value.code == "SIGNAL_TOO_LARGE"
    assert refused.value.hint


async def test_announcing_nothing_is_no_signal(rig: SignalsBackend) -> None:
    """R15: an empty announcement is not an error."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        await rig.signals.announce([])
        await rig.signals.announce(["something"])
        assert first_arrivals(await heard(feed, "something")) == ["something"]


async def test_a_lost_connection_is_told_and_mended(rig: SignalsBackend) -> None:
    """R22: every reconnect is a Resync, after which what was announced meanwhile is known; later signals arrive."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        for n in range(3):
            await rig.cut()
            await rig.signals.announce([f"meanwhile-{n}"])
            await resynced(feed, "the connection was lost", "Pub/Sub was lost")
            await rig.signals.announce([f"later-{n}"])
            await heard(feed, f"later-{n}")


async def test_a_listener_that_comes_back_hears_again(rig: SignalsBackend) -> None:
    """R22: after a restart under the same name a listener resyncs, and hears what comes, not what came."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
    await rig.signals.announce(["while away"])
    async with rig.signals.listen("pod") as feed:
        assert await resynced(feed) == [Resync("the listener began")]
        await rig.signals.announce(["back"])
        assert first_arrivals(await heard(feed, "back")) == ["back"]


async def test_whoever_stops_waiting_loses_nothing(rig: SignalsBackend) -> None:
    """R19: a listener may wait with a limit; what comes afterwards is still handed out."""
    async with rig.signals.listen("pod") as feed:
        await resynced(feed)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(feed), 0.01)
        await rig.signals.announce(["after all"])
        await heard(feed, "after all")


async def test_a_listener_that_is_too_slow_is_told_so(rig: SignalsBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: what waits for a slow listener is bounded; beyond it there is a Resync in place of the signals."""
    monkeypatch.setattr(notifications, "INBOX_LIMIT", 10)
    told = Missed("the listener was too slow")
    async with rig.signals.listen("pod") as feed:
        assert isinstance(feed, Feed)
        await resynced(feed)
        waiting: asyncio.Queue[Heard | Missed] = feed._inbox._queue
        await rig.signals.announce([f"v{n}" for n in range(100)])
        await becomes(lambda: told in list(waiting._queue))  # type: ignore[attr-defined]
        assert waiting.qsize() <= 10
        await resynced(feed, told.reason)


async def test_a_listener_in_another_process_hears(rig: SignalsBackend) -> None:
    """R16: signals cross processes; the listener there begins with its own Resync."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kernel.signals_listener", *rig.child, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(WITHIN):
            assert await child.stdout.readline() == b"resync\n"
            await rig.signals.announce(["over there"])
            while await child.stdout.readline() != b"over there\n":
                pass
    finally:
        child.kill()
        await child.wait()


async def test_a_cancelled_announcement_ends_as_cancelled(rig: SignalsBackend) -> None:
    """R15: whoever announces can be stopped at any moment, and the channel still works."""
    for steps in range(40):
        announcing = asyncio.create_task(rig.signals.announce(["perhaps"]))
        for _ in range(steps):
            await asyncio.sleep(0)
        if announcing.cancel():
            with pytest.raises(asyncio.CancelledError):
                await announcing
    await rig.signals.announce(["works"])


async def test_a_listener_can_be_closed_at_any_moment(rig: SignalsBackend) -> None:
    """R22: closing is prompt whatever the listener is just doing."""
    for steps in range(40):
        async with asyncio.timeout(WITHIN), rig.signals.listen("pod"):
            for _ in range(steps):
                await asyncio.sleep(0)


async def test_a_channel_that_works_passes_its_check(rig: SignalsBackend) -> None:
    """R23: health tells the truth in good times."""
    await rig.signals.check()


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
    async with redis_rig(private_cluster) as rig:
        await rig.signals.announce(["works"])
        for number in range(len(private_cluster.addresses)):
            private_cluster.kill(number)
        await assert_down(rig.signals)


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
    cluster: RedisCluster, cluster_rig: RedisSignalsBackend
) -> None:
    """R15: the stream has it in its field `body`, and whoever subscribes at any node of the cluster gets it."""
    elsewhere = cluster.node((cluster.owner(cluster_rig.stream) + 1) % 3).pubsub()  # type: ignore[no-untyped-call]
    elsewhere.subscribe(f"{cluster_rig.name}:pub")
    assert elsewhere.get_message(timeout=WITHIN)["type"] == "subscribe"
    await cluster_rig.signals.announce(["both"])
    assert elsewhere.get_message(timeout=WITHIN)["data"] == "both"
    elsewhere.close()
    assert [fields for _, fields in cluster_rig.server.xrange(cluster_rig.stream)] == [{"body": "both"}]


async def test_pubsub_alone_is_instant(cluster_rig: RedisSignalsBackend) -> None:
    """R15: what is published arrives without the stream's help."""
    async with cluster_rig.signals.listen("pod") as feed:
        await resynced(feed)
        cluster_rig.publish("only published")
        await heard(feed, "only published", within=AT_ONCE)


async def test_what_pubsub_lost_is_caught_up_from_the_stream(cluster_rig: RedisSignalsBackend) -> None:
    """R15, R22: a signal that is only in the stream is heard, and heard once."""
    async with cluster_rig.signals.listen("pod") as feed:
        await resynced(feed)
        for n in range(5):
            cluster_rig.add(f"only added {n}")
        items = await heard(feed, "only added 4")
    assert [item.body for item in items if isinstance(item, Signal)] == [f"only added {n}" for n in range(5)]


async def test_while_pubsub_is_cut_again_and_again_the_very_signals_arrive(cluster_rig: RedisSignalsBackend) -> None:
    """R22: a broken Pub/Sub costs no signal, and it is subscribed to again."""
    bodies = [f"v{n}" for n in range(10)]
    async with cluster_rig.signals.listen("pod") as feed:
        await resynced(feed)
        for body in bodies:
            cluster_rig.redis.client_kill_pubsub()
            await cluster_rig.signals.announce([body])
        items = await heard(feed, *bodies)
        if Resync("Pub/Sub was lost") not in items:
            await resynced(feed, "Pub/Sub was lost")
        cluster_rig.publish("only published")
        await heard(feed, "only published", within=AT_ONCE)


async def test_silence_is_no_loss_so_long_as_the_server_answers(
    single_rig: RedisSignalsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: a quiet subscription is asked whether it lives, and goes on."""
    monkeypatch.setattr(redis_listener, "_PING_AFTER", 0.02)
    async with single_rig.signals.listen("pod") as feed:
        await resynced(feed)
        before = pings(single_rig)
        await becomes(lambda: pings(single_rig) > before + 3)
        single_rig.publish("after the silence")
        assert await heard(feed, "after the silence") == [Signal("after the silence")]


def pings(rig: RedisSignalsBackend) -> int:
    return int(rig.server.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"])


async def test_a_server_that_says_nothing_more_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: both paths notice a server that neither answers nor closes; when it is back there is a Resync of each."""
    monkeypatch.setattr(redis_listener, "_PING_AFTER", 0.02)
    monkeypatch.setattr(redis_listener, "ANSWER_WITHIN", 0.5)
    service = RedisServer(server_binary())
    try:
        async with redis_rig(service, poll=timedelta(milliseconds=100)) as rig, rig.signals.listen("pod") as feed:
            await resynced(feed)
            with capture_logs() as logs:
                service.freeze()
                await becomes(lambda: {log.get("path") for log in logs} >= {"pubsub", "stream"})
                service.thaw()
            items = await resynced(feed, "the connection was lost")
            if Resync("Pub/Sub was lost") not in items:
                await resynced(feed, "Pub/Sub was lost")
            await rig.signals.announce(["later"])
            await heard(feed, "later")
    finally:
        service.stop()


async def test_a_signal_handed_to_a_dead_connection_is_handed_again(cluster_rig: RedisSignalsBackend) -> None:
    """R22: what Redis counts as delivered and nobody acknowledged is not lost."""
    lost = """
        redis.call('XADD', KEYS[1], '*', 'body', 'swallowed')
        redis.call('XREADGROUP', 'GROUP', ARGV[1], 'listener', 'STREAMS', KEYS[1], '>')
    """
    async with cluster_rig.signals.listen("pod") as feed:
        await begun(cluster_rig, feed)
        cluster_rig.server.eval(lost, 1, cluster_rig.stream, f"{cluster_rig.name}:pod")
        await heard(feed, "swallowed")


async def test_signals_are_acknowledged(cluster_rig: RedisSignalsBackend) -> None:
    """R22: Redis keeps nothing pending for a listener that has read all."""
    async with cluster_rig.signals.listen("pod") as feed:
        await resynced(feed)
        await cluster_rig.signals.announce([f"v{n}" for n in range(150)])
        await heard(feed, *(f"v{n}" for n in range(150)))
        await becomes(lambda: not cluster_rig.server.xpending(cluster_rig.stream, f"{cluster_rig.name}:pod")["pending"])


@pytest.mark.parametrize("kept", [0, 1])
async def test_a_stream_trimmed_past_the_listener_is_told(cluster_rig: RedisSignalsBackend, kept: int) -> None:
    """R22: entries that were trimmed before they were read become a Resync, whether or not any is left."""
    add_and_trim = """
        for i = 2, #ARGV do redis.call('XADD', KEYS[1], '*', 'body', ARGV[i]) end
        redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[1])
    """
    async with cluster_rig.signals.listen("pod") as feed:
        await begun(cluster_rig, feed)
        cluster_rig.server.eval(add_and_trim, 1, cluster_rig.stream, kept, "trimmed", "trimmed too", "last")
        items = await resynced(feed)
    assert items == [Signal("last")] * kept + [Resync("the stream was trimmed before it was read")]


async def test_a_listener_that_keeps_up_is_not_told_of_trimming(cluster_rig: RedisSignalsBackend) -> None:
    """R22: trimming what was read is no loss: no Resync without need."""
    async with cluster_rig.signals.listen("pod") as feed:
        await begun(cluster_rig, feed)
        for n in range(5):
            cluster_rig.server.xadd(cluster_rig.stream, {"body": f"v{n}"}, maxlen=2, approximate=False)
            assert await heard(feed, f"v{n}") == [Signal(f"v{n}")]


async def begun(rig: RedisSignalsBackend, feed: Items) -> None:
    """Past the first entry of an empty stream, which may cause a needless Resync, and quiet."""
    await resynced(feed)
    rig.add("first")
    await resynced(feed)
    rig.add("second")
    await heard(feed, "second")


async def test_a_wiped_redis_is_told_and_used_again(cluster: RedisCluster, cluster_rig: RedisSignalsBackend) -> None:
    """R22: when Redis lost its data the listener resyncs, and both paths work as before."""
    async with cluster_rig.signals.listen("pod") as feed:
        await resynced(feed)
        cluster.wipe()
        await resynced(feed, "the stream was lost")
        await cluster_rig.signals.announce(["later"])
        await heard(feed, "later")
        cluster_rig.add("only added")
        await heard(feed, "only added")


async def test_a_node_that_comes_back_empty_is_told_and_used_again(private_cluster: RedisCluster) -> None:
    """R22, R23: the node with the stream dies and returns without data: Transient, then Resync, then signals."""
    async with redis_rig(private_cluster) as rig, rig.signals.listen("pod") as feed:
        await resynced(feed)
        owner = private_cluster.owner(rig.stream)
        private_cluster.kill(owner)
        with pytest.raises(Transient):
            await rig.signals.announce(["nobody there"])
        await asyncio.to_thread(private_cluster.start, owner)
        await resynced(feed, "the stream was lost")
        await rig.signals.announce(["later"])
        await heard(feed, "later")


async def test_a_failover_is_told_and_the_new_node_used() -> None:
    """R22, R23: a replica takes over the stream from a frozen master: Resync, then signals from the new one."""
    service = await asyncio.to_thread(RedisCluster, server_binary(), replicas=True)
    try:
        async with redis_rig(service) as rig, rig.signals.listen("pod") as feed:
            await resynced(feed)
            owner = service.owner(rig.stream)
            service.freeze(owner)
            await asyncio.to_thread(service.wait_until_promoted, owner + 3)
            await resynced(feed, "the connection was lost", "the stream was lost")
            await rig.signals.announce(["to the new master"])
            await heard(feed, "to the new master")
            service.thaw(owner)
            await rig.signals.announce(["after the thaw"])
            await heard(feed, "after the thaw")
    finally:
        await asyncio.to_thread(service.stop)


async def test_a_stream_that_moves_to_another_node_is_followed(
    cluster: RedisCluster, cluster_rig: RedisSignalsBackend
) -> None:
    """R16, R22: while a slot is moved, for however long, and after it: Resync, and signals on both paths."""
    async with cluster_rig.signals.listen("pod") as feed:
        await resynced(feed)
        await cluster_rig.signals.announce(["before"])
        cluster.open_slot(cluster_rig.stream)
        await resynced(feed, "the connection was lost")
        await cluster_rig.signals.announce(["meanwhile"])
        await heard(feed, "meanwhile")
        cluster.close_slot(cluster_rig.stream)
        await cluster_rig.signals.announce(["after"])
        await heard(feed, "after")


async def test_a_listener_that_closes_leaves_nothing_behind(cluster_rig: RedisSignalsBackend) -> None:
    """R22: a listener's group is its own, and gone when it closes."""
    async with cluster_rig.signals.listen("a") as one, cluster_rig.signals.listen("b") as other:
        await resynced(one)
        await resynced(other)
        assert cluster_rig.groups == {f"{cluster_rig.name}:a", f"{cluster_rig.name}:b"}
    assert cluster_rig.groups == set()


async def test_leftovers_of_dead_listeners_are_reaped(cluster: RedisCluster) -> None:
    """R22: groups of listeners long silent go, at the start of a listener and later; other groups stay."""
    quick = {"poll": timedelta(milliseconds=20), "leftover_after": timedelta(milliseconds=400)}
    async with redis_rig(cluster, **quick) as rig:
        leave_behind(rig, f"{rig.name}:dead", "another:group")
        async with rig.signals.listen("pod") as feed, rig.signals.listen("other") as other_feed:
            await resynced(feed)
            await resynced(other_feed)
            alive = {f"{rig.name}:pod", f"{rig.name}:other", "another:group"}
            await becomes(lambda: rig.groups == alive)
            leave_behind(rig, f"{rig.name}:died-later")
            await becomes(lambda: rig.groups == alive)


def leave_behind(rig: RedisSignalsBackend, *groups: str) -> None:
    for group in groups:
        rig.server.xgroup_create(rig.stream, group, mkstream=True)
        rig.server.xgroup_createconsumer(rig.stream, group, "listener")


async def test_a_quiet_listener_is_not_taken_for_dead(cluster: RedisCluster) -> None:
    """R22: a listener shows Redis that it lives also when there is nothing to hear."""
    async with redis_rig(cluster, poll=timedelta(milliseconds=20)) as rig, rig.signals.listen("pod") as feed:
        await begun(rig, feed)
        idle = [0]

        def has_shown_itself() -> bool:
            (consumer,) = rig.server.xinfo_consumers(rig.stream, f"{rig.name}:pod")
            idle.append(consumer["idle"])
            return idle[-1] < idle[-2]  # without a sign of life it only grows

        await becomes(has_shown_itself)


async def test_a_listener_begins_afresh_where_its_namesake_died(cluster_rig: RedisSignalsBackend) -> None:
    """R22: the leftover group of the same name does not bring the signals of another life."""
    leave_behind(cluster_rig, f"{cluster_rig.name}:pod")
    cluster_rig.add("of another life")
    async with cluster_rig.signals.listen("pod") as feed:
        await resynced(feed)
        cluster_rig.add("of this life")
        assert first_arrivals(await heard(feed, "of this life")) == ["of this life"]


async def test_the_lag_is_that_of_the_slowest_listener(cluster_rig: RedisSignalsBackend) -> None:
    """R26: entries nobody was handed count for the group that is furthest behind, of this channel's groups."""
    assert await cluster_rig.signals.lag() == 0
    leave_behind(cluster_rig, f"{cluster_rig.name}:slow", "another:slower")
    await cluster_rig.signals.announce(["a", "b", "c"])
    assert await cluster_rig.signals.lag() == 3
    cluster_rig.server.xreadgroup(f"{cluster_rig.name}:slow", "listener", {cluster_rig.stream: ">"}, count=2)
    assert await cluster_rig.signals.lag() == 1
    async with cluster_rig.signals.listen("quick") as feed:
        await resynced(feed)
        assert await cluster_rig.signals.lag() == 1
    cluster_rig.server.xgroup_destroy(cluster_rig.stream, f"{cluster_rig.name}:slow")
    assert await cluster_rig.signals.lag() == 0


async def test_the_stream_is_trimmed(cluster: RedisCluster) -> None:
    """R15: however much is announced, the stream keeps about as many entries as it is told to."""
    async with redis_rig(cluster, stream_length=100) as rig:
        await rig.signals.announce([str(n) for n in range(1_000)])
        assert 100 <= rig.server.xlen(rig.stream) < 300


async def test_a_user_with_a_password_is_let_in_and_without_it_is_told(single: RedisServer) -> None:
    """R16: Redis may ask for user and password; a wrong one is Transient with a hint, as it may be mended there."""
    user = {"username": "pod", "password": "secret"}
    single.ask("ACL SETUSER", "pod", "on", ">secret", "~*", "&*", "+@all")
    async with redis_rig(single, **user) as rig, rig.signals.listen("pod") as feed:
        await resynced(feed)
        await rig.signals.announce(["known"])
        await heard(feed, "known")
    async with redis_rig(single, **user | {"password": "wrong"}) as rig:
        await assert_down(rig.signals)


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
