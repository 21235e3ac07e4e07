"""Records in the responses of a source: their key, their time of change, and invalid records."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.harvest.config import FeedSection
from penstock.harvest.sources.json_envelope import make_envelope
from penstock.kernel.text import is_storable, make_storable

KEY_LIMIT = 500
_EXCERPT = 200


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record with its key."""

    key: str
    text: str
    updated_at: datetime | None


@dataclass(frozen=True, slots=True)
class StoredReject:
    """A record that cannot be stored, with the reason."""

    key: str | None
    reason: str
    text: str


class RecordReader:
    """Reads the key and the time of change of a feed's records, without decoding the rest of them."""

    def __init__(self, section: FeedSection) -> None:
        self._limit = section.limits.record_bytes
        self._key = section.key
        paths = [path for path in (section.key, section.updated_at) if path]
        # A decoder that skips the rest of a record is several times as fast.
        shape, self._getters = make_envelope(*((path, Any) for path in paths))
        self._decoder = msgspec.json.Decoder(shape)

    def read(self, raws: Iterable[bytes]) -> tuple[list[StoredRecord], list[StoredReject]]:
        """Return the valid records of *raws*, and the rejected ones."""
        records, rejects = [], []
        for raw in raws:
            record = self._read_record(raw)
            if isinstance(record, StoredRecord):
                records.append(record)
            else:
                rejects.append(record)
        return records, rejects

    def _read_record(self, raw: bytes) -> StoredRecord | StoredReject:
        try:
            text = raw.decode()
            document = self._decoder.decode(raw)
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
            return StoredReject(None, f"the record is not valid JSON: {error}", raw.decode(errors="replace"))
        key, *times = (get(document) for get in self._getters)
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)
        if not isinstance(key, str) or not 0 < len(key) <= KEY_LIMIT or not is_storable(key):
            excerpt = make_storable(repr(key), 100)
            reason = f"the key ({self._key}) must be text of 1 to {KEY_LIMIT} characters: {excerpt}"
            return StoredReject(None, reason, text)
        if len(raw) > self._limit:
            reason = f"the record has {len(raw):,} bytes, more than limits.record_bytes ({self._limit:,})"
            return StoredReject(key, reason, text[:_EXCERPT])
        return StoredRecord(key, text, _parse_time(times[0]) if times else None)


def keep_newest(records: Iterable[StoredRecord]) -> list[StoredRecord]:
    """H16: return the newest record of each key, in the order of keys."""
    newest: dict[str, StoredRecord] = {}
    for record in records:
        other = newest.get(record.key)
        if other is None or _is_newer(record, other):
            newest[record.key] = record
    return [newest[key] for key in sorted(newest)]


def _is_newer(record: StoredRecord, other: StoredRecord) -> bool:
    return record.updated_at is None or other.updated_at is None or record.updated_at >= other.updated_at


def _parse_time(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # a time zone can shift the time out of the range of years
        return None
