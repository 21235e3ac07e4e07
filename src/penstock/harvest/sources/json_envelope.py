"""What a source answers: the envelope is decoded, the records stay the very text that came, with every digit."""

import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from penstock.harvest.sources.port import SourceFailed

T = TypeVar("T")
_Path = tuple[str, ...]
_NUL = rb"\u0000"
_REPLACED = rb"\ufffd"
# Escapes one by one, so that the second half of an escaped backslash begins none.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2}|u0000)|.)",
    re.DOTALL,
)


def reader(decoder: "msgspec.json.Decoder[T]") -> Callable[[bytes], T]:
    """Decodes answers; what no database can keep of their text (a NUL, half a character) is replaced first."""

    def read(answer: bytes) -> T:
        if _NUL in answer:
            return decoder.decode(mended(answer))
        try:
            if not answer.isascii():
                answer.decode()
            return decoder.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return decoder.decode(mended(answer))

    return read


def mended(answer: bytes) -> bytes:
    """The same text with the replacement character wherever no database could keep it."""
    text = answer.decode(errors="replace").encode()
    return _ESCAPE.sub(lambda found: _REPLACED if found[1] else found[0], text)


def envelope(*leaves: tuple[str, Any]) -> tuple[Any, list[Callable[[Any], Any]]]:
    """A type that finds what is at some dotted paths in an answer, each with its type, and what takes each out of it.

    What is not there, or null, is None.
    """
    shape, chains = _struct({tuple(path.split(".")): kind for path, kind in leaves})
    return shape, [attrgetter(chains[tuple(path.split("."))]) for path, _ in leaves]


def _struct(leaves: Mapping[_Path, Any]) -> tuple[Any, dict[_Path, str]]:
    """A struct of the paths' first words, with structs of the rest within; and the attributes each path goes by."""
    fields: list[tuple[str, Any, Any]] = []
    names: dict[str, str] = {}
    chains: dict[_Path, str] = {}
    for number, word in enumerate(dict.fromkeys(path[0] for path in leaves)):
        own = f"f{number}"  # words may be anything, attributes may not
        below = {path[1:]: kind for path, kind in leaves.items() if path[0] == word}
        if () in below:
            fields.append((own, below[()] | None, None))
            chains[(word,)] = own
        else:
            inner, within = _struct(below)
            fields.append((own, inner, msgspec.field(default_factory=inner)))
            chains |= {(word, *path): f"{own}.{chain}" for path, chain in within.items()}
        names[own] = word
    return msgspec.defstruct("Answer", fields, rename=names), chains


def records(found: Sequence[msgspec.Raw], limit: int) -> list[bytes]:
    """Each record's text; SourceFailed when they are not objects, or more than were asked for."""
    if len(found) > limit:
        raise garbage(f"{len(found)} records where {limit} were asked for")
    texts = [bytes(record) for record in found]
    if any(text[0] != ord("{") for text in texts):
        raise garbage("a record that is not an object")
    return texts


def garbage(message: str) -> SourceFailed:
    return SourceFailed("SOURCE_INVALID_RESPONSE", message)
