"""The bus port: messages with a key, kept in order per key, handed out again until they are settled.

A topic is work for one group of workers: each message is settled once, by whichever worker held it. (Telling many
listeners is the business of signals.) Messages of one key, published one after another, are handed out in that order,
and the next only after the one before it was settled. Other keys may be held up with it, never reordered. A message
published in a transaction comes after the commit, so it has no order with those published outside of one.
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
_TOPIC = re.compile(r"^[A-Za-z0-9._-]{1,200}$")  # what Kafka takes, with room for a suffix
VALUE_LIMIT = 900_000  # Kafka's own default limit is a million bytes with everything


@dataclass(frozen=True, slots=True)
class BusMessage:
    """What is published: *key* decides what it is ordered with."""

    topic: str
    key: str
    value: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BusDelivery:
    """A message held by a worker. *attempt* is 1 at first; a higher one means it may have been handled before."""

    message: BusMessage
    attempt: int
    partition: int
    position: int
    fence: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message set aside, and why."""

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
    """How a topic is handed out."""

    max_attempts: int = 5
    lease_for: timedelta = timedelta(seconds=60)
    first_delay: timedelta = timedelta(milliseconds=100)
    max_delay: timedelta = timedelta(seconds=30)
    on_dead: Callable[[int], None] = lambda _count: None  # so many were set aside


class Subscription(WorkSource[BusDelivery], Protocol):
    """A worker's hold on a topic: a queue for the work loop, whose lanes are the partitions.

    A worker that dies leaves its messages to the others, once its lease ran out. A message that was out when its
    worker died is then handed out alone, so that one that kills its workers is the only one to be set aside.
    """


class Bus(Protocol):
    async def publish(self, messages: Sequence[BusMessage], *, tx: Connection | None = None) -> None:
        """Keep *messages* durably before returning; with *tx*, they are seen if and only if it commits."""

    async def relay(self) -> int:
        """Send what committed transactions published; returns how many. Always 0 where a commit alone is enough."""

    def subscribe(
        self,
        topic: str,
        *,
        worker: str,
        policy: DeliveryPolicy = DeliveryPolicy(),  # noqa: B008 - frozen
    ) -> AbstractAsyncContextManager[Subscription]:
        """Take part in the work on *topic* as *worker*; leaving gives back what is held."""

    async def backlog(self, topic: str) -> int:
        """How many messages of *topic* are not settled yet."""

    async def dead_letters(self, topic: str, *, limit: int = 100) -> list[DeadLetter]:
        """What was set aside of *topic*, oldest first."""

    async def count_dead_letters(self, topic: str, since: datetime) -> DeadLetterCount:
        """Return the number of dead letters of *topic* that died at *since* or later, and the time of the oldest."""

    async def check(self) -> None:
        """Raise Transient BUS_DOWN with a hint unless messages can be published."""

    async def close(self) -> None: ...


def validate_messages(messages: Sequence[BusMessage]) -> Sequence[BusMessage]:
    """*messages* themselves when every implementation can carry them; else Invalid BAD_MESSAGE."""
    for message in messages:
        if not _TOPIC.match(message.topic):
            raise Invalid("BAD_MESSAGE", f"a topic has 1 to 200 of A-Z a-z 0-9 . _ -, not so {message.topic[:50]!r}")
        if not is_storable(message.key) or not 0 < len(message.key.encode()) <= KEY_LIMIT:
            raise Invalid("BAD_MESSAGE", f"a key has 1 to {KEY_LIMIT} bytes and no NUL, not so {message.key[:50]!r}")
        if not all(is_storable(text) for header in message.headers.items() for text in header):
            raise Invalid("BAD_MESSAGE", "a header is text without NUL")
        if len(message.value) > VALUE_LIMIT:
            raise Invalid(
                "BAD_MESSAGE",
                f"a message carries at most {VALUE_LIMIT} bytes, this one has {len(message.value)}",
                hint="send it in chunks",
            )
    return messages
