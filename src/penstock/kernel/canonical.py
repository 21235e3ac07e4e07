"""Canonical JSON after RFC 8785: equal payloads have equal bytes. Floats and integers beyond 53 bits are refused."""

import hashlib
from collections.abc import Iterable
from typing import Any

import orjson

from penstock.kernel.errors import Invalid

_MAX_DEPTH = 100
_PLAIN = frozenset({str, int, bool, type(None)})  # not examined further, for speed


def dumps(value: Any) -> bytes:
    """Return the canonical bytes of *value*: sorted keys, no spaces. Floats and large integers are Invalid."""
    try:
        if _needs_utf16_order(value, 0):
            return orjson.dumps(_sort_by_utf16(value), option=orjson.OPT_STRICT_INTEGER)
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER)
    except TypeError as error:  # also orjson's own: integers beyond 53 bits, lone surrogates
        hint = "send money as integers in minor units, and other numbers that JSON parsers may round as strings"
        raise Invalid("NOT_CANONICAL", f"the value has no canonical form: {error}", hint=hint) from error


def compute_digest(value: Any) -> str:
    """Return the SHA-256 of the canonical bytes in hexadecimal."""
    return hashlib.sha256(dumps(value)).hexdigest()


def _needs_utf16_order(value: Any, depth: int) -> bool:
    """Return whether a key sorts differently in UTF-16 and by code point; TypeError without a canonical form."""
    if isinstance(value, dict):
        keys = "".join(value)  # a TypeError for a key that is not a string
        return (not keys.isascii() and max(keys) > "\uffff") | _any_needs_utf16_order(value.values(), depth + 1)
    if isinstance(value, list | tuple):
        return _any_needs_utf16_order(value, depth + 1)
    if isinstance(value, str | int | None):
        return False
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def _any_needs_utf16_order(values: Iterable[Any], depth: int) -> bool:
    if depth > _MAX_DEPTH:
        raise TypeError(f"nested deeper than {_MAX_DEPTH}")
    # All values are examined: a value that needs another order must not hide a value that is refused.
    results = [_needs_utf16_order(inner, depth) for inner in values if type(inner) not in _PLAIN]
    return True in results


def _sort_by_utf16(value: Any) -> Any:
    if isinstance(value, dict):
        ordered = sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
        return {key: _sort_by_utf16(value[key]) for key in ordered}
    return [_sort_by_utf16(inner) for inner in value] if isinstance(value, list | tuple) else value
