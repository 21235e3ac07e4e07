"""The bus: keyed, ordered, handed out until settled; the same promises for every implementation."""

import asyncio
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from penstock.kernel.bus import (
    KEY_LIMIT,
    VALUE_LIMIT,
    BusDelivery,
    BusMessage,
    DeadLetterCount,
    DeliveryPolicy,
    Subscription,
)
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Invalid, Transient
from penstock.kernel.tasks.outcome import Done, Failed, Outcome, Retry
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.kernel.work.worker import Worker, handle_each
from tests.kernel.bus.backends import BusBackend, KafkaBusBackend, PostgresBusBackend
from tests.kernel.bus.worker_process import BusWorkerProcess, child
from tests.services.kafka import Kafka, kafka

WITHIN = 40.0  # a broker notices a death after six seconds at the earliest
SHORT = timedelta(seconds=1)
LONG = DeliveryPolicy(lease_for=timedelta(minutes=5))
QUICK = timedelta(milliseconds=20)


@pytest.fixture(scope="session")
def broker() -> Iterator[Kafka]:
    with kafka() as service:
        yield service


@pytest.fixture
async def postgres_backend(db: Database) -> PostgresBusBackend:
    return PostgresBusBackend(db)


@pytest.fixture
async def kafka_backend(db: Database, broker: Kafka) -> AsyncIterator[KafkaBusBackend]:
    backend = KafkaBusBackend(db, broker)
    yield backend
    await backend.bus.close()


@pytest.fixture(params=["postgres", "kafka"])
def backend(request: pytest.FixtureRequest) -> BusBackend:
    """Every implementation in turn."""
    found: BusBackend = request.getfixturevalue(f"{request.param}_backend")
    return found


# What a test says in a line


async def publish(backend: BusBackend, *pairs: tuple[str, str]) -> None:
    """Publish *pairs* of key and value, in one go."""
    await backend.bus.publish([BusMessage(backend.topic, key, value.encode()) for key, value in pairs])


async def take(subscription: Subscription, limit: int = 100) -> Sequence[BusDelivery]:
    """Take, as soon as there is something."""
    async with asyncio.timeout(WITHIN):
        while not (taken := await subscription.take(limit)):
            await subscription.wait(1)
        return taken


async def take_all(subscription: Subscription, count: int) -> list[BusDelivery]:
    """Hold *count* messages at once.

    A partition hands out nothing more while some of its messages are held. So what is held goes back when nothing more
    comes, as it does when a broker has sent only the first messages.
    """
    taken: list[BusDelivery] = []
    async with asyncio.timeout(WITHIN):
        while len(taken) < count:
            if more := await subscription.take(count):
                taken += more
            else:
                await subscription.settle([(delivery, None) for delivery in taken])
                taken = []
                await subscription.wait(1)
    return taken


async def settle(subscription: Subscription, taken: Sequence[BusDelivery], outcome: Outcome | None = Done()) -> int:  # noqa: B008
    """Settle, as patiently as the work loop does it: a broker may be slow to answer."""
    async with asyncio.timeout(WITHIN):
        while True:
            with suppress(Transient):
                return await subscription.settle([(delivery, outcome) for delivery in taken])


async def finish(backend: BusBackend, subscription: Subscription, held: BusDelivery) -> None:
    """Settle *held*. Where a change of workers may end the hold of a live worker, the message comes again."""
    while await settle(subscription, [held]):
        assert backend.may_repeat, "the hold was lost"
        (again,) = await take(subscription, limit=1)
        assert again.message.value == held.message.value
        assert again.attempt > held.attempt
        held = again


def values(deliveries: Sequence[BusDelivery]) -> list[str]:
    return [delivery.message.value.decode() for delivery in deliveries]


Handle = Callable[[BusDelivery], Awaitable[Outcome]]


@asynccontextmanager
async def working(
    backend: BusBackend, handle: Handle, name: str = "w", policy: DeliveryPolicy = LONG
) -> AsyncIterator[None]:
    """A worker at work; it stops and leaves at the end."""
    async with backend.bus.subscribe(backend.topic, worker=name, policy=policy) as subscription:
        poll = timedelta(milliseconds=200)
        worker = Worker(subscription, handle_each(handle, subscription), Telemetry(), batch=10, poll=poll)
        running = asyncio.create_task(worker.run())
        try:
            yield
        finally:
            worker.stop()
            await running


