"""F2, F15: the values of inputs and scopes: JSON with limits, references to steps, and no duplicate names."""

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
_VALUE_LIMIT = 200_000  # YAML anchors can multiply one value a billion times
_LARGEST = 2**63 - 1


class ValueReference:
    """A value that is known only in a run; its text is the `${…}` reference of YAML."""

    __slots__ = ("_expression",)

    def __init__(self, expression: str) -> None:
        self._expression = expression

    def __getattr__(self, name: str) -> "ValueReference":
        if name.startswith("_"):  # Python itself looks up such names
            raise AttributeError(f"write [{name!r}] for a name with a leading underscore")
        return self[name]

    def __getitem__(self, key: str | int) -> "ValueReference":
        if isinstance(key, str) and key.isascii() and key.isidentifier() and not iskeyword(key) and key[:2] != "__":
            return ValueReference(f"{self._expression}.{key}")
        return ValueReference(f"{self._expression}[{json.dumps(key, ensure_ascii=False)}]")

    def __iter__(self) -> Iterator["ValueReference"]:
        raise TypeError("the value of a reference is not known yet: use a map to iterate over it")

    def __str__(self) -> str:
        return f"${{{self._expression}}}"

    def __repr__(self) -> str:
        return f"<{self}>"


def make_step_reference(step_id: str) -> ValueReference:
    """Return a reference to a step, with `outputs` and `status`."""
    return ValueReference("steps")[step_id]


def to_json(document: Any) -> Any:
    """Return *document* as plain JSON, with dates as texts; raise ValueError with the path of any other value."""
    return _JsonCopy().copy(document, ())


class _JsonCopy:
    def __init__(self) -> None:
        self._left = _VALUE_LIMIT

    def copy(self, value: Any, path: tuple[str, ...]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it has more than {_VALUE_LIMIT:,} values")
        if isinstance(value, Mapping | list | tuple):
            if len(path) == _DEPTH_LIMIT:
                raise ValueError(f"it is nested deeper than {_DEPTH_LIMIT} levels")
            if isinstance(value, Mapping):
                return {_check_key(name, path): self.copy(inner, (*path, str(name))) for name, inner in value.items()}
            return [self.copy(inner, (*path, str(index))) for index, inner in enumerate(value)]
        return _copy_scalar(value, path)


def _check_key(name: Any, path: tuple[str, ...]) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{_format_path((*path, repr(name)))}: a name must be a text; put it in quotes")  # noqa: TRY004
    return _check_text(name, path)


def _copy_scalar(value: Any, path: tuple[str, ...]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _check_text(value, path)
    if isinstance(value, int) and abs(value) <= _LARGEST:
        return int(value)
    if isinstance(value, float) and isfinite(value):
        return float(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, ValueReference):
        return _check_text(str(value), path)
    problem = "a number that is too large or not finite" if isinstance(value, int | float) else type(value).__name__
    raise ValueError(f"{_format_path(path)}: {problem} cannot be represented in JSON")


def _check_text(value: str, path: tuple[str, ...]) -> str:
    if not is_storable(value):
        raise ValueError(f"{_format_path(path)}: a text contains NUL or an unpaired surrogate")
    return str(value)


def _format_path(path: tuple[str, ...]) -> str:
    return ".".join(path) or "it"


def reject_duplicate_names(body: bytes) -> None:
    """Raise Invalid DUPLICATE_STEP or DUPLICATE_NAME for a name that is repeated; ignore bodies that are not JSON."""
    repeated: list[tuple[dict[str, Any], str]] = []

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            names = Counter(name for name, _ in pairs)
            repeated.append((members, names.most_common(1)[0][0]))
        return members

    try:
        document = json.loads(body, object_pairs_hook=build_object)
    except (ValueError, RecursionError):
        return
    steps = document.get("steps") if isinstance(document, dict) else None
    _reject_duplicate_ids(steps)
    for members, name in repeated:
        if members is steps:
            raise _make_duplicate_error(name)
    if repeated:
        name = repeated[0][1][:100]
        raise Invalid("DUPLICATE_NAME", f"an object has two members {name!r}", hint="remove one of them", name=name)


def _reject_duplicate_ids(steps: Any) -> None:
    """Raise Invalid DUPLICATE_STEP for a repeated id in a list of steps."""
    if not isinstance(steps, list):
        return
    seen: set[str] = set()
    for step in steps:
        name = step.get("id") if isinstance(step, dict) else None
        if isinstance(name, str):
            if name in seen:
                raise _make_duplicate_error(name)
            seen.add(name)


def _make_duplicate_error(name: str) -> Invalid:
    step = name[:100]
    return Invalid("DUPLICATE_STEP", f"two steps have the id {step!r}", hint="give each step its own id", step=step)
