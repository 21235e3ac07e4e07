"""The membership of one worker in the consumer group of a topic: a consumer, and the only thread that uses it."""

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

from penstock.kernel.bus.kafka.client_log import make_client_logger
from penstock.kernel.bus.kafka.errors import OUTDATED, make_down_error, make_error
from penstock.kernel.bus.kafka.partition_state import CommitMetadata, KafkaPartition
from penstock.kernel.clock import Clock
from penstock.kernel.errors import PenstockError

R = TypeVar("R")
_IDLE_WAIT, _BUSY_WAIT = 0.05, 0.02  # seconds that a cycle waits: for Kafka when idle, else for the worker
_FETCH_LIMIT = 500
_COMMITTED_TIMEOUT = _MIN_COMMIT_TIMEOUT = 5.0


class GroupMember:
    """A member of the group with the state of its assigned partitions; it keeps polling while the worker is busy.

    All methods except `call`, `start` and `close` run in its thread, so they need no lock, and a partition cannot be
    revoked during a commit.
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
        self.states: dict[int, KafkaPartition] = {}
        self._lease = lease
        self._commit_timeout = max(lease, _MIN_COMMIT_TIMEOUT)
        self._called_at = time.monotonic()
        self._clock = clock
        self._on_work = on_work
        self._on_leave = on_leave
        self._consumer = Consumer(dict(config), logger=make_client_logger())
        self._has_joined = False
        self._is_in_callback = False
        self._pending: _Pending | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._gate = threading.Lock()  # no call is accepted after the last one was answered
        self._thread = threading.Thread(target=self._run, name=f"kafka {topic}", daemon=True)
        self._log = structlog.get_logger().bind(topic=topic)

    def start(self) -> None:
        self._commands.put(self.join)
        self._thread.start()

    async def call(self, function: Callable[[], R]) -> R:
        """Run *function* in the thread of the member and return its result."""
        answer: Future[R] = Future()

        def run_command() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function())
                except BaseException as error:  # noqa: BLE001 - raised in the caller
                    answer.set_exception(error)
            self._called_at = time.monotonic()  # after the call: a worker that waits for an answer is not frozen

        with self._gate:
            if self._closing.is_set():
                raise make_down_error(f"the membership in {self.topic} has ended")
            self._commands.put(run_command)
        return await asyncio.wrap_future(answer)

    def close(self, timeout: float) -> None:
        """Leave the group; wait for the cluster up to *timeout* seconds."""
        with self._gate:
            self._closing.set()
        self._thread.join(timeout)

    # All methods below run in the thread.

    def join(self) -> None:
        """Join the group; a member whose lease has expired joins again after it has left."""
        # Leaving waits for the end of a rebalance, and a subscription in between cancels it: librdkafka would keep
        # partitions that this member has released, and no worker would ever get their messages.
        if not self._has_joined and not self._consumer.assignment():
            self._has_joined = True
            self._consumer.subscribe(
                [self.topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )

    def commit(self, commits: Mapping[int, tuple[int, CommitMetadata]]) -> set[int]:
        """Commit positions; return the partitions where the commit counts. The others belong to other members now."""
        pending = _Pending(self.topic, commits, {partition: self.states[partition] for partition in commits})
        self._pending, deadline = pending, None
        try:
            while not self._try(pending):
                # From the first refusal on: an answer may take as long as the rebalance, because the broker does not
                # read from a connection on which a member waits to join.
                deadline = deadline or time.monotonic() + self._commit_timeout
                if time.monotonic() > deadline:
                    self._quit("commit_refused")
                elif self._is_in_callback:
                    time.sleep(_BUSY_WAIT)
                else:
                    self._fetch(_BUSY_WAIT)  # runs the callback that tells why the commit was refused
        finally:
            self._pending = None
        return pending.counted

    def _try(self, pending: "_Pending") -> bool:
        """Return whether the result of *pending* is final. After a refusal, the next callback decides."""
        if not pending.is_decided:
            offsets = pending.list_offsets(self.states)
            error = self._commit(offsets) if offsets else None
            if error is not None and error.code() not in OUTDATED:
                raise make_error(error)
            pending.is_decided = error is None
            pending.counted = {offset.partition for offset in offsets} if error is None else set()
        return pending.is_decided

    def _commit(self, offsets: list[TopicPartition]) -> KafkaError | None:
        try:
            committed = self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            kafka_error: KafkaError = error.args[0]
            return kafka_error
        return next((offset.error for offset in committed if offset.error is not None), None)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._run_cycle()
            except KafkaException as error:
                self._log.warning("kafka_poll_failed", error=str(error))
                self._closing.wait(1)
            except Exception:  # noqa: BLE001 - the edge of the thread: the member must survive a bug in a cycle
                self._log.exception("kafka_poll_crashed")
                self._closing.wait(1)
        self._leave()

    def _leave(self) -> None:
        self._serve(0)
        try:
            self._on_leave()
        except PenstockError as error:  # the messages are redelivered when the session has expired
            self._log.warning("kafka_leave_failed", code=error.code, error=error.message)
        finally:
            self._consumer.close()

    def _run_cycle(self) -> None:
        is_busy = any(state.out for state in self.states.values()) or self._has_work()
        self._serve(_BUSY_WAIT if is_busy else 0)
        self._fetch(0 if is_busy else _IDLE_WAIT)
        self._load_committed()
        self._leave_when_frozen()
        self._balance_fetching()
        if self._has_work():
            self._on_work()

    def _has_work(self) -> bool:
        now = self._clock.now()
        return any(state.is_ready(now) for state in self.states.values())

    def _serve(self, timeout: float) -> None:
        """Run the commands of the worker; wait up to *timeout* seconds for the first."""
        try:
            self._commands.get(timeout=timeout)() if timeout else self._commands.get_nowait()()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _fetch(self, timeout: float) -> None:
        first = self._consumer.poll(timeout)  # returns at once with one message; consume would wait for more
        for record in [*([] if first is None else [first]), *self._consumer.consume(_FETCH_LIMIT, 0)]:
            error, partition = record.error(), record.partition()
            if error is not None:
                self._log.warning("kafka_consumer_error", code=error.name(), error=error.str())
            elif partition in self.states:
                self.states[partition].add(record)

    def _load_committed(self) -> None:
        """Read the commits of the previous owners of new partitions, from which nothing is delivered before."""
        new = [TopicPartition(self.topic, state.partition) for state in self.states.values() if state.mark is None]
        for committed in self._consumer.committed(new, timeout=_COMMITTED_TIMEOUT) if new else ():
            if committed.error is None:
                self.states[committed.partition].load_committed(committed.offset, committed.metadata)

    def _leave_when_frozen(self) -> None:
        """Leave the group if a lease has expired, or if the worker has called nothing for as long as a lease."""
        now = time.monotonic()
        is_late = any(state.out and state.lease_until < now for state in self.states.values())
        if is_late or (self.states and now - self._called_at > self._lease):
            self._quit("kafka_worker_frozen")

    def _quit(self, event: str) -> None:
        """Leave the group and release all partitions; the next `take` joins again."""
        self._log.warning(event, partitions=sorted(self.states))
        self._release(list(self.states))
        self._has_joined = False
        self._consumer.unsubscribe()

    def _balance_fetching(self) -> None:
        """Pause the partitions with enough fetched messages, and resume the others."""
        full = [state for state in self.states.values() if state.is_full and not state.is_paused]
        free = [state for state in self.states.values() if state.needs_messages and state.is_paused]
        for states, switch in ((full, self._consumer.pause), (free, self._consumer.resume)):
            if states:
                switch([TopicPartition(self.topic, state.partition) for state in states])
        for state in [*full, *free]:
            state.is_paused = state in full

    def _on_assign(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.states.update({assigned.partition: KafkaPartition(assigned.partition) for assigned in partitions})

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Let the worker settle delivered messages before another member gets them, at most until the lease expires."""
        leaving = [self.states[revoked.partition] for revoked in partitions if revoked.partition in self.states]
        for state in leaving:
            state.is_leaving = True
        self._is_in_callback, deadline = True, time.monotonic() + self._commit_timeout
        while not self._closing.is_set() and (now := time.monotonic()) < deadline:
            if not any(state.out and state.lease_until > now for state in leaving):
                break
            if self._pending is None:
                self._serve(_BUSY_WAIT)
            elif self._try_again(self._pending):
                break
        self._is_in_callback = False
        self._on_lost(consumer, partitions)

    def _try_again(self, pending: "_Pending") -> bool:
        """Return whether a running commit has ended while the partitions are still assigned."""
        try:
            if self._try(pending):
                return True
        except PenstockError:
            return True  # the caller of the commit tries it once more, and gets the error
        time.sleep(_BUSY_WAIT)
        return False

    def _on_lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._release([lost.partition for lost in partitions])

    def _release(self, partitions: Sequence[int]) -> None:
        """Drop the states of *partitions*. None stays paused, because librdkafka remembers it for a new assignment."""
        released = [self.states.pop(partition) for partition in partitions if partition in self.states]
        if paused := [TopicPartition(self.topic, state.partition) for state in released if state.is_paused]:
            self._consumer.resume(paused)


@dataclass(slots=True)
class _Pending:
    """A running commit. It counts for the partitions that were assigned all the time."""

    topic: str
    commits: Mapping[int, tuple[int, CommitMetadata]]
    states: Mapping[int, KafkaPartition]
    is_decided: bool = False
    counted: set[int] = field(default_factory=set)

    def list_offsets(self, assigned: Mapping[int, KafkaPartition]) -> list[TopicPartition]:
        return [
            TopicPartition(self.topic, partition, position, metadata=mark.dump())
            for partition, (position, mark) in self.commits.items()
            if assigned.get(partition) is self.states[partition]
        ]