class Notes:
    """What workers handled, in order; a test waits until enough of it happened."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, BusDelivery]] = []
        self._news = asyncio.Condition()

    async def add(self, worker: str, delivery: BusDelivery) -> None:
        async with self._news:
            self.seen.append((worker, delivery))
            self._news.notify_all()

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN), self._news:
            await self._news.wait_for(reached)

    async def until_handled(self, count: int) -> None:
        await self.until(lambda: len({delivery.message.value for _, delivery in self.seen}) >= count)

    def of_key(self, key: str) -> list[str]:
        return values([delivery for _, delivery in self.seen if delivery.message.key == key])


# Order


async def test_messages_of_a_key_come_in_order(backend: BusBackend) -> None:
    """R9: in order per key, over any number of batches."""
    keys = ["a", "b", "c"]
    await publish(backend, *[(key, f"{key}{n}") for n in range(20) for key in keys])
    seen: dict[str, list[str]] = defaultdict(list)
    async with backend.bus.subscribe(backend.topic, worker="w") as subscription:
        while sum(map(len, seen.values())) < 60:
            taken = await take(subscription, limit=7)
            assert len(taken) <= 7
            for delivery in taken:
                seen[delivery.message.key].append(delivery.message.value.decode())
            assert await settle(subscription, taken) == 0
    assert seen == {key: [f"{key}{n}" for n in range(20)] for key in keys}


async def test_nothing_overtakes_a_message_that_is_retried(backend: BusBackend) -> None:
    """R9, R11: a key goes on only after the message before was settled; a retry repeats it first."""
    await publish(backend, *[("a", str(n)) for n in range(6)])
    notes = Notes()

    async def handle(delivery: BusDelivery) -> Outcome:
        await notes.add("w", delivery)
        retried = delivery.message.value in {b"1", b"3"} and delivery.attempt < 3
        return Retry("not yet", after=QUICK) if retried else Done()

    async with working(backend, handle):
        await notes.until_handled(6)
    assert notes.of_key("a") == ["0", "1", "1", "1", "2", "3", "3", "3", "4", "5"]
    assert [delivery.attempt for _, delivery in notes.seen] == [1, 1, 2, 3, 1, 1, 2, 3, 1, 1]


async def test_what_is_out_is_not_handed_out_again(backend: BusBackend) -> None:
    """A key's next message waits until the one before it is settled, also for the worker that holds it."""
    await publish(backend, ("a", "1"), ("a", "2"))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        first = await take(subscription, limit=1)
        assert values(first) == ["1"]
        assert await subscription.take(10) == []
        await settle(subscription, first)
        assert values(await take(subscription)) == ["2"]


async def test_publishing_wakes_a_waiting_worker(backend: BusBackend) -> None:
    """Nobody sleeps through a message."""
    async with backend.bus.subscribe(backend.topic, worker="w") as subscription:
        await publish(backend, ("a", "first"))
        await settle(subscription, await take(subscription))
        waiting = asyncio.create_task(take_after_one_wait(subscription))
        await publish(backend, ("a", "second"))
        assert values(await waiting) == ["second"]


async def take_after_one_wait(subscription: Subscription) -> Sequence[BusDelivery]:
    async with asyncio.timeout(WITHIN / 2):
        while not (taken := await subscription.take(10)):
            await subscription.wait(WITHIN)  # would time out, did nothing wake it
        return taken


async def test_a_message_published_before_a_wait_ends_it(backend: BusBackend) -> None:
    """What came between a take that found nothing and the wait after it is not waited for."""
    async with backend.bus.subscribe(backend.topic, worker="w") as subscription:
        assert await subscription.take(10) == []
        await publish(backend, ("a", "1"))
        async with asyncio.timeout(WITHIN / 2):
            await subscription.wait(WITHIN)
        assert values(await take_after_one_wait(subscription)) == ["1"]


# Many workers


