"""The state of an assigned partition: fetched and delivered messages, and attempts of its first message. No I/O."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import Any

import orjson
from confluent_kafka import Message as Record

from penstock.kernel.bus import BusDelivery, BusMessage
from penstock.kernel.bus.settlement import PartitionSettlement

FULL_COUNT, FULL_BYTES = 1_000, 8_000_000  # limits of prefetched messages per partition


@dataclass(frozen=True, slots=True)
class CommitMetadata:
    """The metadata of a commit, which Kafka stores for the next owner of the partition."""

    fence: int = 0
    attempts: int = 0  # of the message at the position
    out_upto: int | None = None  # the last delivered message; still set after the worker died
    suspect_upto: int | None = None  # messages up to here were delivered when a worker died
    due_at: datetime | None = None

    def dump(self) -> str:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return orjson.dumps({name: value for name, value in fields.items() if value is not None}).decode()

    @classmethod
    def load(cls, text: str | None) -> "CommitMetadata":
        """Return the metadata in *text*; empty metadata if another program wrote it, e.g. to reset offsets."""
        try:
            fields: dict[str, Any] = orjson.loads(text or "{}")
            due_at = datetime.fromisoformat(fields["due_at"]) if "due_at" in fields else None
            return cls(**{**fields, "due_at": due_at})
        except (ValueError, TypeError):
            return cls()


@dataclass(slots=True)
class KafkaPartition:
    """An assigned partition with its unsettled messages, of which the first *out* are delivered to the worker."""

    partition: int
    mark: CommitMetadata | None = None  # None until the committed metadata was read
    position: int | None = None
    waiting: deque[Record] = field(default_factory=deque)
    size: int = 0
    out: int = 0
    lease_until: float = 0.0
    taken_at: float = 0.0
    is_leaving: bool = False
    is_paused: bool = False

    def load_committed(self, position: int, metadata: str | None) -> None:
        """Set the commit of the previous owner. Messages that were delivered then are suspect: their worker died."""
        mark = CommitMetadata.load(metadata) if position >= 0 else CommitMetadata()
        suspect = max((upto for upto in (mark.out_upto, mark.suspect_upto) if upto is not None), default=None)
        self.position, self.mark = position, replace(mark, out_upto=None, suspect_upto=suspect)

    def add(self, record: Record) -> None:
        self.waiting.append(record)
        self.size += len(record.value() or b"")

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= FULL_COUNT or self.size >= FULL_BYTES

    @property
    def needs_messages(self) -> bool:
        return len(self.waiting) <= FULL_COUNT // 2 and self.size <= FULL_BYTES // 2

    @property
    def is_suspect(self) -> bool:
        upto = self.mark.suspect_upto if self.mark else None
        return upto is not None and bool(self.waiting) and _read_offset(self.waiting[0]) <= upto

    def is_ready(self, now: datetime) -> bool:
        """Return whether messages can be delivered."""
        if self.mark is None or self.out or self.is_leaving or not self.waiting:
            return False
        return self.mark.due_at is None or self.mark.due_at <= now

    def is_claimed(self, fence: int, at: float) -> bool:
        """Return whether the messages delivered under *fence* are unsettled and their lease has not expired."""
        return bool(self.out) and self.mark is not None and self.mark.fence == fence and self.lease_until > at

    def plan(self, count: int) -> tuple[int, CommitMetadata]:
        """Return the commit that must precede the delivery of *count* messages: it names them if the worker dies."""
        mark, head = self.mark or CommitMetadata(), _read_offset(self.waiting[0])
        tried = max(mark.attempts if self.position == head else 0, 1 if self.is_suspect else 0)
        last = _read_offset(self.waiting[count - 1])
        suspect = mark.suspect_upto if self.is_suspect else None
        return head, CommitMetadata(mark.fence + 1, tried + 1, out_upto=last, suspect_upto=suspect)

    def deliver(self, count: int, commit: tuple[int, CommitMetadata]) -> None:
        """Mark the first *count* messages as delivered, after *commit*."""
        self.position, self.mark = commit
        self.out = count

    def list_deliveries(self, topic: str) -> list[BusDelivery]:
        """Return the delivered messages."""
        mark, out = self.mark or CommitMetadata(), islice(self.waiting, self.out)
        return [
            BusDelivery(make_message(topic, record), mark.attempts if is_head else 1, self.partition, at, mark.fence)
            for record in out
            for at in [_read_offset(record)]
            for is_head in [at == self.position]
        ]

    def make_commit(self, lane: PartitionSettlement) -> tuple[int, CommitMetadata]:
        """Return the commit that settles *lane*: after the last finished message, with its metadata."""
        mark, position = self.mark or CommitMetadata(), self.position or 0
        finished = set(lane.finished)
        for record in islice(self.waiting, self.out):
            if _read_offset(record) not in finished:
                position = _read_offset(record)
                break
            position = _read_offset(record) + 1
        attempts = lane.attempts if lane.head == position else 0
        return position, replace(mark, attempts=attempts, out_upto=None, due_at=lane.due_at)

    def settle(self, commit: tuple[int, CommitMetadata]) -> None:
        """Drop the messages before the position of *commit*; the others can be delivered again."""
        self.position, self.mark = commit
        self.out = 0
        while self.waiting and _read_offset(self.waiting[0]) < self.position:
            self.size -= len(self.waiting.popleft().value() or b"")

    def select_records(self, offsets: Iterable[int]) -> list[Record]:
        selected = set(offsets)
        return [record for record in self.waiting if _read_offset(record) in selected]


def plan(states: Iterable[KafkaPartition], limit: int, now: datetime) -> list[tuple[KafkaPartition, int]]:
    """Return the partitions to deliver from, and the number of messages of each; the longest waiting partitions first.

    A suspect message is delivered alone, so that the death of its worker makes no other message suspect.
    """
    ready = sorted((state for state in states if state.is_ready(now)), key=lambda state: state.taken_at)
    if ready and ready[0].is_suspect:
        return [(ready[0], 1)]
    trusted = [state for state in ready if not state.is_suspect][:limit]
    return _divide(sorted(trusted, key=lambda state: len(state.waiting)), limit)


def _divide(states: Sequence[KafkaPartition], limit: int) -> list[tuple[KafkaPartition, int]]:
    """Divide *limit* equally; the unused share of small partitions goes to larger ones, which come last."""
    shares: list[tuple[KafkaPartition, int]] = []
    for index, state in enumerate(states):
        share = min(len(state.waiting), limit // (len(states) - index))
        shares.append((state, share))
        limit -= share
    return shares


def make_message(topic: str, record: Record) -> BusMessage:
    """Return *record* as a message. Keys and headers of other producers that are not UTF-8 are decoded lossily."""
    headers = {name: _decode_text(value) for name, value in read_headers(record)}
    return BusMessage(topic, _decode_text(record.key()), record.value() or b"", headers)


def read_headers(record: Record) -> list[tuple[str, bytes | str | None]]:
    """Return the headers of *record*, which confluent-kafka returns in several forms."""
    headers = record.headers() or []
    return list(headers.items() if isinstance(headers, dict) else headers)


def _decode_text(value: bytes | str | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _read_offset(record: Record) -> int:
    offset = record.offset()
    return -1 if offset is None else offset
