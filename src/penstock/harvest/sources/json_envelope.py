"""JSON responses: only the envelope is decoded. Records stay the text that the source sent, with every digit."""

import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from penstock.harvest.sources.port import INVALID_RESPONSE, SourceFailed

T = TypeVar("T")
_Path = tuple[str, ...]
_NUL = rb"\u0000"
_REPLACEMENT = rb"\ufffd"
_EXCERPT = 100
# Escapes are matched one by one, so that the second half of an escaped backslash starts none.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2}|u0000)|.)",
    re.DOTALL,
)


def make_reader(decoder: "msgspec.json.Decoder[T]") -> Callable[[bytes], T]:
    """Return a function that decodes responses and replaces characters that no database can store."""

    def read(body: bytes) -> T:
        if _NUL in body:
            return decoder.decode(repair_text(body))
        try:
            if not body.isascii():
                body.decode()
            return decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return decoder.decode(repair_text(body))

    return read


def repair_text(body: bytes) -> bytes:
    """Return the text with the replacement character for NUL, half a surrogate pair, and invalid UTF-8."""
    text = body.decode(errors="replace").encode()
    return _ESCAPE.sub(lambda match: _REPLACEMENT if match[1] else match[0], text)


def make_envelope(*leaves: tuple[str, Any]) -> tuple[Any, list[Callable[[Any], Any]]]:
    """Return a type with the values at some dotted paths, each with its type, and one getter per path.

    A value that is missing or null is None.
    """
    shape, chains = _make_struct({tuple(path.split(".")): kind for path, kind in leaves})
    return shape, [attrgetter(chains[tuple(path.split("."))]) for path, _ in leaves]


def _make_struct(leaves: Mapping[_Path, Any]) -> tuple[Any, dict[_Path, str]]:
    """Return a struct of the first words of the paths, with nested structs, and the attribute chain of each path."""
    fields: list[tuple[str, Any, Any]] = []
    names: dict[str, str] = {}
    chains: dict[_Path, str] = {}
    for number, word in enumerate(dict.fromkeys(path[0] for path in leaves)):
        attribute = f"f{number}"  # a word need not be an identifier
        below = {path[1:]: kind for path, kind in leaves.items() if path[0] == word}
        if () in below:
            fields.append((attribute, below[()] | None, None))
            chains[(word,)] = attribute
        else:
            inner, inner_chains = _make_struct(below)
            fields.append((attribute, inner, msgspec.field(default_factory=inner)))
            chains |= {(word, *path): f"{attribute}.{chain}" for path, chain in inner_chains.items()}
        names[attribute] = word
    return msgspec.defstruct("Response", fields, rename=names), chains


def read_records(raws: Sequence[msgspec.Raw], limit: int) -> list[bytes]:
    """Return the text of each record; raise SourceFailed if one is not an object or if there are more than *limit*."""
    if len(raws) > limit:
        raise make_response_error(f"the response has {len(raws)} records, but {limit} were requested")
    texts = [bytes(raw) for raw in raws]
    for text in texts:
        if text[0] != ord("{"):
            excerpt = text[:_EXCERPT].decode(errors="replace")
            raise make_response_error(f"the response has a record that is not an object: {excerpt}")
    return texts


def describe_value(body: bytes, path: str) -> str:
    """Return the value of the response *body* at *path*, or the keys that it has instead, for an error message."""
    value, place = msgspec.json.decode(repair_text(body)), "the response"
    for word in path.split("."):
        if not isinstance(value, dict):
            return f"{place} is {_describe(value)}"
        if word not in value:
            return f"{place} has {_list_keys(value)}"
        value, place = value[word], f"{word} in {place}" if place != "the response" else word
    return f"{place} is {_describe(value)}"


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return f"an object with {_list_keys(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return msgspec.json.encode(value).decode()[:_EXCERPT]


def _list_keys(value: Mapping[str, object]) -> str:
    return f"the keys {', '.join(value)[:_EXCERPT]}" if value else "no keys"


def make_response_error(message: str) -> SourceFailed:
    """Return the failure of a response without the expected values."""
    return SourceFailed(INVALID_RESPONSE, message)