async def test_keys_are_spread_over_workers(backend: BusBackend) -> None:
    """R9: several workers share a topic; each message is handled once, each key in order."""
    notes = Notes()

    async def handler(name: str) -> Handle:
        async def handle(delivery: BusDelivery) -> Outcome:
            await notes.add(name, delivery)
            return Done()

        return handle

    async with working(backend, await handler("one"), "one"), working(backend, await handler("two"), "two"):
        rounds = 0
        while len({worker for worker, _ in notes.seen}) < 2:  # until both have joined
            await publish(backend, *[(f"k{n}", f"k{n} {rounds:03}") for n in range(20)])
            rounds += 1
            await notes.until_handled(20 * rounds)
    check_handled_in_order(backend, notes, 20 * rounds)


async def test_workers_join_and_leave_and_every_message_is_handled(backend: BusBackend) -> None:
    """R11: a change of workers neither loses nor doubles nor reorders anything."""
    notes, total = Notes(), 0

    def handler(name: str) -> Handle:
        async def handle(delivery: BusDelivery) -> Outcome:
            await notes.add(name, delivery)
            return Done()

        return handle

    async def publish_some() -> None:
        nonlocal total
        await publish(backend, *[(f"k{n % 20}", f"k{n % 20} {n:05}") for n in range(total, total + 100)])
        total += 100

    async with AsyncExitStack() as workers:
        first = await workers.enter_async_context(AsyncExitStack())
        await first.enter_async_context(working(backend, handler("first"), "first"))
        await publish_some()
        await workers.enter_async_context(working(backend, handler("second"), "second"))
        for _ in range(3):
            await publish_some()
            await notes.until_handled(total // 2)
        await publish_some()
        await first.aclose()
        await workers.enter_async_context(working(backend, handler("third"), "third"))
        await publish_some()
        await notes.until_handled(total)
    check_handled_in_order(backend, notes, total)
    assert await backend.bus.backlog(backend.topic) == 0


def check_handled_in_order(backend: BusBackend, notes: Notes, total: int) -> None:
    times = Counter(delivery.message.value for _, delivery in notes.seen)
    assert len(times) == total
    assert backend.may_repeat or set(times.values()) == {1}
    for key in {delivery.message.key for _, delivery in notes.seen}:
        first_times = list(dict.fromkeys(notes.of_key(key)))
        assert first_times == sorted(first_times)


async def test_leaving_gives_back_untouched_messages_at_once(backend: BusBackend) -> None:
    """A worker that stops leaves the rest of its batch to the others: now, in order, and as if never taken."""
    await publish(backend, *[("a", str(n)) for n in range(5)])
    async with backend.bus.subscribe(backend.topic, worker="leaving", policy=LONG) as subscription:
        held = await take_all(subscription, 5)
        await subscription.settle([(held[0], Done()), *[(delivery, None) for delivery in held[1:]]])
    async with backend.bus.subscribe(backend.topic, worker="staying", policy=LONG) as subscription:
        given = await take_all(subscription, 4)
    assert values(given) == ["1", "2", "3", "4"]
    assert {delivery.attempt for delivery in given} == {1}


async def test_leaving_gives_back_what_was_never_settled(backend: BusBackend) -> None:
    """A worker that falls out of its loop still leaves nothing behind that others would have to wait for."""
    await publish(backend, ("a", "1"), ("b", "2"))
    with pytest.raises(LookupError):
        async with backend.bus.subscribe(backend.topic, worker="failing", policy=LONG) as subscription:
            await take_all(subscription, 2)
            raise LookupError
    async with backend.bus.subscribe(backend.topic, worker="next", policy=LONG) as subscription:
        assert sorted(values(await take_all(subscription, 2))) == ["1", "2"]


async def test_several_event_loops_share_a_topic(backend: BusBackend) -> None:
    """Each loop of a process may have a bus of its own; together they handle each message once."""
    await publish(backend, *[(f"k{n}", str(n)) for n in range(40)])
    handled: list[str] = []
    address = backend.address()

    async def run() -> None:
        name = threading.current_thread().name
        async with address.open() as bus, bus.subscribe(backend.topic, worker=name) as queue, asyncio.timeout(WITHIN):
            while len(set(handled)) < 40:
                taken = await queue.take(3)
                handled.extend(values(taken))
                await settle(queue, taken)
                if not taken:
                    await queue.wait(0.1)

    await asyncio.gather(*[asyncio.to_thread(asyncio.run, run()) for _ in range(3)])
    assert sorted(set(handled), key=int) == [str(n) for n in range(40)]
    assert backend.may_repeat or len(handled) == 40


# Losing the hold


async def test_a_settle_after_the_hold_was_lost_changes_nothing(backend: BusBackend) -> None:
    """R11: a worker whose lease ran out is told so; the message is still with the one that took it over."""
    await publish(backend, ("a", "1"), ("a", "2"))
    short = DeliveryPolicy(lease_for=SHORT)
    async with backend.bus.subscribe(backend.topic, worker="slow", policy=short) as slow:
        held = await take(slow, limit=1)
        async with backend.bus.subscribe(backend.topic, worker="quick", policy=LONG) as quick:
            taken = await take(quick)
            assert await settle(slow, held) == 1
            assert await settle(slow, held, Failed("no")) == 1
            assert await backend.bus.backlog(backend.topic) == 2
            assert (values(taken), taken[0].attempt) == (["1"], 2)
            await finish(backend, quick, taken[0])
            assert values(await take(quick)) == ["2"]
    assert await backend.bus.dead_letters(backend.topic) == []


async def test_an_earlier_hold_of_the_same_worker_counts_for_nothing(backend: BusBackend) -> None:
    """R11: who lost a message and got it again settles it under the new hold only."""
    await publish(backend, ("a", "1"))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=DeliveryPolicy(lease_for=SHORT)) as subscription:
        lost = await take(subscription)
        held = await take(subscription)  # the lease ran out
        assert (values(held), held[0].attempt) == (["1"], 2)
        assert held[0].fence > lost[0].fence
        assert await settle(subscription, lost, Failed("too late")) == 1
        await finish(backend, subscription, held[0])
    assert await backend.bus.dead_letters(backend.topic) == []


