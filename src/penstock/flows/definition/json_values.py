"""F2, F15: the values of inputs and scopes: JSON that every store keeps, references to steps, no repeated names."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from keyword import iskeyword
from math import isfinite
from typing import Any

from penstock.kernel.errors import Invalid
from penstock.kernel.text import is_storable

_DEPTH_LIMIT = 50
_VALUE_LIMIT = 200_000  # YAML can say one thing a billion times
_LARGEST = 2**63 - 1


class ValueReference:
    """Something known only once a run is under way; its text is what YAML would have."""

    __slots__ = ("_expression",)

    def __init__(self, expression: str) -> None:
        self._expression = expression

    def __getattr__(self, name: str) -> "ValueReference":
        if name.startswith("_"):  # Python asks for such names on its own account
            raise AttributeError(f"write [{name!r}] for what begins with an underscore")
        return self[name]

    def __getitem__(self, key: str | int) -> "ValueReference":
        if isinstance(key, str) and key.isascii() and key.isidentifier() and not iskeyword(key) and key[:2] != "__":
            return ValueReference(f"{self._expression}.{key}")
        return ValueReference(f"{self._expression}[{json.dumps(key, ensure_ascii=False)}]")

    def __iter__(self) -> Iterator["ValueReference"]:
        raise TypeError("what a reference gives is not known yet: use a map to go through it")

    def __str__(self) -> str:
        return f"${{{self._expression}}}"

    def __repr__(self) -> str:
        return f"<{self}>"


def of_step(step_id: str) -> ValueReference:
    """What there is to know of a step: `outputs` and `status`."""
    return ValueReference("steps")[step_id]


def plain(document: Any) -> Any:
    """*document* as JSON has it, dates as texts; ValueError for what has no place there, and where it is."""
    return _Plain().copied(document, ())


class _Plain:
    def __init__(self) -> None:
        self._left = _VALUE_LIMIT

    def copied(self, value: Any, path: tuple[str, ...]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"there are more than {_VALUE_LIMIT:,} values in it")
        if isinstance(value, Mapping | list | tuple):
            if len(path) == _DEPTH_LIMIT:
                raise ValueError(f"it is nested deeper than {_DEPTH_LIMIT}")
            if isinstance(value, Mapping):
                return {_key(name, path): self.copied(inner, (*path, str(name))) for name, inner in value.items()}
            return [self.copied(inner, (*path, str(place))) for place, inner in enumerate(value)]
        return _scalar(value, path)


def _key(name: Any, path: tuple[str, ...]) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{_place((*path, repr(name)))}: a name is a text; put it in quotes")  # noqa: TRY004
    return _text(name, path)


def _scalar(value: Any, path: tuple[str, ...]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, int) and abs(value) <= _LARGEST:
        return int(value)
    if isinstance(value, float) and isfinite(value):
        return float(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, ValueReference):
        return _text(str(value), path)
    what = "a number that is too large, or none" if isinstance(value, int | float) else f"a {type(value).__name__}"
    raise ValueError(f"{_place(path)}: {what} has no form in JSON")


def _text(value: str, path: tuple[str, ...]) -> str:
    if not is_storable(value):
        raise ValueError(f"{_place(path)}: NUL and halves of characters cannot be kept")
    return str(value)


def _place(path: tuple[str, ...]) -> str:
    return ".".join(path) or "it"


def reject_duplicate_names(body: bytes) -> None:
    """Invalid DUPLICATE_STEP, or DUPLICATE_NAME elsewhere; what cannot be read at all is for others to refuse."""
    repeated: list[tuple[dict[str, Any], str]] = []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = Counter(name for name, _ in pairs)
            repeated.append((found, names.most_common(1)[0][0]))
        return found

    try:
        document = json.loads(body, object_pairs_hook=noted)
    except (ValueError, RecursionError):
        return
    steps = document.get("steps") if isinstance(document, dict) else None
    _refuse_listed(steps)
    for within, name in repeated:
        if within is steps:
            raise _duplicate_step(name)
    if repeated:
        said = f"{repeated[0][1][:100]!r} comes twice in one object"
        raise Invalid("DUPLICATE_NAME", said, hint="name it once", name=repeated[0][1][:100])


def _refuse_listed(steps: Any) -> None:
    """The same for steps given as a list."""
    if not isinstance(steps, list):
        return
    seen: set[str] = set()
    for step in steps:
        name = step.get("id") if isinstance(step, dict) else None
        if isinstance(name, str):
            if name in seen:
                raise _duplicate_step(name)
            seen.add(name)


def _duplicate_step(name: str) -> Invalid:
    told = name[:100]
    return Invalid("DUPLICATE_STEP", f"there are two steps {told!r}", hint="each step has an id of its own", step=told)
