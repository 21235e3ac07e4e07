"""H7: the mapping of raw records to canonical records: fields, cost, and pricing rules."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cached_property
from typing import Any

from penstock.harvest.config import ConditionSection, FeedSection, FieldType, RuleSection
from penstock.kernel import canonical
from penstock.kernel.errors import BadConfig

# The syntax of numbers, here and in PostgreSQL: `FeedMapping.map` and the compiled statement give equal results.
INTEGER = "-?[0-9]{1,18}"
DECIMAL = "-?[0-9]{1,30}([.][0-9]{1,20})?"
EXCERPT = 100  # characters of an invalid value in a reason
COST = "cost"  # name of the cost in a reason
MISSING = "is missing"
_MAX_DIGITS = 30
_NUMBERS = frozenset({FieldType.INTEGER, FieldType.DECIMAL})
_ARTICLES = {FieldType.INTEGER: "an integer", FieldType.DECIMAL: "a decimal", FieldType.BOOLEAN: "a boolean"}
_EXACT = Context(prec=200, rounding=ROUND_HALF_UP)  # half away from zero; more digits than any price has

Value = str | int | Decimal | bool


@dataclass(frozen=True, slots=True)
class CanonicalField:
    """The path and the type of a field."""

    name: str
    path: tuple[str, ...]
    type: FieldType
    required: bool = False

    @property
    def is_number(self) -> bool:
        return self.type in _NUMBERS

    @property
    def type_error(self) -> str:
        """The reason for a text that is not of the type."""
        return f"is not {_ARTICLES[self.type]}"

    def parse(self, text: str) -> Value | None:
        """Return the value of *text*, or None if it is not of the type."""
        return _PARSERS[self.type](text)


@dataclass(frozen=True, slots=True)
class FieldCondition:
    """A test of a field: its value is in *any_of* or in [*lower*, *upper*). A missing value fails the test."""

    field: int  # index in the fields of the mapping
    any_of: frozenset[Value] | None = None
    lower: Decimal | None = None
    upper: Decimal | None = None

    def is_true(self, values: Sequence[Value | None]) -> bool:
        value = values[self.field]
        if value is None:
            return False
        if self.any_of is not None:
            return value in self.any_of
        number = Decimal(value)
        return (self.lower is None or number >= self.lower) and (self.upper is None or number < self.upper)


@dataclass(frozen=True, slots=True)
class PricingRule:
    """A pricing rule: cost × *factor* + *add*, if all conditions are true."""

    name: str
    conditions: tuple[FieldCondition, ...]
    factor: Decimal
    add: Decimal


@dataclass(frozen=True, slots=True)
class MappedRecord:
    """The values of a canonical record."""

    fields: Mapping[str, Value | None]
    cost: Decimal | None
    price: Decimal | None
    rule: str | None


@dataclass(frozen=True, slots=True)
class MappingProblem:
    """The reason why a raw record cannot be mapped."""

    reason: str


@dataclass(frozen=True)
class FeedMapping:
    """The rules that determine the canonical records of a feed."""

    fields: tuple[CanonicalField, ...]
    cost: CanonicalField | None
    unit: Decimal  # value of 1 in the costs of the source
    rules: tuple[PricingRule, ...]
    decimals: int  # decimal places of a price
    document: Mapping[str, Any]

    @classmethod
    def from_feed(cls, feed: FeedSection) -> "FeedMapping":
        """Return the mapping of *feed*; raise BadConfig for a rule that compares values of different types."""
        fields = tuple(
            CanonicalField(name, tuple(field.path.split(".")), field.type, field.required)
            for name, field in feed.fields.items()
        )
        cost = CanonicalField(COST, tuple(feed.cost.path.split(".")), FieldType.DECIMAL) if feed.cost else None
        unit = _make_unit(feed.cost.decimals if feed.cost else 0)
        rules = tuple(_make_rule(rule, fields) for rule in feed.pricing.rules)
        return cls(fields, cost, unit, rules, feed.pricing.decimals, _make_document(feed, rules))

    @cached_property
    def inputs(self) -> Sequence[CanonicalField]:
        """The values that are read from a raw record: the fields, then the cost."""
        return [*self.fields, *([self.cost] if self.cost else [])]

    @cached_property
    def digest(self) -> str:
        """A digest of the mapping. If it changes, all canonical records are made again."""
        return canonical.compute_digest(self.document)

    @cached_property
    def pricing_digest(self) -> str:
        """A digest of the pricing rules."""
        return canonical.compute_digest(self.make_pricing_document())

    def make_pricing_document(self) -> Any:
        """Return the pricing rules as JSON data."""
        return self.document["pricing"]

    def map(self, texts: Sequence[str | None]) -> MappedRecord | MappingProblem:
        """Return the canonical values of a record with these *texts*, one for each of `inputs`."""
        values: list[Value | None] = []
        for field, text in zip(self.inputs, texts, strict=True):
            value = None if text is None else field.parse(text)
            if value is None and (text is not None or field.required):
                problem = MISSING if text is None else f"'{text[:EXCERPT]}' {field.type_error}"
                return MappingProblem(f"{field.name}: {problem}")
            values.append(value)
        cost = self._compute_cost(values.pop()) if self.cost else None
        rule = self._find_rule(values) if cost is not None else None
        price = None if cost is None or rule is None else self._compute_price(cost, rule)
        fields = {field.name: value for field, value in zip(self.fields, values, strict=True)}
        return MappedRecord(fields, cost, price, rule.name if rule else None)

    def _compute_cost(self, value: Value | None) -> Decimal | None:
        return None if value is None else _EXACT.multiply(Decimal(value), self.unit)

    def _find_rule(self, values: Sequence[Value | None]) -> PricingRule | None:
        return next(
            (rule for rule in self.rules if all(condition.is_true(values) for condition in rule.conditions)), None
        )

    def _compute_price(self, cost: Decimal, rule: PricingRule) -> Decimal:
        exact = _EXACT.add(_EXACT.multiply(cost, rule.factor), rule.add)
        return exact.quantize(_make_unit(self.decimals), context=_EXACT)


def _make_parser(pattern: str, make: Callable[[str], Value]) -> Callable[[str], Value | None]:
    matches = re.compile(pattern).fullmatch
    return lambda text: make(text) if matches(text) else None


_PARSERS: Mapping[FieldType, Callable[[str], Value | None]] = {
    FieldType.TEXT: lambda text: text,
    FieldType.INTEGER: _make_parser(INTEGER, int),
    FieldType.DECIMAL: _make_parser(DECIMAL, Decimal),
    FieldType.BOOLEAN: {"true": True, "false": False}.get,
}


def _make_unit(decimals: int) -> Decimal:
    return Decimal(1).scaleb(-decimals)


def _make_rule(rule: RuleSection, fields: Sequence[CanonicalField]) -> PricingRule:
    indexes = {field.name: index for index, field in enumerate(fields)}
    conditions = tuple(
        _make_condition(rule.name, section, indexes[name], fields[indexes[name]]) for name, section in rule.when.items()
    )
    return PricingRule(rule.name, conditions, _EXACT.multiply(100 + rule.markup_percent, _make_unit(2)), rule.add)


def _make_condition(rule: str, section: ConditionSection, index: int, field: CanonicalField) -> FieldCondition:
    if section.any_of is not None:
        return FieldCondition(index, any_of=frozenset(_check_value(rule, field, value) for value in section.any_of))
    if not field.is_number:
        hint = f"use any_of, or set fields.{field.name}.type to integer or decimal"
        raise _make_rule_error(
            rule, f"the field {field.name} is of the type {field.type.value}, which has no order", hint
        )
    lower, upper = (None if end is None else _check_number(rule, field, end) for end in (section.from_, section.below))
    return FieldCondition(index, lower=lower, upper=upper)


def _check_value(rule: str, field: CanonicalField, value: Value) -> Value:
    """Return *value* in the type of the field, or raise BadConfig."""
    if field.is_number:
        return _check_number(rule, field, value)
    if isinstance(value, bool) != (field.type is FieldType.BOOLEAN) or not isinstance(value, bool | str):
        hint = 'check the quotes: true is a boolean, "true" is text'
        raise _make_rule_error(
            rule, f"the field {field.name} is of the type {field.type.value}, but any_of has {value!r}", hint
        )
    return value


def _check_number(rule: str, field: CanonicalField, value: Value) -> Decimal:
    """Return *value* as a number that a field can have, or raise BadConfig; some numbers are too large to compare."""
    is_short = (
        not isinstance(value, Decimal) or abs(value.adjusted()) <= _MAX_DIGITS
    )  # other texts may have millions of digits
    text = format(value, "f") if isinstance(value, Decimal) and is_short else str(value)
    if re.fullmatch(DECIMAL, text) is None:
        problem = f"the field {field.name} is compared with {text[:EXCERPT]}, which is not a number that it can have"
        raise _make_rule_error(rule, problem, None)
    return Decimal(text)


def _make_rule_error(rule: str, problem: str, hint: str | None) -> BadConfig:
    return BadConfig("PRICING_RULE", f"pricing rule {rule!r}: {problem}", hint=hint)


def _make_document(feed: FeedSection, rules: Sequence[PricingRule]) -> Mapping[str, Any]:
    """Return the mapping as JSON data. Numbers are text, because canonical JSON has only small whole numbers."""
    names = list(feed.fields)
    return {
        "fields": feed.model_dump(mode="json", include={"fields"})["fields"],
        "cost": feed.cost.model_dump(mode="json") if feed.cost else None,
        "pricing": {
            "decimals": feed.pricing.decimals,
            "rules": [
                {
                    "name": rule.name,
                    "when": {
                        names[condition.field]: _make_condition_document(condition) for condition in rule.conditions
                    },
                    "markup_percent": str(section.markup_percent),
                    "add": str(section.add),
                }
                for rule, section in zip(rules, feed.pricing.rules, strict=True)
            ],
        },
    }


def _make_condition_document(condition: FieldCondition) -> Mapping[str, Any]:
    if condition.any_of is not None:
        return {"any_of": [value if isinstance(value, bool) else str(value) for value in sort_values(condition.any_of)]}
    ends = {"from": condition.lower, "below": condition.upper}
    return {name: str(end) for name, end in ends.items() if end is not None}


def sort_values(values: Iterable[Any]) -> list[Any]:
    """Return the values of a condition, which are all of one type, in a stable order."""
    return sorted(values)
