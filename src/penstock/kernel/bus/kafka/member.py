"""One worker's membership in the group of a topic: a consumer, and the one thread that touches it."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.kernel.bus.kafka.errors import OUTDATED, down, problem
from penstock.kernel.bus.kafka.log import client_logger
from penstock.kernel.bus.kafka.place import CommitMetadata, PartitionOffset
from penstock.kernel.clock import Clock
from penstock.kernel.errors import PenstockError

R = TypeVar("R")
_IDLE, _BUSY = 0.05, 0.02  # seconds a turn waits: for Kafka when there is nothing to do, else for the worker
_FETCH = 500
_ASK_TIMEOUT = _PATIENCE = 5.0


class GroupMember:
    """Takes part in the group, holds the assigned places, and keeps polling while the worker is busy.

    Everything but `ask`, `start` and `close` happens in its thread, so nothing here needs a lock, and a partition
    cannot be given away in the middle of a commit.
    """

    def __init__(
        self,
        topic: str,
        config: Mapping[str, Any],
        lease: float,
        clock: Clock,
        *,
        on_work: Callable[[], None],
        on_leave: Callable[[], None],
    ) -> None:
        self.topic = topic
        self.places: dict[int, PartitionOffset] = {}
        self._lease = lease
        self._patience = max(lease, _PATIENCE)
        self._asked_at = time.monotonic()
        self._clock = clock
        self._on_work = on_work
        self._on_leave = on_leave
        self._consumer = Consumer(dict(config), logger=client_logger())
        self._has_joined = False
        self._is_in_callback = False
        self._pending: _Pending | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._gate = threading.Lock()  # nobody asks after the last answer was given
        self._thread = threading.Thread(target=self._run, name=f"kafka {topic}", daemon=True)
        self._log = structlog.get_logger().bind(topic=topic)

    def start(self) -> None:
        self._commands.put(self.join)
        self._thread.start()

    async def ask(self, act: Callable[[], R]) -> R:
        """What *act* returns, run in the member's thread."""
        answer: Future[R] = Future()

        def command() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(act())
                except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked
                    answer.set_exception(error)
            self._asked_at = time.monotonic()  # now: while it waits for an answer the worker is not silent

        with self._gate:
            if self._closing.is_set():
                raise down(f"the membership in {self.topic} has ended")
            self._commands.put(command)
        return await asyncio.wrap_future(answer)

    def close(self, timeout: float) -> None:
        """Leave the group. A cluster that does not answer is not waited for longer than *timeout*."""
        with self._gate:
            self._closing.set()
        self._thread.join(timeout)

    # From here on: in the thread.

    def join(self) -> None:
        """Be in the group; a member that let its hold run out comes back here, once it has left."""
        # Leaving waits for the end of a rebalance, and a subscription meanwhile calls it off: librdkafka would keep
        # partitions that we have given up, and nobody would ever be given their messages.
        if not self._has_joined and not self._consumer.assignment():
            self._has_joined = True
            self._consumer.subscribe(
                [self.topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )

    def commit(self, commits: Mapping[int, tuple[int, CommitMetadata]]) -> set[int]:
        """Commit positions; returns the partitions where it counts. The others belong to somebody else now."""
        pending = _Pending(self.topic, commits, {partition: self.places[partition] for partition in commits})
        self._pending, deadline = pending, None
        try:
            while not self._try(pending):
                # Counted from the first refusal: an answer may take as long as the rebalance, because the broker reads
                # nothing more of a connection on which a member asks to join.
                deadline = deadline or time.monotonic() + self._patience
                if time.monotonic() > deadline:
                    self._quit("commit_refused")
                elif self._is_in_callback:
                    time.sleep(_BUSY)
                else:
                    self._fetch(_BUSY)  # brings the news why the commit was refused
        finally:
            self._pending = None
        return pending.counted

    def _try(self, pending: "_Pending") -> bool:
        """Whether it is known what became of *pending*. A refusal is no proof of a loss: the next callback tells."""
        if not pending.is_decided:
            offsets = pending.offsets(self.places)
            error = self._commit(offsets) if offsets else None
            if error is not None and error.code() not in OUTDATED:
                raise problem(error)
            pending.is_decided = error is None
            pending.counted = {place.partition for place in offsets} if error is None else set()
        return pending.is_decided

    def _commit(self, offsets: list[TopicPartition]) -> KafkaError | None:
        try:
            done = self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            known: KafkaError = error.args[0]
            return known
        return next((place.error for place in done if place.error is not None), None)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except KafkaException as error:
                self._log.warning("kafka_turn_failed", error=str(error))
                self._closing.wait(1)
            except Exception:  # noqa: BLE001 - the edge of the thread: the member must outlive a mistake in a turn
                self._log.exception("kafka_turn_crashed")
                self._closing.wait(1)
        self._leave()

    def _leave(self) -> None:
        self._serve(0)
        try:
            self._on_leave()
        except PenstockError as error:  # what was not given back is, once the session has ended
            self._log.warning("kafka_leave_failed", code=error.code, error=error.message)
        finally:
            self._consumer.close()

    def _turn(self) -> None:
        is_busy = any(place.out for place in self.places.values()) or self._has_work()
        self._serve(_BUSY if is_busy else 0)
        self._fetch(0 if is_busy else _IDLE)
        self._learn()
        self._leave_when_frozen()
        self._balance_fetching()
        if self._has_work():
            self._on_work()

    def _has_work(self) -> bool:
        now = self._clock.now()
        return any(place.is_ready(now) for place in self.places.values())

    def _serve(self, timeout: float) -> None:
        """Do what the worker asks for, waiting for it up to *timeout* seconds."""
        try:
            self._commands.get(timeout=timeout)() if timeout else self._commands.get_nowait()()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _fetch(self, timeout: float) -> None:
        first = self._consumer.poll(timeout)  # alone it comes at once: consume waits until it has all it may return
        for record in [*([] if first is None else [first]), *self._consumer.consume(_FETCH, 0)]:
            error, partition = record.error(), record.partition()
            if error is not None:
                self._log.warning("kafka_consumer_error", code=error.name(), error=error.str())
            elif partition in self.places:
                self.places[partition].add(record)

    def _learn(self) -> None:
        """Ask what the last holders of new places committed; until it is known nothing of them is handed out."""
        new = [TopicPartition(self.topic, place.partition) for place in self.places.values() if place.mark is None]
        for known in self._consumer.committed(new, timeout=_ASK_TIMEOUT) if new else ():
            if known.error is None:
                self.places[known.partition].learn(known.offset, known.metadata)

    def _leave_when_frozen(self) -> None:
        """A worker that lets its hold run out, or asks for nothing for as long, leaves its partitions to others."""
        now = time.monotonic()
        is_late = any(place.out and place.held_until < now for place in self.places.values())
        if is_late or (self.places and now - self._asked_at > self._lease):
            self._quit("worker_frozen")

    def _quit(self, why: str) -> None:
        """Leave the group with all that is held; the next take joins it again."""
        self._log.warning(why, partitions=sorted(self.places))
        self._forget(list(self.places))
        self._has_joined = False
        self._consumer.unsubscribe()

    def _balance_fetching(self) -> None:
        """Fetch ahead of the worker, but not without end."""
        full = [place for place in self.places.values() if place.is_full and not place.is_paused]
        free = [place for place in self.places.values() if place.has_room and place.is_paused]
        for places, switch in ((full, self._consumer.pause), (free, self._consumer.resume)):
            if places:
                switch([TopicPartition(self.topic, place.partition) for place in places])
        for place in [*full, *free]:
            place.is_paused = place in full

    def _on_assign(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.places.update({place.partition: PartitionOffset(place.partition) for place in partitions})

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Let the worker settle what is out before another gets it; not for longer than it holds it."""
        leaving = [self.places[place.partition] for place in partitions if place.partition in self.places]
        for place in leaving:
            place.is_leaving = True
        self._is_in_callback, deadline = True, time.monotonic() + self._patience
        while not self._closing.is_set() and (now := time.monotonic()) < deadline:
            if not any(place.out and place.held_until > now for place in leaving):
                break
            if self._pending is None:
                self._serve(_BUSY)
            elif self._is_over(self._pending):
                break
        self._is_in_callback = False
        self._on_lost(consumer, partitions)

    def _is_over(self, pending: "_Pending") -> bool:
        """Whether a commit that is under way could be ended while the partitions are still here."""
        try:
            if self._try(pending):
                return True
        except PenstockError:
            return True  # who waits for the commit will try it once more, and be told
        time.sleep(_BUSY)
        return False

    def _on_lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._forget([place.partition for place in partitions])

    def _forget(self, partitions: Sequence[int]) -> None:
        """Hold these no more. None stays paused: librdkafka would remember it, should the partition come back."""
        gone = [self.places.pop(partition) for partition in partitions if partition in self.places]
        if paused := [TopicPartition(self.topic, place.partition) for place in gone if place.is_paused]:
            self._consumer.resume(paused)


@dataclass(slots=True)
class _Pending:
    """A commit on its way: it counts for the places that are still the ones it was meant for."""

    topic: str
    commits: Mapping[int, tuple[int, CommitMetadata]]
    places: Mapping[int, PartitionOffset]
    is_decided: bool = False
    counted: set[int] = field(default_factory=set)

    def offsets(self, held: Mapping[int, PartitionOffset]) -> list[TopicPartition]:
        return [
            TopicPartition(self.topic, partition, position, metadata=mark.dump())
            for partition, (position, mark) in self.commits.items()
            if held.get(partition) is self.places[partition]
        ]
