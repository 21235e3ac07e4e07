"""The layout of dictionaries in the memory of a pod, shared by its one writer and its readers.

    d tenant \\0 dict            -> the header: the current generation, and its version
    i generation key            -> an item, as the end of a response: ETag, length, payload
    c generation version        -> the items that a change replaced, for pages of the earlier version
    g generation                -> its dictionary and its version; a generation without a header is being freed

A generation is the result of one full load, changed in place by later deltas.
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
READERS = 16_384  # processes and streams that can read simultaneously
_NUMBER = Struct(">Q")
LONGEST_PLAIN_KEY = 480  # bytes; a longer key is stored as its hash, because LMDB allows 511 bytes
SHORT, _LONG = b"\0", b"\1"
_ETAG = b'ETag: "'
_HEAD_END = b"\r\n\r\n"
_ENCODER = msgspec.msgpack.Encoder()


class DictionaryHeader(msgspec.Struct, frozen=True, array_like=True):
    """The current version of one dictionary of one tenant; *stamp* is its time of commit in µs."""

    generation: int
    version: int
    stamp: int
    is_pinned: bool
    items: int
    loaded_at: float  # wall clock, for people
    previous_generation: int = 0  # current before the last full load
    stale_since: float = 0.0  # monotonic; set while it cannot be reloaded

    @property
    def mark(self) -> VersionStamp:
        return VersionStamp(self.version, self.stamp, self.is_pinned)


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """The dictionary and the version of a generation."""

    tenant_id: str
    dict_code: str
    mark: VersionStamp


class ReplacedItems(msgspec.Struct, frozen=True, array_like=True):
    """The items that a change replaced, by key; None for keys that did not exist. *since* is the earlier version."""

    since: VersionStamp
    at: float
    values: list[tuple[bytes, bytes | None]]


class _ReplacedItemsStart(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of `ReplacedItems`, decoded without the values, which may be large."""

    since: VersionStamp
    at: float


_HEADER_DECODER = msgspec.msgpack.Decoder(DictionaryHeader)
_REPLACED_DECODER = msgspec.msgpack.Decoder(ReplacedItems)
_REPLACED_START_DECODER = msgspec.msgpack.Decoder(_ReplacedItemsStart)
_GENERATION_DECODER = msgspec.msgpack.Decoder(Generation)


class EncodedItem(NamedTuple):
    """An item as it is stored: its key within a generation, and its value."""

    stored_key: bytes
    value: bytes


def map_size(limit: int) -> int:
    """Return the largest size of the file for items of *limit* bytes; freeing needs space for copies of pages."""
    return limit + max(limit // 8, _RESERVE)


def make_header_key(target: DictionaryKey) -> bytes:
    return b"d" + target.tenant_id.encode() + b"\0" + target.dict_code.encode()


def make_generation_key(generation: int) -> bytes:
    return b"g" + _NUMBER.pack(generation)


def make_change_key(generation: int, version: int) -> bytes:
    return b"c" + _NUMBER.pack(generation) + _NUMBER.pack(version)


def make_changes_prefix(generation: int) -> bytes:
    return b"c" + _NUMBER.pack(generation)


def make_items_prefix(generation: int) -> bytes:
    return b"i" + _NUMBER.pack(generation)


def read_number(key: bytes) -> int:
    """Return the generation in a generation key, or the version in a change key."""
    number: int = _NUMBER.unpack(key[-_NUMBER.size :])[0]
    return number


def make_stored_key(key: bytes) -> bytes:
    """Return the unique stored key of *key* within its generation."""
    if len(key) <= LONGEST_PLAIN_KEY:
        return SHORT + key
    return _LONG + sha256(key).digest()


def encode_item(key: str, payload: str) -> EncodedItem:
    """Return an item as it is stored."""
    raw, body = key.encode(), payload.encode()
    stored_key, value = make_stored_key(raw), encode_response(body)
    if stored_key[:1] == _LONG:  # the stored key is a hash, so the value contains the key
        value = _NUMBER.pack(len(raw)) + raw + value
    return EncodedItem(stored_key, value)


def encode_response(body: bytes) -> bytes:
    """Return the end of a response with *body*: the last headers, and the body."""
    tag = blake2b(body, digest_size=8).hexdigest().encode()
    return b'ETag: "%b"\r\nContent-Length: %d\r\n\r\n%b' % (tag, len(body), body)


def decode_response(stored_key: bytes, value: bytes) -> bytes:
    """Return the end of a response that is stored in *value*."""
    if stored_key[:1] == SHORT:
        return value
    return value[_NUMBER.size + _NUMBER.unpack_from(value)[0] :]


def decode_key(stored_key: bytes, value: bytes) -> bytes:
    """Return the key of an item."""
    if stored_key[:1] == SHORT:
        return stored_key[1:]
    return value[_NUMBER.size : _NUMBER.size + _NUMBER.unpack_from(value)[0]]


def read_etag(response: bytes) -> bytes:
    """Return the entity tag in the end of a response, with its quotes."""
    return response[len(_ETAG) - 1 : response.index(b"\r\n")]


def read_body(response: bytes) -> bytes:
    """Return the payload in the end of a response."""
    return response[response.index(_HEAD_END) + len(_HEAD_END) :]


def read_head(response: bytes) -> bytes:
    """Return the end of a response without its payload, for HEAD requests."""
    return response[: response.index(_HEAD_END) + len(_HEAD_END)]


def hash_payloads(values: Iterable[bytes]) -> bytes:
    """Return an entity tag of several payloads; it is weak, because the version in the response may differ."""
    digest = blake2b(digest_size=8)
    for value in values:
        digest.update(_NUMBER.pack(len(value)) + value)
    return b'W/"%b"' % digest.hexdigest().encode()


def encode(record: DictionaryHeader | ReplacedItems | Generation) -> bytes:
    return _ENCODER.encode(record)


def decode_header(data: bytes) -> DictionaryHeader:
    return _HEADER_DECODER.decode(data)


def decode_replaced(data: bytes) -> ReplacedItems:
    return _REPLACED_DECODER.decode(data)


def read_replacement_time(data: bytes) -> float:
    """Return the time of a change."""
    return _REPLACED_START_DECODER.decode(data).at


def decode_generation(data: bytes) -> Generation:
    return _GENERATION_DECODER.decode(data)