async def test_what_is_lost_comes_again_however_much_waits_behind_it(backend: BusBackend) -> None:
    """R11: a worker that has fetched ahead as much as it may, and lets its hold run out, gets all of it again."""
    await publish(backend, *[("a", str(n)) for n in range(2_000)])
    async with backend.bus.subscribe(backend.topic, worker="w", policy=DeliveryPolicy(lease_for=SHORT)) as subscription:
        await take(subscription, limit=1)
        held = await take(subscription, limit=1)  # the lease ran out
        assert (values(held), held[0].attempt) == (["0"], 2)
        await finish(backend, subscription, held[0])
        assert values(await take(subscription, limit=1)) == ["1"]


async def test_a_batch_is_settled_once(backend: BusBackend) -> None:
    """Saying it again says nothing new."""
    await publish(backend, ("a", "1"), ("a", "2"))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        held = await take(subscription, limit=1)
        assert await settle(subscription, held) == 0
        assert await settle(subscription, held) == 1
        assert values(await take(subscription)) == ["2"]


async def test_a_worker_that_extends_keeps_what_it_holds(backend: BusBackend) -> None:
    """R11: work may take longer than a lease, and others may join meanwhile: nobody else gets what is being handled."""
    await publish(backend, *[(f"k{n}", str(n)) for n in range(20)])
    notes, finish = Notes(), asyncio.Event()

    async def handle(delivery: BusDelivery) -> Outcome:
        await notes.add("long", delivery)
        async with asyncio.timeout(WITHIN):
            await finish.wait()
        return Done()

    short = DeliveryPolicy(lease_for=SHORT)
    async with working(backend, handle, "long", short):
        await notes.until_handled(1)
        async with backend.bus.subscribe(backend.topic, worker="other", policy=short) as other:
            until = time.monotonic() + 2 * SHORT.total_seconds()
            async with asyncio.timeout(WITHIN):
                while await backend.bus.backlog(backend.topic):
                    taken = await other.take(10)
                    for delivery in taken:
                        await notes.add("other", delivery)
                    await settle(other, taken)
                    await other.wait(0.1)
                    if time.monotonic() > until:
                        finish.set()
    check_handled_in_order(backend, notes, 20)
    assert backend.may_repeat or {delivery.attempt for _, delivery in notes.seen} == {1}


