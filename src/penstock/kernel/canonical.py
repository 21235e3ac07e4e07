"""One content, one text: canonical JSON as RFC 8785 has it, for what our payloads may hold."""

import hashlib
from typing import Any

import orjson

from penstock.kernel.errors import Invalid

INT_LIMIT = 2**53  # beyond it other languages round
_MAX_DEPTH = 100


def dumps(value: Any) -> bytes:
    """The canonical bytes of *value*: sorted keys, no spaces, nulls kept. Floats and huge integers are Invalid."""
    astral = _check(value, 0)
    try:
        return orjson.dumps(_utf16_sorted(value) if astral else value, option=0 if astral else orjson.OPT_SORT_KEYS)
    except (orjson.JSONEncodeError, TypeError) as error:  # lone surrogates
        raise _refused(str(error)) from error


def digest(value: Any) -> str:
    """The sha256 of the canonical bytes, in hexadecimal."""
    return hashlib.sha256(dumps(value)).hexdigest()


def _check(value: Any, depth: int) -> bool:
    """Refuse what has no canonical form; tell whether a key needs the order of UTF-16 rather than of code points."""
    if depth > _MAX_DEPTH:
        raise _refused(f"nested deeper than {_MAX_DEPTH}")
    if value is None or isinstance(value, str | bool):
        return False
    if isinstance(value, int):
        if not -INT_LIMIT < value < INT_LIMIT:
            raise _refused(f"an integer of {value.bit_length()} bits is not exact in every language", "send a string")
        return False
    if isinstance(value, dict):
        return max((_check_key(key) | _check(inner, depth + 1) for key, inner in value.items()), default=False)
    if isinstance(value, list | tuple):
        return max((_check(inner, depth + 1) for inner in value), default=False)
    if isinstance(value, float):
        raise _refused(f"the number {value} is a float", "send integers in minor units, or a string")
    raise _refused(f"a value of type {type(value).__name__}")


def _check_key(key: Any) -> bool:
    if not isinstance(key, str):
        raise _refused(f"a key of type {type(key).__name__} is not a string")
    return not key.isascii() and max(key) > "\uffff"


def _utf16_sorted(value: Any) -> Any:
    if isinstance(value, dict):
        ordered = sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
        return {key: _utf16_sorted(value[key]) for key in ordered}
    return [_utf16_sorted(inner) for inner in value] if isinstance(value, list | tuple) else value


def _refused(why: str, hint: str | None = None) -> Invalid:
    return Invalid("NOT_CANONICAL", f"no canonical form: {why}", hint=hint)
