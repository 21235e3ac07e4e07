"""Records in the answers of a source: their key, their time, and what is no record."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.harvest.config import FeedSection
from penstock.harvest.sources.json_envelope import envelope
from penstock.kernel.text import is_storable, make_storable

KEY_LIMIT = 500
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record, by its key."""

    key: str
    text: str
    updated_at: datetime | None


@dataclass(frozen=True, slots=True)
class StoredReject:
    """A record that cannot be kept."""

    key: str | None
    reason: str
    text: str


class RecordReader:
    """Finds key and time in a feed's records, without looking at the rest of them."""

    def __init__(self, section: FeedSection) -> None:
        self._limit = section.limits.record_bytes
        self._key = section.key
        paths = [path for path in (section.key, section.updated_at) if path]
        # Nothing but these: a decoder that skips the rest of a record is several times as fast.
        shape, self._places = envelope(*((path, Any) for path in paths))
        self._decoder = msgspec.json.Decoder(shape)

    def read(self, raws: Iterable[bytes]) -> tuple[list[StoredRecord], list[StoredReject]]:
        """The records among *raws*, and what is none."""
        records, rejects = [], []
        for raw in raws:
            found = self._one(raw)
            if isinstance(found, StoredRecord):
                records.append(found)
            else:
                rejects.append(found)
        return records, rejects

    def _one(self, raw: bytes) -> StoredRecord | StoredReject:
        try:
            text = raw.decode()
            document = self._decoder.decode(raw)
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
            return StoredReject(None, f"it is no record: {error}", raw.decode(errors="replace"))
        key, *moments = (place(document) for place in self._places)
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)
        if not isinstance(key, str) or not 0 < len(key) <= KEY_LIMIT or not is_storable(key):
            shown = make_storable(repr(key), 100)
            return StoredReject(None, f"its key ({self._key}) is no text of 1 to {KEY_LIMIT}: {shown}", text)
        if len(raw) > self._limit:
            reason = f"it has {len(raw):,} bytes, more than limits.record_bytes ({self._limit:,})"
            return StoredReject(key, reason, text[:_SHOWN])
        return StoredRecord(key, text, _moment(moments[0]) if moments else None)


def newest(records: Iterable[StoredRecord]) -> list[StoredRecord]:
    """H16: duplicates collapse by key: of each the newest, in the order of keys."""
    found: dict[str, StoredRecord] = {}
    for record in records:
        known = found.get(record.key)
        if known is None or _is_newer(record, known):
            found[record.key] = record
    return [found[key] for key in sorted(found)]


def _is_newer(record: StoredRecord, known: StoredRecord) -> bool:
    return record.updated_at is None or known.updated_at is None or record.updated_at >= known.updated_at


def _moment(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # a zone can lead beyond the first and the last year
        return None