async def test_a_worker_that_asks_for_nothing_holds_nobody_up(backend: BusBackend) -> None:
    """A frozen worker keeps no messages from the others, also none that came after it froze."""
    async with backend.bus.subscribe(backend.topic, worker="silent", policy=DeliveryPolicy(lease_for=SHORT)) as silent:
        await publish(backend, ("a", "1"))
        await settle(silent, await take(silent))
        await publish(backend, *[(f"k{n}", f"k{n}") for n in range(20)])
        async with backend.bus.subscribe(backend.topic, worker="busy", policy=LONG) as busy:
            seen: list[str] = []
            while len(seen) < 20:
                taken = await take(busy)
                seen += values(taken)
                await settle(busy, taken)
    assert sorted(seen) == sorted(f"k{n}" for n in range(20))


async def test_messages_of_a_killed_worker_are_handed_out_again(backend: BusBackend) -> None:
    """A worker killed in mid-batch leaves all of it to another, in order, one by one: any may be what killed it."""
    await publish(backend, *[("a", f"a{n}") for n in range(3)], *[("b", f"b{n}") for n in range(3)])
    async with child(backend, "hold", lease=SHORT) as dying:
        held = await dying.taken()
        dying.send(signal.SIGKILL)
        await dying.ended()
    async with backend.bus.subscribe(backend.topic, worker="next", policy=LONG) as subscription:
        seen: dict[str, BusDelivery] = {}
        while len(seen) < 6:
            taken = await take(subscription)
            new = {value: delivery for value, delivery in zip(values(taken), taken, strict=True) if value not in seen}
            suspects = [delivery for value, delivery in new.items() if value in held]
            assert not suspects or (len(taken) == 1 and suspects[0].attempt == 2)
            assert backend.may_repeat or len(new) == len(taken)
            seen |= new
            lost = await settle(subscription, taken)
            assert backend.may_repeat or lost == 0
    assert sorted(seen) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    for key in "ab":
        assert [value for value in seen if value[0] == key] == [f"{key}{n}" for n in range(3)]


async def test_a_frozen_worker_loses_its_messages_and_is_told(backend: BusBackend) -> None:
    """R11: a worker stopped for longer than its lease cannot settle what another took over meanwhile."""
    await publish(backend, ("a", "1"))
    async with child(backend, "hold", lease=SHORT) as zombie:
        assert await zombie.taken() == ["1"]
        zombie.send(signal.SIGSTOP)
        async with backend.bus.subscribe(backend.topic, worker="next", policy=LONG) as subscription:
            taken = await take(subscription)
            assert (values(taken), taken[0].attempt) == (["1"], 2)
            zombie.send(signal.SIGCONT)
            await zombie.tell("settle")
            assert await zombie.line() == "lost 1 1"
            assert await backend.bus.backlog(backend.topic) == 1
            await finish(backend, subscription, taken[0])


@pytest.mark.full
async def test_a_hold_that_runs_out_while_workers_change_holds_nothing_up(backend: BusBackend) -> None:
    """R11: who loses its hold while the others wait for a dead worker takes part again, and nothing stays behind."""
    async with backend.bus.subscribe(backend.topic, worker="late", policy=DeliveryPolicy(lease_for=2 * SHORT)) as late:
        async with child(backend, "hold", lease=SHORT) as dying:
            await share(backend, late, dying)
            await publish(backend, *[(f"k{n}", "held") for n in range(20)])
            held = await take(late)
            dying.send(signal.SIGKILL)
            await dying.ended()
        async with (
            backend.bus.subscribe(backend.topic, worker="next", policy=LONG) as other,
            asyncio.timeout(WITHIN),
        ):
            while await backend.bus.backlog(backend.topic):
                for worker in (late, other):
                    await settle(worker, await worker.take(100))
                    await worker.wait(0.1)
        assert await settle(late, held) == len(held)
    assert await backend.bus.dead_letters(backend.topic) == []


