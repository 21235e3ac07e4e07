"""Validation errors in plain words: the one place where the messages of pydantic are replaced."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, get_args

from pydantic_core.core_schema import ErrorType

MISSING = "is required"
UNKNOWN_KEY = "unknown key"
_DURATION = "must be a duration, e.g. 300 or PT5M"
_TIME = "must be a date and time, e.g. 2026-01-31T12:00:00Z"
_UUID = "must be a UUID, e.g. 01890a5d-ac96-774b-bcce-b302099a8057"
_WHOLE, _NUMBER, _DECIMAL = "must be a whole number", "must be a number", "must be a decimal number"
_TEXT, _OBJECT, _LIST, _BOOLEAN = (
    "must be text",
    "must be an object with keys",
    "must be a list",
    "must be true or false",
)

_MESSAGES = {
    "missing": MISSING,
    "extra_forbidden": UNKNOWN_KEY,
    "invalid_key": "keys must be text",
    "none_required": "must be null",
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "dict_type": _OBJECT,
    "mapping_type": _OBJECT,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "set_type": _LIST,
    "frozen_set_type": _LIST,
    "iterable_type": _LIST,
    "recursion_loop": "must not contain itself",
    "string_type": _TEXT,
    "string_unicode": "must be text in UTF-8",
    "string_sub_type": _TEXT,
    "path_type": "must be a path",
    "bytes_type": _TEXT,
    "bool_type": _BOOLEAN,
    "bool_parsing": _BOOLEAN,
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": "must be a whole number with fewer digits",
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "must be a finite number",
    "decimal_type": _DECIMAL,
    "decimal_parsing": _DECIMAL,
    "time_delta_type": _DURATION,
    "time_delta_parsing": _DURATION,
    "date_type": "must be a date, e.g. 2026-01-31",
    "date_parsing": "must be a date, e.g. 2026-01-31",
    "date_from_datetime_parsing": "must be a date, e.g. 2026-01-31",
    "date_from_datetime_inexact": "must be a date without a time, e.g. 2026-01-31",
    "datetime_type": _TIME,
    "datetime_parsing": _TIME,
    "datetime_from_date_parsing": _TIME,
    "datetime_object_invalid": _TIME,
    "timezone_aware": "must have a time zone, e.g. 2026-01-31T12:00:00Z",
    "uuid_type": _UUID,
    "uuid_parsing": _UUID,
    "is_instance_of": "has the wrong type",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("of at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("of at most", "le"),
}
_LENGTHS = {
    "string_too_short": ("min_length", "at least", "character"),
    "string_too_long": ("max_length", "at most", "character"),
    "too_short": ("min_length", "at least", "item"),
    "too_long": ("max_length", "at most", "item"),
    "decimal_max_digits": ("max_digits", "at most", "digit"),
    "decimal_max_places": ("decimal_places", "at most", "decimal place"),
    "decimal_whole_digits": ("whole_digits", "at most", "digit"),
}
# What pydantic appends to a path for a member of a union.
_MEMBERS = frozenset({"str", "int", "float", "bool", "decimal", "list", "dict", "datetime", "none", "literal"})
_OF_PYDANTIC = frozenset(get_args(ErrorType))
Path = tuple[str | int, ...]
ErrorDetail = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Violation:
    """A value that its model refuses: where it is in the document, and what it must be."""

    path: Path
    message: str
    detail: ErrorDetail


def list_violations(details: Iterable[ErrorDetail], document: Any) -> list[Violation]:
    """Return one violation per path of *document*; the members of a union are named together."""
    violations = [
        Violation(_make_real_path(detail["loc"], document), describe_error(detail), detail) for detail in details
    ]
    return [_join([*same]) for _, same in groupby(violations, key=lambda violation: violation.path)]


def describe_error(detail: ErrorDetail) -> str:
    """Return the sentence for an error of pydantic. It never contains the value, which may be a secret."""
    kind, context = detail["type"], detail.get("ctx") or {}
    if kind in _MESSAGES:
        return _MESSAGES[kind]
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        bound = context[name]
        return f"must be {_name_kind(bound)} {word} {format(bound, 'g') if isinstance(bound, float) else bound}"
    if kind in _LENGTHS:
        return _describe_length(kind, context)
    if kind not in _OF_PYDANTIC or kind in ("value_error", "assertion_error"):  # the text is of this project
        return str(context.get("error") or detail["msg"])
    return _describe_choice(kind, context) or "is not valid"


def _describe_length(kind: str, context: Mapping[str, Any]) -> str:
    name, word, unit = _LENGTHS[kind]
    number = context[name]
    if (number, name) == (1, "min_length"):
        return "must not be empty"
    return f"must have {word} {number} {unit}{'' if number == 1 else 's'}"


def _describe_choice(kind: str, context: Mapping[str, Any]) -> str | None:
    match kind:
        case "enum" | "literal_error":
            return f"must be {_format_choices(context['expected'])}"
        case "union_tag_invalid":
            return (
                f"its key {_strip_quotes(context['discriminator'])} must be {_format_choices(context['expected_tags'])}"
            )
        case "union_tag_not_found":
            return f"needs the key {_strip_quotes(context['discriminator'])}"
        case "string_pattern_mismatch":
            return f"must match {context['pattern']}"
        case "multiple_of":
            return f"must be a multiple of {context['multiple_of']}"
        case "json_invalid":
            return f"is not valid JSON: {context['error']}"
    return None


def _name_kind(bound: Any) -> str:
    """Return the noun for a value that is compared with *bound*; pydantic spells the bound of a duration as text."""
    if isinstance(bound, str):
        return "a duration"
    return "a whole number" if isinstance(bound, int) else "a number"


def _format_choices(expected: str) -> str:
    choices = [_strip_quotes(choice) for part in expected.split(", ") for choice in part.split(" or ")]
    return choices[0] if len(choices) == 1 else f"one of: {', '.join(choices)}"


def _strip_quotes(quoted: str) -> str:
    return quoted.strip("'")


def _make_real_path(path: Sequence[str | int], document: Any) -> Path:
    """Return *path* without the members of unions and the kinds that pydantic adds to it."""
    return tuple(_iterate_real_keys(path, document))


def _iterate_real_keys(path: Sequence[str | int], value: Any) -> Iterator[str | int]:
    for number, key in enumerate(path):
        is_last = number == len(path) - 1
        if _has_key(value, key):
            value = value[key]
        elif _is_branch(value, key, is_last=is_last):
            continue
        else:
            value = None
        yield key


def _has_key(value: Any, key: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(key, int) and key < len(value)
    return isinstance(value, Mapping) and key in value


def _is_branch(value: Any, key: str | int, *, is_last: bool) -> bool:
    """Return whether pydantic added *key* to name the member of a union that it tried."""
    if isinstance(value, list | str | int | float) or key in _MEMBERS or "[" in str(key):
        return True
    return not is_last and isinstance(value, Mapping) and key in value.values()


def _join(same: Sequence[Violation]) -> Violation:
    first = same[0]
    messages = [*dict.fromkeys(violation.message for violation in same)]
    prefix = "must be "
    if len(messages) > 1 and all(message.startswith(prefix) for message in messages):
        return Violation(first.path, prefix + " or ".join(text.removeprefix(prefix) for text in messages), first.detail)
    return Violation(first.path, "; ".join(messages), first.detail)
