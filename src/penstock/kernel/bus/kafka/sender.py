"""Sends to Kafka and says when all of it is kept; any thread and any event loop may ask."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Record

from penstock.kernel.bus.kafka.errors import problem, translated
from penstock.kernel.bus.kafka.log import client_logger

_POLL = 0.05
_GUARANTEES = {"enable.idempotence": True, "acks": "all"}


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """What goes out: bytes and headers as they will be kept."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | str | None]]


class KafkaSender:
    """A producer, and the thread that hears for it what the brokers acknowledge."""

    def __init__(self, config: Mapping[str, Any], timeout: float) -> None:
        self._timeout = timeout
        settings = {
            "partitioner": "murmur2_random",  # a key goes where a Java client would send it
            "linger.ms": 1,
            "message.timeout.ms": int(timeout * 1000),
            **config,
            **_GUARANTEES,
        }
        self._producer = Producer(settings, logger=client_logger())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._hear, name="kafka sender", daemon=True)
        self._thread.start()

    def send(self, letters: Sequence[OutgoingMessage]) -> "Future[None]":
        """Send in the order given; the result comes when the last is kept, or one could not be."""
        sending = _Sending(len(letters), self._forget_queue)
        for index, letter in enumerate(letters):
            if error := self._enqueue(letter, sending.report):
                sending.report(error, count=len(letters) - index)
                break
        return sending.kept

    def check(self) -> None:
        """Transient BUS_DOWN unless a broker answers in time."""
        with translated():
            self._producer.list_topics(timeout=self._timeout)

    def find(self, topic: str) -> None:
        """Raise unless *topic* is there; a cluster that makes topics on demand makes it now."""
        with translated():
            found = self._producer.list_topics(topic, timeout=self._timeout).topics[topic]
        if found.error is not None:
            raise problem(found.error)

    def close(self) -> None:
        """Wait for what is under way, as long as its time-out lets it live."""
        self._closing.set()
        self._thread.join()

    def _enqueue(self, letter: OutgoingMessage, report: "Callable[..., None]") -> KafkaError | None:
        patience = time.monotonic() + self._timeout
        while not self._closing.is_set():
            try:
                self._producer.produce(
                    letter.topic,
                    key=letter.key,
                    value=letter.value,
                    headers=list(letter.headers),
                    on_delivery=report,
                )
            except BufferError:  # more is under way than librdkafka keeps; some of it will be acknowledged
                if time.monotonic() > patience:
                    return KafkaError(KafkaError._QUEUE_FULL)  # noqa: SLF001
                time.sleep(_POLL / 10)
            except KafkaException as error:
                known: KafkaError = error.args[0]
                return known
            else:
                return None
        return KafkaError(KafkaError._DESTROY, "this bus is closed")  # noqa: SLF001

    def _forget_queue(self) -> None:
        """Drop what was not sent yet: after a gap nothing may follow, or a key's order would be lost."""
        self._producer.purge(in_queue=True, in_flight=False, blocking=False)

    def _hear(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(_POLL)
        self._producer.flush(self._timeout + 1)


class _Sending:
    """Letters under way together."""

    def __init__(self, count: int, on_gap: Callable[[], None]) -> None:
        self.kept: Future[None] = Future()
        self.kept.set_running_or_notify_cancel()  # who stops waiting does not stop the sending
        self._left = count
        self._on_gap = on_gap
        self._error: KafkaError | None = None
        self._lock = threading.Lock()

    def report(self, error: KafkaError | None, _record: Record | None = None, *, count: int = 1) -> None:
        with self._lock:
            if error is not None and self._error is None:
                self._error = error
                if error.code() == KafkaError._MSG_TIMED_OUT:  # noqa: SLF001
                    self._on_gap()
            self._left -= count
            is_last = not self._left
        if is_last and self._error is None:
            self.kept.set_result(None)
        elif is_last and self._error is not None:
            self.kept.set_exception(problem(self._error))