async def test_a_worker_at_work_loses_nothing_by_the_death_of_another(kafka_backend: KafkaBusBackend) -> None:
    """R11: what is settled while the group waits for a dead worker is settled, however late the broker answers."""
    backend, bus, topic = kafka_backend, kafka_backend.bus, kafka_backend.topic
    async with bus.subscribe(topic, worker="alive", policy=DeliveryPolicy(lease_for=2 * SHORT)) as alive:
        async with child(backend, "hold", lease=8 * SHORT) as dying:
            await share(backend, alive, dying)
            await publish(backend, *[(f"k{n}", "held") for n in range(20)])
            held = await take(alive)
            dying.send(signal.SIGKILL)
            await dying.ended()
        async with bus.subscribe(topic, worker="next", policy=LONG):
            until = time.monotonic() + 2 * SHORT.total_seconds()  # by then it has asked to join again
            while time.monotonic() < until:
                await alive.extend(held)
                await alive.wait(0.1)
            lost = await settle(alive, held)
    assert backend.may_repeat or lost == 0


async def share(backend: BusBackend, subscription: Subscription, other: BusWorkerProcess) -> None:
    """Work on and on, until another process holds some of the messages."""
    holding = asyncio.create_task(other.taken())
    while not holding.done():
        await publish(backend, *[(f"k{n}", "shared") for n in range(20)])
        await settle(subscription, await subscription.take(100))
        await subscription.wait(0.1)
    assert await holding


@pytest.mark.full
async def test_a_message_that_kills_its_workers_is_set_aside_alone(backend: BusBackend) -> None:
    """H6, R10: after so many deaths it is dead-lettered with the reason; what was with it is handled."""
    others = [f"a{n}" for n in range(3)] + [f"b{n}" for n in range(3)]
    await publish(
        backend, ("b", "b0"), ("a", "a0"), ("a", "poison"), ("a", "a1"), ("b", "b1"), ("a", "a2"), ("b", "b2")
    )
    handled: list[str] = []
    exits: list[int] = []
    while 0 not in exits and len(exits) < 5:
        async with child(backend, "work", lease=SHORT, max_attempts=2) as worker:
            handled += await worker.handled()
            exits.append(await worker.ended())
    assert exits == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert handled.count("poison") == 2
    assert sorted({value for value in handled if value != "poison"}) == others
    [letter] = await backend.bus.dead_letters(backend.topic)
    assert (letter.message.key, letter.message.value) == ("a", b"poison")
    assert letter.reason == "its workers died or froze 2 times"
    assert await backend.bus.backlog(backend.topic) == 0


# Retry and dead letters


async def test_a_retry_is_handed_out_no_sooner_than_told(backend: BusBackend) -> None:
    """Retry(after) holds its partition back for that long."""
    pause = timedelta(milliseconds=400)
    await publish(backend, ("a", "1"), ("a", "2"))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        taken = await take_all(subscription, 2)
        before = time.monotonic()
        assert await subscription.settle([(taken[0], Retry("later", after=pause)), (taken[1], None)]) == 0
        assert await subscription.take(10) == []
        again = await take_all(subscription, 2)
        assert time.monotonic() - before >= pause.total_seconds()
        assert [(d.message.value, d.attempt) for d in again] == [(b"1", 2), (b"2", 1)]


async def test_attempts_and_delay_outlive_the_worker(backend: BusBackend) -> None:
    """H6: how often a message was tried is known to whoever gets it next, and when it is due."""
    pause = timedelta(milliseconds=400)
    await publish(backend, ("a", "1"))
    async with backend.bus.subscribe(backend.topic, worker="first", policy=LONG) as subscription:
        taken = await take(subscription)
        before = time.monotonic()
        await settle(subscription, taken, Retry("later", after=pause))
    async with backend.bus.subscribe(backend.topic, worker="second", policy=LONG) as subscription:
        [again] = await take(subscription)
        assert time.monotonic() - before >= pause.total_seconds()
    assert again.attempt == 2
    assert again.fence > taken[0].fence


