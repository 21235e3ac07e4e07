"""A worker's hold on a topic of Kafka. What it takes is marked at the broker, so its death tells which messages."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import structlog

from penstock.kernel.bus import BusDelivery, DeliveryPolicy
from penstock.kernel.bus.kafka.letters import bury
from penstock.kernel.bus.kafka.member import GroupMember
from penstock.kernel.bus.kafka.place import plan
from penstock.kernel.bus.kafka.sender import OutgoingMessage
from penstock.kernel.bus.settlement import PartitionSettlement, settle
from penstock.kernel.clock import Clock
from penstock.kernel.tasks.outcome import Failed, Outcome
from penstock.kernel.tasks.wait import wait_event

SHORTEST_SESSION, LONGEST_SESSION = timedelta(seconds=6), timedelta(minutes=30)  # brokers refuse others by default
_HEARTBEAT = timedelta(milliseconds=500)
_LEAVE_TIMEOUT = 10.0

Deliver = Callable[[Sequence[OutgoingMessage]], None]


class KafkaSubscription:
    """The partitions the group gave to one worker, as a queue for the work loop."""

    def __init__(
        self, topic: str, policy: DeliveryPolicy, config: Mapping[str, Any], clock: Clock, deliver: Deliver
    ) -> None:
        self.name = topic
        self.lease_for = policy.lease_for
        self._delivering = policy
        self._clock = clock
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        lease = self.lease_for.total_seconds()
        self._member = GroupMember(topic, config, lease, clock, on_work=self._tell_work, on_leave=self._give_back)

    @asynccontextmanager
    async def joined(self) -> "AsyncIterator[KafkaSubscription]":
        """In the group until the end; what is held then is given back at once."""
        self._member.start()
        try:
            yield self
        finally:
            await asyncio.to_thread(self._member.close, _LEAVE_TIMEOUT)

    async def take(self, limit: int) -> Sequence[BusDelivery]:
        return await self._member.ask(lambda: self._take(limit))

    async def wait(self, timeout: float) -> None:
        await wait_event(self._work, timeout)
        self._work.clear()

    async def extend(self, items: Sequence[BusDelivery]) -> None:
        await self._member.ask(lambda: self._extend(items))

    async def settle(self, results: Sequence[tuple[BusDelivery, Outcome | None]]) -> int:
        return await self._member.ask(lambda: self._settle(results))

    def lane(self, item: BusDelivery) -> Hashable:
        return item.partition

    def _tell_work(self) -> None:
        if not self._work.is_set():
            self._loop.call_soon_threadsafe(self._work.set)

    # From here on: in the member's thread.

    def _take(self, limit: int) -> list[BusDelivery]:
        self._member.join()
        while shares := plan(self._member.places.values(), limit, self._clock.now()):
            taken = self._hold({place.partition: count for place, count in shares})
            if not self._set_aside(taken):
                return taken
        return []

    def _hold(self, counts: Mapping[int, int]) -> list[BusDelivery]:
        """Hand out so many messages of each partition, once the broker knows that they are out."""
        places, now = {partition: self._member.places[partition] for partition in counts}, time.monotonic()
        commits = {partition: places[partition].plan(count) for partition, count in counts.items()}
        taken: list[BusDelivery] = []
        for partition in sorted(self._member.commit(commits)):
            place = places[partition]
            if self._member.places.get(partition) is not place:
                continue  # given away as soon as the commit was made: it is not ours to hand out
            place.taken_at, place.held_until = now, time.monotonic() + self.lease_for.total_seconds()
            place.hold(counts[partition], commits[partition])
            taken += place.deliveries(self.name)
        return taken

    def _set_aside(self, taken: Sequence[BusDelivery]) -> bool:
        """Whether *taken* is a message that was alone with every worker that died: it is not given to another."""
        killers = [delivery for delivery in taken if delivery.attempt > self._delivering.max_attempts]
        for delivery in killers:
            structlog.get_logger().error("message_killed_its_workers", topic=self.name, key=delivery.message.key)
        reason = Failed(f"its workers died or froze {self._delivering.max_attempts} times")
        self._settle([(delivery, reason if delivery in killers else None) for delivery in taken if killers])
        return bool(killers)

    def _extend(self, items: Sequence[BusDelivery]) -> None:
        for delivery in items:
            if self._holds(delivery):
                place = self._member.places[delivery.partition]
                place.held_until = time.monotonic() + self.lease_for.total_seconds()

    def _settle(self, results: Sequence[tuple[BusDelivery, Outcome | None]]) -> int:
        held = [(delivery, outcome) for delivery, outcome in results if self._holds(delivery)]
        lanes = settle(held, self._delivering, self._clock.now())
        self._bury(lanes)
        places = {lane.partition: self._member.places[lane.partition] for lane in lanes}
        commits = {lane.partition: places[lane.partition].after(lane) for lane in lanes}
        counted = self._member.commit(commits) if commits else set()
        for partition in counted:
            places[partition].settle(commits[partition])
        self._delivering.on_dead(sum(len(lane.dead) for lane in lanes if lane.partition in counted))
        return len(results) - sum(delivery.partition in counted for delivery, _ in held)

    def _bury(self, lanes: Sequence[PartitionSettlement]) -> None:
        """Keep the dead before they are committed: a crash between the two repeats, it never loses."""
        now = self._clock.now()
        letters = [
            bury(self.name, record, reason, delivery.attempt, now)
            for lane in lanes
            for delivery, reason in lane.dead
            for record in self._member.places[lane.partition].records([delivery.position])
        ]
        if letters:
            self._deliver(letters)

    def _give_back(self) -> None:
        out = [(delivery, None) for place in self._member.places.values() for delivery in place.deliveries(self.name)]
        self._settle(out)

    def _holds(self, delivery: BusDelivery) -> bool:
        place = self._member.places.get(delivery.partition)
        return place is not None and place.is_held(delivery.fence, time.monotonic())


def consumer_settings(config: Mapping[str, Any], *, group: str, worker: str, lease_for: timedelta) -> dict[str, Any]:
    """How a worker's consumer is set up: *config* may change what is ours to choose, not what we promise."""
    # A little longer than the lease: who still holds its lease is still in the group.
    session_for = min(max(lease_for + 2 * _HEARTBEAT, SHORTEST_SESSION), LONGEST_SESSION)
    session = int(session_for.total_seconds() * 1000)
    return {
        "client.id": worker,
        "session.timeout.ms": session,
        "heartbeat.interval.ms": int(_HEARTBEAT.total_seconds() * 1000),
        "max.poll.interval.ms": max(300_000, session),
        "socket.timeout.ms": 10_000,
        "queued.max.messages.kbytes": 16_384,
        "fetch.wait.max.ms": 100,  # a partition that was assigned or resumed meanwhile waits for the fetch under way
        **config,
        "group.id": group,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "partition.assignment.strategy": "cooperative-sticky",  # who joins takes over some, and stops nobody
    }
