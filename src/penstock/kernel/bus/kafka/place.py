"""A partition as its holder sees it: what was fetched, what is out, how often its head was tried. No I/O."""

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

FULL_COUNT, FULL_BYTES = 1_000, 8_000_000  # fetched ahead of the work, at most, per partition


@dataclass(frozen=True, slots=True)
class CommitMetadata:
    """What a commit says besides its position. Kafka keeps it for whoever holds the partition next."""

    fence: int = 0
    attempts: int = 0  # of the message at the position
    out_upto: int | None = None  # the last message that is out; still there when its worker died
    suspect_upto: int | None = None  # messages up to here were out when a worker died
    due_at: datetime | None = None

    def dump(self) -> str:
        said = {name: getattr(self, name) for name in self.__slots__}
        return orjson.dumps({name: value for name, value in said.items() if value is not None}).decode()

    @classmethod
    def load(cls, text: str | None) -> "CommitMetadata":
        """The mark in *text*; an empty one when somebody else wrote it, such as a tool that resets positions."""
        try:
            said: dict[str, Any] = orjson.loads(text or "{}")
            due_at = datetime.fromisoformat(said["due_at"]) if "due_at" in said else None
            return cls(**{**said, "due_at": due_at})
        except (ValueError, TypeError):
            return cls()


@dataclass(slots=True)
class PartitionOffset:
    """An assigned partition. Its messages wait here until they are settled; the first *out* of them are handed out."""

    partition: int
    mark: CommitMetadata | None = None  # not known before the committed position was asked for
    position: int | None = None
    waiting: deque[Record] = field(default_factory=deque)
    size: int = 0
    out: int = 0
    held_until: float = 0.0
    taken_at: float = 0.0
    is_leaving: bool = False
    is_paused: bool = False

    def learn(self, position: int, metadata: str | None) -> None:
        """Take over what the last holder committed. What was out then is suspect: its worker died or froze."""
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
    def has_room(self) -> bool:
        return len(self.waiting) <= FULL_COUNT // 2 and self.size <= FULL_BYTES // 2

    @property
    def is_suspect(self) -> bool:
        upto = self.mark.suspect_upto if self.mark else None
        return upto is not None and bool(self.waiting) and _offset(self.waiting[0]) <= upto

    def is_ready(self, now: datetime) -> bool:
        """Whether something of it can be handed out."""
        if self.mark is None or self.out or self.is_leaving or not self.waiting:
            return False
        return self.mark.due_at is None or self.mark.due_at <= now

    def is_held(self, fence: int, at: float) -> bool:
        """Whether what was taken under *fence* is still out and its lease has not run out."""
        return bool(self.out) and self.mark is not None and self.mark.fence == fence and self.held_until > at

    def plan(self, count: int) -> tuple[int, CommitMetadata]:
        """The commit that must precede handing out *count* messages: should the worker die, it tells which."""
        mark, head = self.mark or CommitMetadata(), _offset(self.waiting[0])
        tried = max(mark.attempts if self.position == head else 0, 1 if self.is_suspect else 0)
        last = _offset(self.waiting[count - 1])
        suspect = mark.suspect_upto if self.is_suspect else None
        return head, CommitMetadata(mark.fence + 1, tried + 1, out_upto=last, suspect_upto=suspect)

    def hold(self, count: int, commit: tuple[int, CommitMetadata]) -> None:
        """The first *count* messages are out, as *commit* said."""
        self.position, self.mark = commit
        self.out = count

    def deliveries(self, topic: str) -> list[BusDelivery]:
        """What is out."""
        mark, out = self.mark or CommitMetadata(), islice(self.waiting, self.out)
        return [
            BusDelivery(message_of(topic, record), mark.attempts if is_head else 1, self.partition, at, mark.fence)
            for record in out
            for at in [_offset(record)]
            for is_head in [at == self.position]
        ]

    def after(self, lane: PartitionSettlement) -> tuple[int, CommitMetadata]:
        """The commit that settles *lane*: behind the last finished message, with what the next holder must know."""
        mark, position = self.mark or CommitMetadata(), self.position or 0
        finished = set(lane.finished)
        for record in islice(self.waiting, self.out):
            if _offset(record) not in finished:
                position = _offset(record)
                break
            position = _offset(record) + 1
        attempts = lane.attempts if lane.head == position else 0
        return position, replace(mark, attempts=attempts, out_upto=None, due_at=lane.due_at)

    def settle(self, commit: tuple[int, CommitMetadata]) -> None:
        """Forget what is behind the position of *commit*; the rest waits to be handed out again."""
        self.position, self.mark = commit
        self.out = 0
        while self.waiting and _offset(self.waiting[0]) < self.position:
            self.size -= len(self.waiting.popleft().value() or b"")

    def records(self, offsets: Iterable[int]) -> list[Record]:
        wanted = set(offsets)
        return [record for record in self.waiting if _offset(record) in wanted]


def plan(places: Iterable[PartitionOffset], limit: int, now: datetime) -> list[tuple[PartitionOffset, int]]:
    """From which places to take, and how many messages of each; those that waited longest first.

    A suspect goes alone, so that its worker's death tells against no other; until its turn comes it waits.
    """
    ready = sorted((place for place in places if place.is_ready(now)), key=lambda place: place.taken_at)
    if ready and ready[0].is_suspect:
        return [(ready[0], 1)]
    sound = [place for place in ready if not place.is_suspect][:limit]
    return _shares(sorted(sound, key=lambda place: len(place.waiting)), limit)


def _shares(places: Sequence[PartitionOffset], limit: int) -> list[tuple[PartitionOffset, int]]:
    """An equal share for each; what the small ones leave goes to the greater, which come last."""
    shares: list[tuple[PartitionOffset, int]] = []
    for index, place in enumerate(places):
        share = min(len(place.waiting), limit // (len(places) - index))
        shares.append((place, share))
        limit -= share
    return shares


def message_of(topic: str, record: Record) -> BusMessage:
    """*record* as the port knows it. Foreign writers may use keys and headers that are no text: those are shown."""
    headers = {name: _text(value) for name, value in headers_of(record)}
    return BusMessage(topic, _text(record.key()), record.value() or b"", headers)


def headers_of(record: Record) -> list[tuple[str, bytes | str | None]]:
    headers = record.headers() or []
    return list(headers.items() if isinstance(headers, dict) else headers)


def _text(value: bytes | str | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _offset(record: Record) -> int:
    offset = record.offset()
    return -1 if offset is None else offset