async def test_a_message_is_set_aside_after_so_many_attempts(backend: BusBackend) -> None:
    """H6: redelivered at most so often, then dead-lettered with the error; the key goes on."""
    await backend.bus.publish(
        [
            BusMessage(backend.topic, "a", b"bad", {"traceId": "t1", "Sprache": "süß"}),
            BusMessage(backend.topic, "a", b"good"),
        ]
    )
    notes = Notes()

    async def handle(delivery: BusDelivery) -> Outcome:
        await notes.add("w", delivery)
        return Retry("disk full", after=QUICK) if delivery.message.value == b"bad" else Done()

    dead: list[int] = []
    async with working(backend, handle, policy=DeliveryPolicy(max_attempts=3, on_dead=dead.append)):
        await notes.until_handled(2)
    assert sum(dead) == 1
    assert notes.of_key("a") == ["bad", "bad", "bad", "good"]
    [letter] = await backend.bus.dead_letters(backend.topic)
    assert letter.message == BusMessage(backend.topic, "a", b"bad", {"traceId": "t1", "Sprache": "süß"})
    assert letter.reason == "failed after 3 attempts: disk full"
    assert letter.attempts == 3
    assert abs(letter.died_at - backend.db.clock.now()) < timedelta(minutes=1)


async def test_trouble_that_is_nobodys_fault_is_retried_without_end(backend: BusBackend) -> None:
    """R11: a transient failure never ends a message, however often it comes; the attempts that count are its own."""
    await publish(backend, ("a", "1"))
    twice = DeliveryPolicy(max_attempts=2, lease_for=timedelta(minutes=5))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=twice) as subscription:
        for _ in range(5):
            [delivery] = await take(subscription)
            assert delivery.attempt == 1
            await settle(subscription, [delivery], Retry("database down", QUICK, counts=False))
        await settle(subscription, await take(subscription))
    assert await backend.bus.dead_letters(backend.topic) == []
    assert await backend.bus.backlog(backend.topic) == 0


async def test_a_failure_is_set_aside_at_once_and_the_partition_goes_on(backend: BusBackend) -> None:
    """R10, R11: what cannot be read is dead-lettered with the reason, whatever that says; the next is handled."""
    await publish(backend, *[("a", str(n)) for n in range(4)])
    reason = "no \0 JSON \ud800 ✗"
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        taken = await take_all(subscription, 4)
        outcomes: list[Outcome] = [Failed(reason), Done(), Failed("x" * 10_000), Done()]
        assert await subscription.settle(list(zip(taken, outcomes, strict=True))) == 0
        assert await backend.bus.backlog(backend.topic) == 0
        await publish(backend, ("a", "next"))
        assert values(await take(subscription)) == ["next"]
    letters = await backend.bus.dead_letters(backend.topic)
    assert [letter.message.value for letter in letters] == [b"0", b"2"]
    assert letters[0].reason == "no � JSON ? ✗"
    assert letters[1].reason.startswith("xxx")
    assert [letter.message.value for letter in await backend.bus.dead_letters(backend.topic, limit=1)] == [b"0"]


async def test_recent_dead_letters_are_counted(backend: BusBackend) -> None:
    """R10: the dead letters of a topic since a time, and the time of the oldest of them."""
    if backend.may_repeat:
        pytest.skip("the mock cluster of librdkafka has no index of messages by time")
    await publish(backend, ("a", "1"), ("a", "2"), ("a", "3"))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        taken = await take_all(subscription, 3)
        await subscription.settle([(delivery, Failed("no") if delivery != taken[1] else Done()) for delivery in taken])
    hour_ago = backend.db.clock.now() - timedelta(hours=1)
    count = await backend.bus.count_dead_letters(backend.topic, hour_ago)
    assert count.number == 2
    assert count.oldest is not None
    assert abs(count.oldest - backend.db.clock.now()) < timedelta(minutes=1)
    in_an_hour = backend.db.clock.now() + timedelta(hours=1)
    assert await backend.bus.count_dead_letters(backend.topic, in_an_hour) == DeadLetterCount()


# Publishing


async def test_what_a_transaction_publishes_is_seen_when_it_commits(backend: BusBackend) -> None:
    """H4: the next message and the change that causes it are one; before the commit nobody sees it."""
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        async with backend.db.transaction() as tx:
            await backend.bus.publish(
                [BusMessage(backend.topic, "a", b"1", {"n": "1"}), BusMessage(backend.topic, "a", b"2")], tx=tx
            )
            await backend.relay()
            assert await backend.bus.backlog(backend.topic) == 0
        await backend.relay()
        taken = await take_all(subscription, 2)
        assert [(d.message.value, dict(d.message.headers)) for d in taken] == [(b"1", {"n": "1"}), (b"2", {})]


