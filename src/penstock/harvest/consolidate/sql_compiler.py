"""H7: the mapping of a feed as SQL, so that PostgreSQL makes many canonical records with one statement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.harvest.config import FieldType
from penstock.harvest.feed.mapping import (
    DECIMAL,
    EXCERPT,
    INTEGER,
    MISSING,
    CanonicalField,
    FeedMapping,
    FieldCondition,
    PricingRule,
    sort_values,
)
from penstock.kernel.db.sql import load
from penstock.kernel.errors import BadConfig

_SQL = load("penstock.harvest.consolidate")
_MAX_FIELDS = 50  # per call; a function has at most 100 arguments
_MAX_ARGUMENTS = 32_767  # asyncpg's limit
# Shorter texts need no limit of digits in their pattern, which is slow in PostgreSQL.
_SHORT = 18
_PATTERNS = {
    FieldType.INTEGER: ("-?[0-9]+", INTEGER),
    FieldType.DECIMAL: ("-?[0-9]+([.][0-9]+)?", DECIMAL),
}


@dataclass(frozen=True)
class CompiledStatement:
    """The text of a statement and the arguments of the mapping, which follow the arguments of the call."""

    text: str
    arguments: Sequence[Any]


class _Arguments:
    """Binds values as numbered parameters, so that no setting becomes part of the text of a statement."""

    def __init__(self, reserved: int) -> None:
        self._reserved = reserved
        self._numbers: dict[tuple[str, Any], int] = {}

    def bind(self, type_: str, value: Any) -> str:
        """Return the parameter for *value*, which must be hashable."""
        number = self._numbers.setdefault((type_, value), self._reserved + len(self._numbers) + 1)
        return f"${number}::{type_}"

    def make_statement(self, text: str) -> CompiledStatement:
        if self._reserved + len(self._numbers) > _MAX_ARGUMENTS:
            raise BadConfig(
                "MAPPING_TOO_LARGE",
                f"the mapping has {self._reserved + len(self._numbers):,} values, more than {_MAX_ARGUMENTS:,}",
                hint="use fewer conditions in pricing.rules of the feed",
            )
        return CompiledStatement(text, [value for _, value in self._numbers])


def compile_set(mapping: FeedMapping) -> CompiledStatement:
    """Compile `consolidate_set`. Arguments of a call: feed, last key, limit, run, version of the pricing, time."""
    bound = _Arguments(reserved=6)
    text = _SQL["consolidate_set"].format(
        texts="".join(f", {text} AS t{n}" for n, text in enumerate(_compile_texts(mapping, bound))),
        values="".join(f", {_compile_value(field, n)} AS v{n}" for n, field in enumerate(mapping.inputs)),
        problem=_compile_problem(mapping, bound),
        cost=f"v{len(mapping.fields)} * {bound.bind('numeric', mapping.unit)}" if mapping.cost else "NULL::numeric",
        rule=_compile_rule(mapping, bound),
        fields=_compile_fields(mapping, bound),
        price=_compile_price(mapping, bound),
        rule_name=f"({bound.bind('text[]', tuple(rule.name for rule in mapping.rules))})[rule]",
    )
    return bound.make_statement(text)


def compile_fetch(mapping: FeedMapping) -> CompiledStatement:
    """Compile `fetch_batch`. Arguments of a call: feed, last key, limit."""
    bound = _Arguments(reserved=3)
    return bound.make_statement(_SQL["fetch_batch"].format(texts=", ".join(_compile_texts(mapping, bound))))


def _compile_texts(mapping: FeedMapping, bound: _Arguments) -> list[str]:
    return [f"payload #>> {bound.bind('text[]', field.path)}" for field in mapping.inputs]


def _compile_value(field: CanonicalField, n: int) -> str:
    """Return the expression for the value of a text, which is null if the text is not of the type."""
    if field.type is FieldType.BOOLEAN:
        return f"CASE t{n} WHEN 'true' THEN true WHEN 'false' THEN false END"
    if field.is_number:
        short, any_ = _PATTERNS[field.type]
        pattern = f"CASE WHEN octet_length(t{n}) < {_SHORT} THEN '^{short}$' ELSE '^{any_}$' END"
        return f"CASE WHEN t{n} ~ {pattern} THEN t{n}::numeric END"
    return f"t{n}"


def _compile_problem(mapping: FeedMapping, bound: _Arguments) -> str:
    cases = []
    for n, field in enumerate(mapping.inputs):
        name = bound.bind("text", field.name)
        if field.required:
            cases.append(f"WHEN t{n} IS NULL THEN {name} || ': {MISSING}'")
        if field.type is not FieldType.TEXT:
            problem = f"{name} || ': ''' || left(t{n}, {EXCERPT}) || ''' {field.type_error}'"
            cases.append(f"WHEN v{n} IS NULL AND t{n} IS NOT NULL THEN {problem}")
    return f"CASE {' '.join(cases)} END" if cases else "NULL::text"


def _compile_rule(mapping: FeedMapping, bound: _Arguments) -> str:
    """Return the expression for the number of the first matching rule, from 1 like the indexes of arrays."""
    if not mapping.rules:
        return "NULL::integer"
    cases = [
        f"WHEN {_compile_conditions(mapping, rule, bound)} THEN {number}"
        for number, rule in enumerate(mapping.rules, start=1)
    ]
    return f"CASE WHEN v{len(mapping.fields)} IS NULL THEN NULL {' '.join(cases)} END"


def _compile_conditions(mapping: FeedMapping, rule: PricingRule, bound: _Arguments) -> str:
    return " AND ".join(_compile_condition(mapping, condition, bound) for condition in rule.conditions) or "true"


def _compile_condition(mapping: FeedMapping, condition: FieldCondition, bound: _Arguments) -> str:
    field, value = mapping.fields[condition.field], f"v{condition.field}"
    if condition.any_of is not None:
        type_ = "numeric[]" if field.is_number else f"{field.type.value}[]"
        return f"{value} = ANY ({bound.bind(type_, tuple(sort_values(condition.any_of)))})"
    ends = ((">=", condition.lower), ("<", condition.upper))
    return " AND ".join(f"{value} {sign} {bound.bind('numeric', end)}" for sign, end in ends if end is not None)


def _compile_price(mapping: FeedMapping, bound: _Arguments) -> str:
    factors = bound.bind("numeric[]", tuple(rule.factor for rule in mapping.rules))
    adds = bound.bind("numeric[]", tuple(rule.add for rule in mapping.rules))
    return f"round(cost * ({factors})[rule] + ({adds})[rule], {bound.bind('integer', mapping.decimals)})"


def _compile_fields(mapping: FeedMapping, bound: _Arguments) -> str:
    pairs = [f"{bound.bind('text', field.name)}, v{n}" for n, field in enumerate(mapping.fields)]
    parts = [", ".join(pairs[start : start + _MAX_FIELDS]) for start in range(0, len(pairs), _MAX_FIELDS)]
    return " || ".join(f"jsonb_build_object({part})" for part in parts) or "jsonb_build_object()"
