"""Sending to Kafka, from any thread and any event loop."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Record

from penstock.kernel.bus.kafka.client_log import make_client_logger
from penstock.kernel.bus.kafka.errors import make_error, translate_errors

_POLL_INTERVAL = 0.05
_GUARANTEES = {"enable.idempotence": True, "acks": "all"}


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message in the form in which Kafka stores it."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | str | None]]


class KafkaSender:
    """A producer, and the thread that receives the acknowledgements of the brokers."""

    def __init__(self, config: Mapping[str, Any], timeout: float) -> None:
        self._timeout = timeout
        settings = {
            "partitioner": "murmur2_random",  # the same partition for a key as with a Java client
            "linger.ms": 1,
            "message.timeout.ms": int(timeout * 1000),
            **config,
            **_GUARANTEES,
        }
        self._producer = Producer(settings, logger=make_client_logger())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="kafka sender", daemon=True)
        self._thread.start()

    def send(self, messages: Sequence[OutgoingMessage]) -> "Future[None]":
        """Send *messages* in order; the future ends when all are stored, or with the error of the first that is not."""
        sending = _Sending(len(messages), self._drop_queue)
        for index, message in enumerate(messages):
            if error := self._enqueue(message, sending.report):
                sending.report(error, count=len(messages) - index)
                break
        return sending.result

    def check(self) -> None:
        """Raise Transient BUS_DOWN unless a broker answers in time."""
        with translate_errors():
            self._producer.list_topics(timeout=self._timeout)

    def require_topic(self, topic: str) -> None:
        """Raise unless *topic* exists; a cluster that creates topics on demand creates it now."""
        with translate_errors():
            metadata = self._producer.list_topics(topic, timeout=self._timeout).topics[topic]
        if metadata.error is not None:
            raise make_error(metadata.error)

    def close(self) -> None:
        """Wait for unacknowledged messages up to their timeout."""
        self._closing.set()
        self._thread.join()

    def _enqueue(self, message: OutgoingMessage, report: "Callable[..., None]") -> KafkaError | None:
        deadline = time.monotonic() + self._timeout
        while not self._closing.is_set():
            try:
                self._producer.produce(
                    message.topic,
                    key=message.key,
                    value=message.value,
                    headers=list(message.headers),
                    on_delivery=report,
                )
            except BufferError:  # the queue of librdkafka is full until some messages are acknowledged
                if time.monotonic() > deadline:
                    return KafkaError(KafkaError._QUEUE_FULL)  # noqa: SLF001
                time.sleep(_POLL_INTERVAL / 10)
            except KafkaException as error:
                kafka_error: KafkaError = error.args[0]
                return kafka_error
            else:
                return None
        return KafkaError(KafkaError._DESTROY, "the bus is closed")  # noqa: SLF001

    def _drop_queue(self) -> None:
        """Drop the messages that were not sent yet: a message after a gap would break the order of its key."""
        self._producer.purge(in_queue=True, in_flight=False, blocking=False)

    def _poll(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(_POLL_INTERVAL)
        self._producer.flush(self._timeout + 1)


class _Sending:
    """The messages of one call of `send`."""

    def __init__(self, count: int, on_gap: Callable[[], None]) -> None:
        self.result: Future[None] = Future()
        self.result.set_running_or_notify_cancel()  # a caller that stops waiting does not stop the sending
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
            self.result.set_result(None)
        elif is_last and self._error is not None:
            self.result.set_exception(make_error(self._error))
