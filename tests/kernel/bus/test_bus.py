"""The bus: ordered per key, redelivered until settled, with the same guarantees for every implementation."""

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
    """Every implementation."""
    found: BusBackend = request.getfixturevalue(f"{request.param}_backend")
    return found


# What a test says in a line


async def publish(backend: BusBackend, *pairs: tuple[str, str]) -> None:
    """Publish *pairs* of key and value in one call."""
    await backend.bus.publish([BusMessage(backend.topic, key, value.encode()) for key, value in pairs])


async def take(subscription: Subscription, limit: int = 100) -> Sequence[BusDelivery]:
    """Take messages as soon as there are any."""
    async with asyncio.timeout(WITHIN):
        while not (taken := await subscription.take(limit)):
            await subscription.wait(1)
        return taken


async def take_all(subscription: Subscription, count: int) -> list[BusDelivery]:
    """Claim *count* messages at once.

    A partition delivers nothing more while some of its messages are claimed. So claimed messages are released if no
    more arrive, which happens when a broker has sent only the first messages.
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
    """Settle with retries, as the work loop does, because a broker may answer slowly."""
    async with asyncio.timeout(WITHIN):
        while True:
            with suppress(Transient):
                return await subscription.settle([(delivery, outcome) for delivery in taken])


async def finish(backend: BusBackend, subscription: Subscription, claimed: BusDelivery) -> None:
    """Settle *claimed*, also if a change of workers ends the claim and the message is redelivered."""
    while await settle(subscription, [claimed]):
        assert backend.may_repeat, "the claim was lost"
        (again,) = await take(subscription, limit=1)
        assert again.message.value == claimed.message.value
        assert again.attempt > claimed.attempt
        claimed = again


def values(deliveries: Sequence[BusDelivery]) -> list[str]:
    return [delivery.message.value.decode() for delivery in deliveries]


Handle = Callable[[BusDelivery], Awaitable[Outcome]]


@asynccontextmanager
async def working(
    backend: BusBackend, handle: Handle, name: str = "w", policy: DeliveryPolicy = LONG
) -> AsyncIterator[None]:
    """Run a worker until the end of the block."""
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
    """The handled messages in order, for which a test can wait."""

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


async def test_messages_of_a_key_are_delivered_in_order(backend: BusBackend) -> None:
    """R9: messages of a key are in order over any number of batches."""
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
    """R9, R11: a message is delivered only after the previous one of its key was settled; a retry repeats it first."""
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


async def test_a_delivered_message_is_not_delivered_again(backend: BusBackend) -> None:
    """The next message of a key waits until the previous one is settled, also for the same worker."""
    await publish(backend, ("a", "1"), ("a", "2"))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        first = await take(subscription, limit=1)
        assert values(first) == ["1"]
        assert await subscription.take(10) == []
        await settle(subscription, first)
        assert values(await take(subscription)) == ["2"]


async def test_publishing_wakes_a_waiting_worker(backend: BusBackend) -> None:
    """A waiting worker is woken by a new message."""
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


async def test_a_message_published_before_a_wait_ends_the_wait(backend: BusBackend) -> None:
    """A message that arrives between an empty take and the wait after it ends the wait."""
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

    async with working(backend, await handler("first"), "first"), working(backend, await handler("second"), "second"):
        rounds = 0
        while len({worker for worker, _ in notes.seen}) < 2:  # until both have joined
            await publish(backend, *[(f"k{n}", f"k{n} {rounds:03}") for n in range(20)])
            rounds += 1
            await notes.until_handled(20 * rounds)
    check_handled_in_order(backend, notes, 20 * rounds)


async def test_workers_join_and_leave_and_every_message_is_handled(backend: BusBackend) -> None:
    """R11: a change of workers neither loses nor duplicates nor reorders messages."""
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
    assert await backend.bus.count_backlog(backend.topic) == 0


def check_handled_in_order(backend: BusBackend, notes: Notes, total: int) -> None:
    times = Counter(delivery.message.value for _, delivery in notes.seen)
    assert len(times) == total
    assert backend.may_repeat or set(times.values()) == {1}
    for key in {delivery.message.key for _, delivery in notes.seen}:
        first_times = list(dict.fromkeys(notes.of_key(key)))
        assert first_times == sorted(first_times)


async def test_a_leaving_worker_releases_untouched_messages_at_once(backend: BusBackend) -> None:
    """The rest of the batch of a worker that stops is delivered to others at once, in order, as a first attempt."""
    await publish(backend, *[("a", str(n)) for n in range(5)])
    async with backend.bus.subscribe(backend.topic, worker="leaving", policy=LONG) as subscription:
        claimed = await take_all(subscription, 5)
        await subscription.settle([(claimed[0], Done()), *[(delivery, None) for delivery in claimed[1:]]])
    async with backend.bus.subscribe(backend.topic, worker="staying", policy=LONG) as subscription:
        given = await take_all(subscription, 4)
    assert values(given) == ["1", "2", "3", "4"]
    assert {delivery.attempt for delivery in given} == {1}


async def test_a_leaving_worker_releases_unsettled_messages(backend: BusBackend) -> None:
    """Others do not wait for the messages of a worker whose loop ended with an error."""
    await publish(backend, ("a", "1"), ("b", "2"))
    with pytest.raises(LookupError):
        async with backend.bus.subscribe(backend.topic, worker="failing", policy=LONG) as subscription:
            await take_all(subscription, 2)
            raise LookupError
    async with backend.bus.subscribe(backend.topic, worker="next", policy=LONG) as subscription:
        assert sorted(values(await take_all(subscription, 2))) == ["1", "2"]


async def test_several_event_loops_share_a_topic(backend: BusBackend) -> None:
    """Each event loop of a process may have its own bus; together they handle each message once."""
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


# Losing a claim


async def test_a_settle_after_the_lease_expired_changes_nothing(backend: BusBackend) -> None:
    """R11: a worker whose lease has expired gets the number of lost messages; another worker has them."""
    await publish(backend, ("a", "1"), ("a", "2"))
    short = DeliveryPolicy(lease_for=SHORT)
    async with backend.bus.subscribe(backend.topic, worker="slow", policy=short) as slow:
        claimed = await take(slow, limit=1)
        async with backend.bus.subscribe(backend.topic, worker="quick", policy=LONG) as quick:
            taken = await take(quick)
            assert await settle(slow, claimed) == 1
            assert await settle(slow, claimed, Failed("no")) == 1
            assert await backend.bus.count_backlog(backend.topic) == 2
            assert (values(taken), taken[0].attempt) == (["1"], 2)
            await finish(backend, quick, taken[0])
            assert values(await take(quick)) == ["2"]
    assert await backend.bus.read_dead_letters(backend.topic) == []


async def test_an_earlier_claim_of_the_same_worker_does_not_count(backend: BusBackend) -> None:
    """R11: a worker that lost a message and got it again can settle it only under the new claim."""
    await publish(backend, ("a", "1"))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=DeliveryPolicy(lease_for=SHORT)) as subscription:
        lost = await take(subscription)
        claimed = await take(subscription)  # the lease has expired
        assert (values(claimed), claimed[0].attempt) == (["1"], 2)
        assert claimed[0].fence > lost[0].fence
        assert await settle(subscription, lost, Failed("too late")) == 1
        await finish(backend, subscription, claimed[0])
    assert await backend.bus.read_dead_letters(backend.topic) == []


async def test_lost_messages_are_redelivered_however_many_wait(backend: BusBackend) -> None:
    """R11: a worker with a full prefetch whose lease expires gets all messages again."""
    await publish(backend, *[("a", str(n)) for n in range(2_000)])
    async with backend.bus.subscribe(backend.topic, worker="w", policy=DeliveryPolicy(lease_for=SHORT)) as subscription:
        await take(subscription, limit=1)
        claimed = await take(subscription, limit=1)  # the lease has expired
        assert (values(claimed), claimed[0].attempt) == (["0"], 2)
        await finish(backend, subscription, claimed[0])
        assert values(await take(subscription, limit=1)) == ["1"]


async def test_a_batch_is_settled_once(backend: BusBackend) -> None:
    """A second settlement of a batch changes nothing."""
    await publish(backend, ("a", "1"), ("a", "2"))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        claimed = await take(subscription, limit=1)
        assert await settle(subscription, claimed) == 0
        assert await settle(subscription, claimed) == 1
        assert values(await take(subscription)) == ["2"]


async def test_a_worker_that_extends_its_lease_keeps_its_messages(backend: BusBackend) -> None:
    """R11: work may take longer than a lease while others join: no other worker gets the messages."""
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
                while await backend.bus.count_backlog(backend.topic):
                    taken = await other.take(10)
                    for delivery in taken:
                        await notes.add("other", delivery)
                    await settle(other, taken)
                    await other.wait(0.1)
                    if time.monotonic() > until:
                        finish.set()
    check_handled_in_order(backend, notes, 20)
    assert backend.may_repeat or {delivery.attempt for _, delivery in notes.seen} == {1}


async def test_an_inactive_worker_does_not_block_others(backend: BusBackend) -> None:
    """The messages of a frozen worker are delivered to others, also those published after it froze."""
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


async def test_messages_of_a_killed_worker_are_redelivered(backend: BusBackend) -> None:
    """The batch of a killed worker is redelivered in order, one by one, because any message may have killed it."""
    await publish(backend, *[("a", f"a{n}") for n in range(3)], *[("b", f"b{n}") for n in range(3)])
    async with child(backend, "claim", lease=SHORT) as dying:
        claimed = await dying.taken()
        dying.send(signal.SIGKILL)
        await dying.ended()
    async with backend.bus.subscribe(backend.topic, worker="next", policy=LONG) as subscription:
        seen: dict[str, BusDelivery] = {}
        while len(seen) < 6:
            taken = await take(subscription)
            new = {value: delivery for value, delivery in zip(values(taken), taken, strict=True) if value not in seen}
            suspects = [delivery for value, delivery in new.items() if value in claimed]
            assert not suspects or (len(taken) == 1 and suspects[0].attempt == 2)
            assert backend.may_repeat or len(new) == len(taken)
            seen |= new
            lost = await settle(subscription, taken)
            assert backend.may_repeat or lost == 0
    assert sorted(seen) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    for key in "ab":
        assert [value for value in seen if value[0] == key] == [f"{key}{n}" for n in range(3)]


async def test_a_frozen_worker_loses_its_messages(backend: BusBackend) -> None:
    """R11: a worker that was frozen for longer than its lease cannot settle messages that another has claimed."""
    await publish(backend, ("a", "1"))
    async with child(backend, "claim", lease=SHORT) as zombie:
        assert await zombie.taken() == ["1"]
        zombie.send(signal.SIGSTOP)
        async with backend.bus.subscribe(backend.topic, worker="next", policy=LONG) as subscription:
            taken = await take(subscription)
            assert (values(taken), taken[0].attempt) == (["1"], 2)
            zombie.send(signal.SIGCONT)
            await zombie.tell("settle")
            assert await zombie.line() == "lost 1 1"
            assert await backend.bus.count_backlog(backend.topic) == 1
            await finish(backend, subscription, taken[0])


@pytest.mark.full
async def test_a_lease_that_expires_during_a_change_of_workers_blocks_nothing(backend: BusBackend) -> None:
    """R11: a worker whose lease expires while others wait for a dead worker joins again, and no message is left."""
    async with backend.bus.subscribe(backend.topic, worker="late", policy=DeliveryPolicy(lease_for=2 * SHORT)) as late:
        async with child(backend, "claim", lease=SHORT) as dying:
            await share(backend, late, dying)
            await publish(backend, *[(f"k{n}", "claimed") for n in range(20)])
            claimed = await take(late)
            dying.send(signal.SIGKILL)
            await dying.ended()
        async with (
            backend.bus.subscribe(backend.topic, worker="next", policy=LONG) as other,
            asyncio.timeout(WITHIN),
        ):
            while await backend.bus.count_backlog(backend.topic):
                for worker in (late, other):
                    await settle(worker, await worker.take(100))
                    await worker.wait(0.1)
        assert await settle(late, claimed) == len(claimed)
    assert await backend.bus.read_dead_letters(backend.topic) == []


async def test_a_running_worker_loses_nothing_when_another_dies(kafka_backend: KafkaBusBackend) -> None:
    """R11: a settlement while the group waits for a dead worker counts, however late the broker answers."""
    backend, bus, topic = kafka_backend, kafka_backend.bus, kafka_backend.topic
    async with bus.subscribe(topic, worker="alive", policy=DeliveryPolicy(lease_for=2 * SHORT)) as alive:
        async with child(backend, "claim", lease=8 * SHORT) as dying:
            await share(backend, alive, dying)
            await publish(backend, *[(f"k{n}", "claimed") for n in range(20)])
            claimed = await take(alive)
            dying.send(signal.SIGKILL)
            await dying.ended()
        async with bus.subscribe(topic, worker="next", policy=LONG):
            until = time.monotonic() + 2 * SHORT.total_seconds()  # by then it has asked to join again
            while time.monotonic() < until:
                await alive.extend(claimed)
                await alive.wait(0.1)
            lost = await settle(alive, claimed)
    assert backend.may_repeat or lost == 0


async def share(backend: BusBackend, subscription: Subscription, other: BusWorkerProcess) -> None:
    """Work until another process has claimed some of the messages."""
    holding = asyncio.create_task(other.taken())
    while not holding.done():
        await publish(backend, *[(f"k{n}", "shared") for n in range(20)])
        await settle(subscription, await subscription.take(100))
        await subscription.wait(0.1)
    assert await holding


@pytest.mark.full
async def test_a_message_that_kills_its_workers_is_dead_lettered_alone(backend: BusBackend) -> None:
    """H6, R10: after several deaths it is dead-lettered with the reason; the rest of its batch is handled."""
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
    [dead_letter] = await backend.bus.read_dead_letters(backend.topic)
    assert (dead_letter.message.key, dead_letter.message.value) == ("a", b"poison")
    assert dead_letter.reason == "its workers died or froze 2 times"
    assert await backend.bus.count_backlog(backend.topic) == 0


# Retry and dead letters


async def test_a_retry_is_delivered_after_its_delay(backend: BusBackend) -> None:
    """Retry(after) delays its partition."""
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
    """H6: the next worker of a message gets its number of attempts, and not before it is due."""
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


async def test_a_message_is_dead_lettered_after_its_attempts(backend: BusBackend) -> None:
    """H6: after the maximum of attempts a message is dead-lettered with the error, and its key continues."""
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
    [dead_letter] = await backend.bus.read_dead_letters(backend.topic)
    assert dead_letter.message == BusMessage(backend.topic, "a", b"bad", {"traceId": "t1", "Sprache": "süß"})
    assert dead_letter.reason == "failed after 3 attempts: disk full"
    assert dead_letter.attempts == 3
    assert abs(dead_letter.died_at - backend.db.clock.now()) < timedelta(minutes=1)


async def test_a_transient_error_is_retried_without_limit(backend: BusBackend) -> None:
    """R11: a Transient error never ends a message, however often it occurs, and does not count as an attempt."""
    await publish(backend, ("a", "1"))
    twice = DeliveryPolicy(max_attempts=2, lease_for=timedelta(minutes=5))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=twice) as subscription:
        for _ in range(5):
            [delivery] = await take(subscription)
            assert delivery.attempt == 1
            await settle(subscription, [delivery], Retry("database down", QUICK, counts=False))
        await settle(subscription, await take(subscription))
    assert await backend.bus.read_dead_letters(backend.topic) == []
    assert await backend.bus.count_backlog(backend.topic) == 0


async def test_a_failure_is_dead_lettered_at_once_and_the_partition_continues(backend: BusBackend) -> None:
    """R10, R11: an unreadable message is dead-lettered with any reason, and the next one is handled."""
    await publish(backend, *[("a", str(n)) for n in range(4)])
    reason = "no \0 JSON \ud800 ✗"
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        taken = await take_all(subscription, 4)
        outcomes: list[Outcome] = [Failed(reason), Done(), Failed("x" * 10_000), Done()]
        assert await subscription.settle(list(zip(taken, outcomes, strict=True))) == 0
        assert await backend.bus.count_backlog(backend.topic) == 0
        await publish(backend, ("a", "next"))
        assert values(await take(subscription)) == ["next"]
    dead_letters = await backend.bus.read_dead_letters(backend.topic)
    assert [dead_letter.message.value for dead_letter in dead_letters] == [b"0", b"2"]
    assert dead_letters[0].reason == "no � JSON ? ✗"
    assert dead_letters[1].reason.startswith("xxx")
    assert [
        dead_letter.message.value for dead_letter in await backend.bus.read_dead_letters(backend.topic, limit=1)
    ] == [b"0"]


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


async def test_a_message_of_a_transaction_is_delivered_after_the_commit(backend: BusBackend) -> None:
    """H4: a message and the change that causes it commit together; before the commit no worker gets it."""
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        async with backend.db.transaction() as tx:
            await backend.bus.publish(
                [BusMessage(backend.topic, "a", b"1", {"n": "1"}), BusMessage(backend.topic, "a", b"2")], tx=tx
            )
            await backend.relay()
            assert await backend.bus.count_backlog(backend.topic) == 0
        await backend.relay()
        taken = await take_all(subscription, 2)
        assert [(d.message.value, dict(d.message.headers)) for d in taken] == [(b"1", {"n": "1"}), (b"2", {})]


async def test_a_message_of_a_rolled_back_transaction_is_never_delivered(backend: BusBackend) -> None:
    """H4: without a commit there is no message."""
    with pytest.raises(LookupError):
        async with backend.db.transaction() as tx:
            await backend.bus.publish([BusMessage(backend.topic, "a", b"never")], tx=tx)
            raise LookupError
    await backend.relay()
    await publish(backend, ("a", "after"))
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        assert values(await take(subscription)) == ["after"]


async def test_publishing_to_a_server_that_is_down_fails(backend: BusBackend) -> None:
    """R8: the error is Transient with a hint, within seconds, so that the caller can answer 503."""
    async with backend.dead() as bus, asyncio.timeout(10):
        with pytest.raises(Transient) as failure:
            await bus.publish([BusMessage(backend.topic, "a", b"1")])
        assert failure.value.hint
        with pytest.raises(Transient) as failure:
            await bus.check()
        assert failure.value.code == "BUS_DOWN"
        assert failure.value.hint


async def test_the_check_of_a_running_bus_passes(backend: BusBackend) -> None:
    await backend.bus.check()


async def test_messages_arrive_unchanged(backend: BusBackend) -> None:
    """Keys of any script and of the full length, empty values, headers, and bytes up to the limit are unchanged."""
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
async def test_an_invalid_message_is_refused(backend: BusBackend, change: dict[str, Any]) -> None:
    """R8: a message over a limit is an error of the caller, raised before anything is sent."""
    fine = BusMessage(backend.topic, "fine", b"")
    with pytest.raises(Invalid, match=r"key|bytes|header|topic"):
        await backend.bus.publish([fine, replace(fine, **change)])
    assert await backend.bus.count_backlog(backend.topic) == 0


async def test_the_backlog_counts_unsettled_messages(backend: BusBackend) -> None:
    """Waiting and delivered messages count, settled ones do not; an unknown topic has no backlog."""
    assert await backend.bus.count_backlog(backend.topic) == 0
    assert await backend.bus.read_dead_letters(backend.topic) == []
    await publish(backend, *[(f"k{n}", str(n)) for n in range(10)])
    assert await backend.bus.count_backlog(backend.topic) == 10
    async with backend.bus.subscribe(backend.topic, worker="w", policy=LONG) as subscription:
        taken = await take_all(subscription, 10)
        assert await backend.bus.count_backlog(backend.topic) == 10
        outcomes = [Failed("no") if n < 3 else Done() if n < 7 else None for n in range(10)]
        await subscription.settle(list(zip(taken, outcomes, strict=True)))
        settled = settled_before_first_open(taken, outcomes)
        assert await backend.bus.count_backlog(backend.topic) == 10 - settled


def settled_before_first_open(taken: Sequence[BusDelivery], outcomes: Sequence[Outcome | None]) -> int:
    """Return the number of settled messages: in each partition those before its first open message."""
    open_partitions: set[int] = set()
    ended = 0
    for delivery, outcome in zip(taken, outcomes, strict=True):
        if outcome is None:
            open_partitions.add(delivery.partition)
        ended += delivery.partition not in open_partitions
    return ended
