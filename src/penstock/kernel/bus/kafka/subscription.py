"""The subscription of a worker. Its deliveries are recorded at the broker, which names them if the worker dies."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import structlog

from penstock.kernel.bus import BusDelivery, DeliveryPolicy
from penstock.kernel.bus.kafka.dead_letters import make_dead_letter
from penstock.kernel.bus.kafka.member import GroupMember
from penstock.kernel.bus.kafka.partition_state import plan
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
    """The partitions that the group assigned to one worker, as a queue for the work loop."""

    def __init__(
        self, topic: str, policy: DeliveryPolicy, config: Mapping[str, Any], clock: Clock, deliver: Deliver
    ) -> None:
        self.name = topic
        self.lease_for = policy.lease_for
        self._policy = policy
        self._clock = clock
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        lease = self.lease_for.total_seconds()
        self._member = GroupMember(topic, config, lease, clock, on_work=self._notify_work, on_leave=self._release)

    @asynccontextmanager
    async def open(self) -> "AsyncIterator[KafkaSubscription]":
        """Stay in the group until the end, and release unsettled messages then."""
        self._member.start()
        try:
            yield self
        finally:
            await asyncio.to_thread(self._member.close, _LEAVE_TIMEOUT)

    async def take(self, limit: int) -> Sequence[BusDelivery]:
        return await self._member.call(lambda: self._take(limit))

    async def wait(self, timeout: float) -> None:
        await wait_event(self._work, timeout)
        self._work.clear()

    async def extend(self, items: Sequence[BusDelivery]) -> None:
        await self._member.call(lambda: self._extend(items))

    async def settle(self, results: Sequence[tuple[BusDelivery, Outcome | None]]) -> int:
        return await self._member.call(lambda: self._settle(results))

    def find_lane(self, item: BusDelivery) -> Hashable:
        return item.partition

    def _notify_work(self) -> None:
        if not self._work.is_set():
            self._loop.call_soon_threadsafe(self._work.set)

    # All methods below run in the thread of the member.

    def _take(self, limit: int) -> list[BusDelivery]:
        self._member.join()
        while shares := plan(self._member.states.values(), limit, self._clock.now()):
            taken = self._claim({state.partition: count for state, count in shares})
            if not self._send_killer_to_dead_letters(taken):
                return taken
        return []

    def _claim(self, counts: Mapping[int, int]) -> list[BusDelivery]:
        """Deliver these numbers of messages per partition, after the broker has recorded them as delivered."""
        states, now = {partition: self._member.states[partition] for partition in counts}, time.monotonic()
        commits = {partition: states[partition].plan(count) for partition, count in counts.items()}
        taken: list[BusDelivery] = []
        for partition in sorted(self._member.commit(commits)):
            state = states[partition]
            if self._member.states.get(partition) is not state:
                continue  # revoked right after the commit: another member delivers its messages
            state.taken_at, state.lease_until = now, time.monotonic() + self.lease_for.total_seconds()
            state.deliver(counts[partition], commits[partition])
            taken += state.list_deliveries(self.name)
        return taken

    def _send_killer_to_dead_letters(self, taken: Sequence[BusDelivery]) -> bool:
        """Dead-letter a message whose workers died in all attempts; return whether there was such a message."""
        killers = [delivery for delivery in taken if delivery.attempt > self._policy.max_attempts]
        for delivery in killers:
            structlog.get_logger().error("poison_message_dead_lettered", topic=self.name, key=delivery.message.key)
        reason = Failed(f"its workers died or froze {self._policy.max_attempts} times")
        self._settle([(delivery, reason if delivery in killers else None) for delivery in taken if killers])
        return bool(killers)

    def _extend(self, items: Sequence[BusDelivery]) -> None:
        for delivery in items:
            if self._is_claimed(delivery):
                state = self._member.states[delivery.partition]
                state.lease_until = time.monotonic() + self.lease_for.total_seconds()

    def _settle(self, results: Sequence[tuple[BusDelivery, Outcome | None]]) -> int:
        claimed = [(delivery, outcome) for delivery, outcome in results if self._is_claimed(delivery)]
        lanes = settle(claimed, self._policy, self._clock.now())
        self._send_dead_letters(lanes)
        states = {lane.partition: self._member.states[lane.partition] for lane in lanes}
        commits = {lane.partition: states[lane.partition].make_commit(lane) for lane in lanes}
        counted = self._member.commit(commits) if commits else set()
        for partition in counted:
            states[partition].settle(commits[partition])
        self._policy.on_dead(sum(len(lane.dead) for lane in lanes if lane.partition in counted))
        return len(results) - sum(delivery.partition in counted for delivery, _ in claimed)

    def _send_dead_letters(self, lanes: Sequence[PartitionSettlement]) -> None:
        """Send dead letters before the commit: a crash between the two repeats one, but never loses one."""
        now = self._clock.now()
        letters = [
            make_dead_letter(self.name, record, reason, delivery.attempt, now)
            for lane in lanes
            for delivery, reason in lane.dead
            for record in self._member.states[lane.partition].select_records([delivery.position])
        ]
        if letters:
            self._deliver(letters)

    def _release(self) -> None:
        out = [
            (delivery, None) for state in self._member.states.values() for delivery in state.list_deliveries(self.name)
        ]
        self._settle(out)

    def _is_claimed(self, delivery: BusDelivery) -> bool:
        state = self._member.states.get(delivery.partition)
        return state is not None and state.is_claimed(delivery.fence, time.monotonic())


def make_consumer_settings(
    config: Mapping[str, Any], *, group: str, worker: str, lease_for: timedelta
) -> dict[str, Any]:
    """Return the properties of a worker's consumer; *config* overrides them, except those that the guarantees need."""
    # A little longer than the lease: a worker with a valid lease is still in the group.
    session_for = min(max(lease_for + 2 * _HEARTBEAT, SHORTEST_SESSION), LONGEST_SESSION)
    session = int(session_for.total_seconds() * 1000)
    return {
        "client.id": worker,
        "session.timeout.ms": session,
        "heartbeat.interval.ms": int(_HEARTBEAT.total_seconds() * 1000),
        "max.poll.interval.ms": max(300_000, session),
        "socket.timeout.ms": 10_000,
        "queued.max.messages.kbytes": 16_384,
        "fetch.wait.max.ms": 100,  # a partition that was assigned or resumed waits for the end of a running fetch
        **config,
        "group.id": group,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "partition.assignment.strategy": "cooperative-sticky",  # a new member gets some partitions and stops no other
    }
