"""H7: a recipe as SQL: the statement by which PostgreSQL makes canonical records of raw ones, many at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.harvest.config import FieldType
from penstock.harvest.feed.recipe import (
    DECIMAL,
    INTEGER,
    MISSING,
    SHOWN,
    CanonicalField,
    FeedMapping,
    FieldCondition,
    in_order,
)
from penstock.kernel.db.sql import load
from penstock.kernel.errors import BadConfig

_SQL = load("penstock.harvest.consolidate")
_AT_ONCE = 50  # fields; a function takes at most 100 arguments
_MOST_ARGUMENTS = 32_767  # asyncpg's limit
# What is shorter than this needs no counting of its digits, which is what takes PostgreSQL time.
_SHORT = 18
_PATTERNS = {
    FieldType.INTEGER: ("-?[0-9]+", INTEGER),
    FieldType.DECIMAL: ("-?[0-9]+([.][0-9]+)?", DECIMAL),
}


@dataclass(frozen=True)
class CompiledStatement:
    """A text, and the arguments the recipe has for it; they come after those of a call."""

    text: str
    arguments: Sequence[Any]


class _Arguments:
    """Numbers what is bound: nothing that anybody configured becomes part of a statement's text."""

    def __init__(self, taken: int) -> None:
        self._taken = taken
        self._numbers: dict[tuple[str, Any], int] = {}

    def bind(self, type_: str, value: Any) -> str:
        """What stands for *value*, which is hashable, in the text."""
        number = self._numbers.setdefault((type_, value), self._taken + len(self._numbers) + 1)
        return f"${number}::{type_}"

    def statement(self, text: str) -> CompiledStatement:
        if self._taken + len(self._numbers) > _MOST_ARGUMENTS:
            raise BadConfig("MAPPING_TOO_LARGE", "the rules have too many conditions for one statement")
        return CompiledStatement(text, [value for _, value in self._numbers])


def compile_set(recipe: FeedMapping) -> CompiledStatement:
    """Its own arguments are: feed, after which key, how many, run, version of the pricing, the time."""
    bound = _Arguments(taken=6)
    text = _SQL["consolidate_set"].format(
        texts="".join(f", {text} AS t{n}" for n, text in enumerate(_texts(recipe, bound))),
        values="".join(f", {_value(field, n)} AS v{n}" for n, field in enumerate(recipe.read)),
        problem=_problem(recipe, bound),
        cost=f"v{len(recipe.fields)} * {bound.bind('numeric', recipe.unit)}" if recipe.cost else "NULL::numeric",
        rule=_rule(recipe, bound),
        fields=_fields(recipe, bound),
        price=_price(recipe, bound),
        rule_name=f"({bound.bind('text[]', tuple(rule.name for rule in recipe.rules))})[rule]",
    )
    return bound.statement(text)


def compile_fetch(recipe: FeedMapping) -> CompiledStatement:
    """Its own arguments are: feed, after which key, how many."""
    bound = _Arguments(taken=3)
    return bound.statement(_SQL["fetch_batch"].format(texts=", ".join(_texts(recipe, bound))))


def _texts(recipe: FeedMapping, bound: _Arguments) -> list[str]:
    return [f"payload #>> {bound.bind('text[]', field.path)}" for field in recipe.read]


def _value(field: CanonicalField, n: int) -> str:
    """A text as what it stands for, null when it is no such thing."""
    if field.type is FieldType.BOOLEAN:
        return f"CASE t{n} WHEN 'true' THEN true WHEN 'false' THEN false END"
    if field.is_number:
        short, any_ = _PATTERNS[field.type]
        pattern = f"CASE WHEN octet_length(t{n}) < {_SHORT} THEN '^{short}$' ELSE '^{any_}$' END"
        return f"CASE WHEN t{n} ~ {pattern} THEN t{n}::numeric END"
    return f"t{n}"


def _problem(recipe: FeedMapping, bound: _Arguments) -> str:
    found = []
    for n, field in enumerate(recipe.read):
        name = bound.bind("text", field.name)
        if field.required:
            found.append(f"WHEN t{n} IS NULL THEN {name} || ': {MISSING}'")
        if field.type is not FieldType.TEXT:
            said = f"{name} || ': ''' || left(t{n}, {SHOWN}) || ''' {field.complaint}'"
            found.append(f"WHEN v{n} IS NULL AND t{n} IS NOT NULL THEN {said}")
    return f"CASE {' '.join(found)} END" if found else "NULL::text"


def _rule(recipe: FeedMapping, bound: _Arguments) -> str:
    """The number of the rule that makes the price, counted from 1 as arrays are."""
    if not recipe.rules:
        return "NULL::integer"
    cases = [
        f"WHEN {' AND '.join(_holds(recipe, test, bound) for test in rule.conditions) or 'true'} THEN {number}"
        for number, rule in enumerate(recipe.rules, start=1)
    ]
    return f"CASE WHEN v{len(recipe.fields)} IS NULL THEN NULL {' '.join(cases)} END"


def _holds(recipe: FeedMapping, condition: FieldCondition, bound: _Arguments) -> str:
    field, value = recipe.fields[condition.field], f"v{condition.field}"
    if condition.any_of is not None:
        type_ = "numeric[]" if field.is_number else f"{field.type.value}[]"
        return f"{value} = ANY ({bound.bind(type_, tuple(in_order(condition.any_of)))})"
    ends = ((">=", condition.lower), ("<", condition.upper))
    return " AND ".join(f"{value} {sign} {bound.bind('numeric', end)}" for sign, end in ends if end is not None)


def _price(recipe: FeedMapping, bound: _Arguments) -> str:
    factors = bound.bind("numeric[]", tuple(rule.factor for rule in recipe.rules))
    adds = bound.bind("numeric[]", tuple(rule.add for rule in recipe.rules))
    return f"round(cost * ({factors})[rule] + ({adds})[rule], {bound.bind('integer', recipe.decimals)})"


def _fields(recipe: FeedMapping, bound: _Arguments) -> str:
    pairs = [f"{bound.bind('text', field.name)}, v{n}" for n, field in enumerate(recipe.fields)]
    parts = [", ".join(pairs[start : start + _AT_ONCE]) for start in range(0, len(pairs), _AT_ONCE)]
    return " || ".join(f"jsonb_build_object({part})" for part in parts) or "jsonb_build_object()"
