"""Validation errors in plain words: no message of pydantic reaches the user."""

import importlib
import pkgutil
from collections.abc import Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

import penstock
from penstock.kernel.config.sections import Duration
from penstock.kernel.http.schemas import Fence, Text, UtcTime
from penstock.kernel.validation import describe_error, list_violations
from penstock.settings import Settings

VALUES: list[Any] = [
    None, "", "x", "x" * 100_000, "1.5", "\0", "{}", "2026-13-01", -1, -1.5, 0, 1.5, 10**30, "9" * 5_000, True,
    float("nan"), float("inf"), [], ["", "x", 1], [None] * 2_000, {}, {"x": None}, {1: 2}, {"kind": "x"}, object(),
    b"\xff", datetime(2026, 1, 1), timedelta(days=-1),  # noqa: DTZ001 - a time without a zone
]  # fmt: skip


class Color(StrEnum):
    RED = "RED"
    BLUE = "BLUE"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (int, "x", "must be a whole number"),
        (int, 1.5, "must be a whole number"),
        (Annotated[int, Field(ge=1)], 0, "must be a whole number of at least 1"),
        (Annotated[int, Field(lt=9)], 9, "must be a whole number less than 9"),
        (Annotated[float, Field(le=1)], 2, "must be a number of at most 1"),
        (Annotated[float, Field(gt=0.5)], 0.5, "must be a number greater than 0.5"),
        (Duration, "soon", "must be a duration, e.g. 300 or PT5M"),
        (Duration, None, "must be a duration, e.g. 300 or PT5M"),
        (Duration, -5, "must be a duration of at least 0 seconds"),
        (UtcTime, "soon", "must be a date and time, e.g. 2026-01-31T12:00:00Z"),
        (UtcTime, "2026-01-31T12:00:00", "must have a time zone, e.g. 2026-01-31T12:00:00Z"),
        (bool, "perhaps", "must be true or false"),
        (str, 1, "must be text"),
        (Text, "a\0", "must not contain a NUL character or half of a surrogate pair"),
        (Fence, "1", "must be a whole number"),
        (Annotated[str, Field(min_length=1)], "", "must not be empty"),
        (Annotated[str, Field(max_length=1)], "ab", "must have at most 1 character"),
        (Annotated[list[int], Field(min_length=2)], [1], "must have at least 2 items"),
        (Annotated[str, Field(pattern="^a+$")], "b", "must match ^a+$"),
        (list[int], {}, "must be a list"),
        (dict[str, int], [], "must be an object with keys"),
        (Settings, [], "must be an object with keys"),
        (Color, "GREEN", "must be one of: RED, BLUE"),
        (Literal["a", "b", "c"], "d", "must be one of: a, b, c"),
        (Literal["a"], "d", "must be a"),
        (Pet, {"kind": "cow"}, "its key kind must be one of: cat, dog"),
        (Pet, {}, "needs the key kind"),
    ],
)
def test_message_states_what_the_value_must_be(kind: Any, value: Any, message: str) -> None:
    """Validation: every error says what the value must be, with an example or the choices."""
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(value)
    assert [describe_error(detail) for detail in refused.value.errors()] == [message]


def test_paths_have_no_internal_names_of_unions() -> None:
    """Validation: the path of an error contains the keys of the document only, and a union is one error."""
    found = _violations({"pet": {"kind": "cat"}, "size": [1], "many": {"a": "b"}})
    assert found == [
        ("pet.lives", "is required"),
        ("size", "must be a whole number or true or false"),
        ("many.a", "must be a whole number or a list"),
    ]


class _Owner(BaseModel):
    pet: Pet
    size: int | bool
    many: dict[str, int | list[int]]


def _violations(document: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as refused:
        _Owner.model_validate(document)
    found = list_violations(refused.value.errors(), document)
    return [(".".join(map(str, violation.path)), violation.message) for violation in found]


@cache
def _models() -> list[type[BaseModel]]:
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return [model for model in _subclasses(BaseModel) if model.__module__.startswith("penstock.")]


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for inner in model.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def test_no_error_of_any_model_shows_pydantic() -> None:
    """Validation: every error that a model of Penstock raises for wrong values has a sentence of its own."""
    models = _models()
    assert len(models) > 100
    shown = {message for model in models for message in _shown_messages(model)}
    assert shown == set()


def _shown_messages(model: type[BaseModel]) -> Iterator[str]:
    """Yield the errors for which the message of pydantic, or none, would be shown."""
    names = [field.alias or name for name, field in model.model_fields.items()]
    for value in VALUES:
        for document in (value, dict.fromkeys(names, value), {"unknown": value}):
            try:
                model.model_validate(document)
            except ValidationError as error:
                for detail in error.errors():
                    message = describe_error(detail)
                    if message == "is not valid" or "Input" in message or message == detail["msg"] or not message:
                        yield f"{model.__name__}: {detail['type']}: {message}"
