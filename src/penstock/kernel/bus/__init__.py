"""The bus port: messages with a key, ordered per key, and redelivered until they are settled.

A topic is work for one group of workers: each message is settled once, by the worker that has claimed it. (Signals
reach all listeners.) Messages of a key are delivered in the order in which they were published, each after the
previous one was settled. Other keys may be delayed by it, but are never reordered. A message published in a
transaction is delivered after the commit, so it has no order with messages published outside of the transaction.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Invalid
from penstock.kernel.text import is_storable
from penstock.kernel.work.worker import WorkSource

KEY_LIMIT = 1_000
_TOPIC = re.compile(r"^[A-Za-z0-9._-]{1,200}$")  # the limit of Kafka, less the length of a suffix
VALUE_LIMIT = 900_000  # the default limit of Kafka is a million bytes for key, headers and value


@dataclass(frozen=True, slots=True)
class BusMessage:
    """A message. Messages with the same *key* are ordered."""

    topic: str
    key: str
    value: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BusDelivery:
    """A message claimed by a worker. An *attempt* above 1 means that it may have been handled before."""

    message: BusMessage
    attempt: int
    partition: int
    position: int
    fence: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that is not delivered any more, with the reason."""

    message: BusMessage
    reason: str
    attempts: int
    died_at: datetime


@dataclass(frozen=True, slots=True)
class DeadLetterCount:
    """The number of dead letters of a topic in a period, and the time of the oldest."""

    number: int = 0
    oldest: datetime | None = None


@dataclass(frozen=True, slots=True)
class DeliveryPolicy:
    """The delivery settings of a topic: attempts, lease and back-off."""

    max_attempts: int = 5
    lease_for: timedelta = timedelta(seconds=60)
    first_delay: timedelta = timedelta(milliseconds=100)
    max_delay: timedelta = timedelta(seconds=30)
    on_dead: Callable[[int], None] = lambda _count: None  # called with the number of new dead letters


class Subscription(WorkSource[BusDelivery], Protocol):
    """The messages of a topic that a worker claims: a queue for the work loop, whose lanes are the partitions.

    When a worker dies, other workers get its messages after the lease has expired. These messages are then delivered
    one by one, so that only the message that kills its workers is dead-lettered.
    """


class Bus(Protocol):
    async def publish(self, messages: Sequence[BusMessage], *, tx: Connection | None = None) -> None:
        """Store *messages* durably before returning; with *tx*, they are delivered only if it commits."""

    async def relay(self) -> int:
        """Send the messages of committed transactions and return their number; 0 if a commit alone delivers them."""

    def subscribe(
        self,
        topic: str,
        *,
        worker: str,
        policy: DeliveryPolicy = DeliveryPolicy(),  # noqa: B008 - frozen
    ) -> AbstractAsyncContextManager[Subscription]:
        """Join the workers of *topic* as *worker*; at the end unsettled messages are released."""

    async def count_backlog(self, topic: str) -> int:
        """Return the number of messages of *topic* that are not settled yet."""

    async def read_dead_letters(self, topic: str, *, limit: int = 100) -> list[DeadLetter]:
        """Return the dead letters of *topic*, oldest first."""

    async def count_dead_letters(self, topic: str, since: datetime) -> DeadLetterCount:
        """Return the number of dead letters of *topic* that died at *since* or later, and the time of the oldest."""

    async def check(self) -> None:
        """Raise Transient BUS_DOWN with a hint unless messages can be published."""

    async def close(self) -> None: ...


def validate_messages(messages: Sequence[BusMessage]) -> Sequence[BusMessage]:
    """Return *messages* if every implementation can carry them; else raise Invalid BAD_MESSAGE."""
    for message in messages:
        if not _TOPIC.match(message.topic):
            problem = f"{message.topic[:50]!r} is not a topic: it must have 1 to 200 characters of A-Z a-z 0-9 . _ -"
            raise Invalid("BAD_MESSAGE", problem)
        if not is_storable(message.key) or not 0 < len(message.key.encode()) <= KEY_LIMIT:
            problem = f"{message.key[:50]!r} is not a key: it must have 1 to {KEY_LIMIT} bytes without NUL"
            raise Invalid("BAD_MESSAGE", problem)
        if not all(is_storable(text) for header in message.headers.items() for text in header):
            raise Invalid("BAD_MESSAGE", "a header must be text without NUL")
        if len(message.value) > VALUE_LIMIT:
            raise Invalid(
                "BAD_MESSAGE",
                f"the message has {len(message.value)} bytes; the limit is {VALUE_LIMIT}",
                hint="send it in chunks",
            )
    return messages
