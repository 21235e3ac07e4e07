"""How dictionaries lie in a pod's memory: what its one writer and its readers have to agree on.

    d tenant \\0 dict            -> the shelf: which generation is read, and its version
    i generation key            -> an item, as the end of a response: ETag, length, payload
    c generation version        -> what a change replaced, so that pages of the version before can still be read
    g generation                -> whose it is and its version; those that no shelf names are on their way out

A generation is one full load, changed in place by deltas since.
"""

from collections.abc import Iterable
from hashlib import blake2b, sha256
from struct import Struct
from typing import NamedTuple

import msgspec

from penstock.refdata.model import DictionaryKey, VersionStamp

ITEMS_FILE = "items"
STATE_FILE = "state"
_RESERVE = 32 * 1024 * 1024
READERS = 16_384  # processes and streams that may read at once
_NUMBER = Struct(">Q")
LONGEST = 480  # bytes of a key that are kept as they are; LMDB takes 511 in all
SHORT, _LONG = b"\0", b"\1"
_ETAG = b'ETag: "'
_HEAD_END = b"\r\n\r\n"
_ENCODER = msgspec.msgpack.Encoder()


class DictionaryHeader(msgspec.Struct, frozen=True, array_like=True):
    """One dictionary of one tenant as it is read now. *stamp* is when its version was committed, in µs."""

    generation: int
    version: int
    stamp: int
    is_pinned: bool
    items: int
    loaded_at: float  # wall clock, for people
    before: int = 0  # the generation it was read from until the last full load
    stale_since: float = 0.0  # monotonic; set while it cannot be loaded anew

    @property
    def mark(self) -> VersionStamp:
        return VersionStamp(self.version, self.stamp, self.is_pinned)


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """Whose a generation is, and the version it came to."""

    tenant_id: str
    dict_code: str
    mark: VersionStamp


class ReplacedItem(msgspec.Struct, frozen=True, array_like=True):
    """What a change did: from which version, when, and what each key had before; None where there was nothing."""

    since: VersionStamp
    at: float
    values: list[tuple[bytes, bytes | None]]


class _ReplacementIndex(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of `ReplacedItem`: what it replaced may be much."""

    since: VersionStamp
    at: float


_SHELVES = msgspec.msgpack.Decoder(DictionaryHeader)
_REPLACED = msgspec.msgpack.Decoder(ReplacedItem)
_REPLACING = msgspec.msgpack.Decoder(_ReplacementIndex)
_GENERATIONS = msgspec.msgpack.Decoder(Generation)


class EncodedItem(NamedTuple):
    """An item ready to be put: where it lies, and what lies there."""

    place: bytes
    value: bytes


def map_size(limit: int) -> int:
    """How far the memory's file may grow whose items are to take *limit* bytes: to free some, others are copied."""
    return limit + max(limit // 8, _RESERVE)


def shelf_key(target: DictionaryKey) -> bytes:
    return b"d" + target.tenant_id.encode() + b"\0" + target.dict_code.encode()


def generation_key(generation: int) -> bytes:
    return b"g" + _NUMBER.pack(generation)


def change_key(generation: int, version: int) -> bytes:
    return b"c" + _NUMBER.pack(generation) + _NUMBER.pack(version)


def changes_prefix(generation: int) -> bytes:
    return b"c" + _NUMBER.pack(generation)


def items_prefix(generation: int) -> bytes:
    return b"i" + _NUMBER.pack(generation)


def number_at_end(key: bytes) -> int:
    """The generation of a generation's key, the version of a change's."""
    number: int = _NUMBER.unpack(key[-_NUMBER.size :])[0]
    return number


def place_of(key: bytes) -> bytes:
    """Where the item of *key* lies in its generation; one key has one place."""
    if len(key) <= LONGEST:
        return SHORT + key
    return _LONG + sha256(key).digest()


def row_of(key: str, payload: str) -> EncodedItem:
    """An item as it is kept."""
    raw, body = key.encode(), payload.encode()
    place, ready = place_of(raw), ready_made(body)
    if place[:1] == _LONG:  # its place does not tell its key
        ready = _NUMBER.pack(len(raw)) + raw + ready
    return EncodedItem(place, ready)


def ready_made(body: bytes) -> bytes:
    """The end of a response that gives *body*: its last headers, and itself."""
    tag = blake2b(body, digest_size=8).hexdigest().encode()
    return b'ETag: "%b"\r\nContent-Length: %d\r\n\r\n%b' % (tag, len(body), body)


def response_of(place: bytes, value: bytes) -> bytes:
    """The end of a response, as *value* keeps it."""
    if place[:1] == SHORT:
        return value
    return value[_NUMBER.size + _NUMBER.unpack_from(value)[0] :]


def key_of(place: bytes, value: bytes) -> bytes:
    """The key of an item."""
    if place[:1] == SHORT:
        return place[1:]
    return value[_NUMBER.size : _NUMBER.size + _NUMBER.unpack_from(value)[0]]


def etag_of(response: bytes) -> bytes:
    """The entity tag in the end of a response, with its quotes."""
    return response[len(_ETAG) - 1 : response.index(b"\r\n")]


def body_of(response: bytes) -> bytes:
    """The payload in the end of a response."""
    return response[response.index(_HEAD_END) + len(_HEAD_END) :]


def head_of(response: bytes) -> bytes:
    """The end of a response without its payload, for those who asked only for the head."""
    return response[: response.index(_HEAD_END) + len(_HEAD_END)]


def tag_over(values: Iterable[bytes]) -> bytes:
    """An entity tag for several payloads together; a weak one, for the version told with them may differ."""
    digest = blake2b(digest_size=8)
    for value in values:
        digest.update(_NUMBER.pack(len(value)) + value)
    return b'W/"%b"' % digest.hexdigest().encode()


def encode(record: DictionaryHeader | ReplacedItem | Generation) -> bytes:
    return _ENCODER.encode(record)


def decode_shelf(data: bytes) -> DictionaryHeader:
    return _SHELVES.decode(data)


def decode_replaced(data: bytes) -> ReplacedItem:
    return _REPLACED.decode(data)


def replaced_at(data: bytes) -> float:
    """When a change replaced something."""
    return _REPLACING.decode(data).at


def decode_generation(data: bytes) -> Generation:
    return _GENERATIONS.decode(data)