async def test_what_a_rolled_back_transaction_published_is_never_seen(backend: BusBackend) -> None:
    """H4: without the commit there is no message."""
    with pytest.raises(LookupError):
        async with backend.db.transaction() as tx:
            await backend.bus.publish([BusMessage(backend.topic, "a", b"never")], tx=tx)
            raise LookupError
    await backend.relay()
    await publish(backend, ("a", "after"))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        assert values(await take(subscription)) == ["after"]


async def test_publishing_to_a_server_that_is_down_says_so(backend: BusBackend) -> None:
    """R8: within seconds, as Transient with a hint; so the caller can answer 503."""
    async with backend.dead() as bus, asyncio.timeout(10):
        with pytest.raises(Transient) as failure:
            await bus.publish([BusMessage(backend.topic, "a", b"1")])
        assert failure.value.hint
        with pytest.raises(Transient) as failure:
            await bus.check()
        assert failure.value.code == "BUS_DOWN"
        assert failure.value.hint


async def test_a_bus_that_is_up_says_so(backend: BusBackend) -> None:
    await backend.bus.check()


async def test_messages_arrive_as_they_were_published(backend: BusBackend) -> None:
    """Keys of any script and of the full length, empty values, headers, bytes up to the limit."""
    messages = [
        BusMessage(backend.topic, "ключ/鍵:🔑", bytes(range(256)), {"traceId": "00-aß", "empty": ""}),
        BusMessage(backend.topic, "é" * (KEY_LIMIT // 2), b""),
        BusMessage(backend.topic, "big", b"x" * VALUE_LIMIT),
    ]
    await backend.bus.publish(messages)
    await backend.bus.publish([])
    arrived: dict[str, BusMessage] = {}
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        while len(arrived) < 3:
            taken = await take(subscription)
            arrived.update({delivery.message.key: delivery.message for delivery in taken})
            await settle(subscription, taken)
    assert arrived == {message.key: message for message in messages}


@pytest.mark.parametrize(
    "change",
    [
        {"key": ""},
        {"key": "k" * (KEY_LIMIT + 1)},
        {"key": "a\0b"},
        {"key": "\ud800"},
        {"value": b"x" * (VALUE_LIMIT + 1)},
        {"headers": {"a": "\0"}},
        {"headers": {"\ud800": "a"}},
        {"topic": ""},
        {"topic": "no/such topic"},
    ],
)
async def test_what_no_bus_could_carry_is_refused(backend: BusBackend, change: dict[str, Any]) -> None:
    """R8: over a limit is the caller's mistake, told before anything is sent."""
    fine = BusMessage(backend.topic, "fine", b"")
    with pytest.raises(Invalid, match=r"key|bytes|header|topic"):
        await backend.bus.publish([fine, replace(fine, **change)])
    assert await backend.bus.backlog(backend.topic) == 0


async def test_the_backlog_counts_what_is_not_settled(backend: BusBackend) -> None:
    """What waits and what is out count; what is done or dead does not; an unknown topic has none."""
    assert await backend.bus.backlog(backend.topic) == 0
    assert await backend.bus.dead_letters(backend.topic) == []
    await publish(backend, *[(f"k{n}", str(n)) for n in range(10)])
    assert await backend.bus.backlog(backend.topic) == 10
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        taken = await take_all(subscription, 10)
        assert await backend.bus.backlog(backend.topic) == 10
        outcomes = [Failed("no") if n < 3 else Done() if n < 7 else None for n in range(10)]
        await subscription.settle(list(zip(taken, outcomes, strict=True)))
        kept = settled_before_first_open(taken, outcomes)
        assert await backend.bus.backlog(backend.topic) == 10 - kept


def settled_before_first_open(taken: Sequence[BusDelivery], outcomes: Sequence[Outcome | None]) -> int:
    """How many ended: in each partition, those before its first that did not."""
    open_partitions: set[int] = set()
    ended = 0
    for delivery, outcome in zip(taken, outcomes, strict=True):
        if outcome is None:
            open_partitions.add(delivery.partition)
        ended += delivery.partition not in open_partitions
    return ended
