"""H7: how a feed's raw records become canonical ones: the fields, the cost, and the rules that make a price."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cached_property
from typing import Any

from penstock.harvest.config import ConditionSection, FeedSection, FieldType, RuleSection
from penstock.kernel import canonical
from penstock.kernel.errors import BadConfig

# The form of a number, here and in PostgreSQL: `FeedMapping.map` and the compiled statement agree to the last digit.
INTEGER = "-?[0-9]{1,18}"
DECIMAL = "-?[0-9]{1,30}([.][0-9]{1,20})?"
SHOWN = 100  # characters of a value that is not what it should be
COST = "cost"  # what a problem calls it
MISSING = "is missing"
_LONGEST = 30  # digits
_NUMBERS = frozenset({FieldType.INTEGER, FieldType.DECIMAL})
_ARTICLES = {FieldType.INTEGER: "an integer", FieldType.DECIMAL: "a decimal", FieldType.BOOLEAN: "a boolean"}
_EXACT = Context(prec=200, rounding=ROUND_HALF_UP)  # half away from zero; more digits than any price is made of

Value = str | int | Decimal | bool


@dataclass(frozen=True, slots=True)
class CanonicalField:
    """Where a value is found, and what it has to be."""

    name: str
    path: tuple[str, ...]
    type: FieldType
    required: bool = False

    @property
    def is_number(self) -> bool:
        return self.type in _NUMBERS

    @property
    def complaint(self) -> str:
        """What is said of a text that cannot be its value."""
        return f"is not {_ARTICLES[self.type]}"

    def parse(self, text: str) -> Value | None:
        """The value *text* stands for; None when it is none of this type."""
        return _PARSERS[self.type](text)


@dataclass(frozen=True, slots=True)
class FieldCondition:
    """A field is one of *any_of*, or a number at least *lower* and below *upper*; one without a value is neither."""

    field: int  # which of the recipe's
    any_of: frozenset[Value] | None = None
    lower: Decimal | None = None
    upper: Decimal | None = None

    def holds(self, values: Sequence[Value | None]) -> bool:
        value = values[self.field]
        if value is None:
            return False
        if self.any_of is not None:
            return value in self.any_of
        number = Decimal(value)
        return (self.lower is None or number >= self.lower) and (self.upper is None or number < self.upper)


@dataclass(frozen=True, slots=True)
class PricingRule:
    """Makes a price, cost × *factor* + *add*, where all conditions hold."""

    name: str
    conditions: tuple[FieldCondition, ...]
    factor: Decimal
    add: Decimal


@dataclass(frozen=True, slots=True)
class MappedRecord:
    """What a raw record became."""

    fields: Mapping[str, Value | None]
    cost: Decimal | None
    price: Decimal | None
    rule: str | None


@dataclass(frozen=True, slots=True)
class MappingProblem:
    """Why a raw record could not become anything."""

    reason: str


@dataclass(frozen=True)
class FeedMapping:
    """Everything that decides what a canonical record looks like."""

    fields: tuple[CanonicalField, ...]
    cost: CanonicalField | None
    unit: Decimal  # what one is worth in which the source tells costs
    rules: tuple[PricingRule, ...]
    decimals: int  # of a price
    document: Mapping[str, Any]

    @classmethod
    def of(cls, feed: FeedSection) -> "FeedMapping":
        """The recipe of *feed*; BadConfig for a rule that compares what cannot be compared."""
        fields = tuple(
            CanonicalField(name, tuple(field.path.split(".")), field.type, field.required)
            for name, field in feed.fields.items()
        )
        cost = CanonicalField(COST, tuple(feed.cost.path.split(".")), FieldType.DECIMAL) if feed.cost else None
        unit = _unit(feed.cost.decimals if feed.cost else 0)
        rules = tuple(_rule(rule, fields) for rule in feed.pricing.rules)
        return cls(fields, cost, unit, rules, feed.pricing.decimals, _document(feed, rules))

    @cached_property
    def read(self) -> Sequence[CanonicalField]:
        """What is read of a raw record: the fields, then the cost."""
        return [*self.fields, *([self.cost] if self.cost else [])]

    @cached_property
    def digest(self) -> str:
        """Changes when canonical records have to be made again."""
        return canonical.digest(self.document)

    @cached_property
    def pricing_digest(self) -> str:
        """Changes when the rules do."""
        return canonical.digest(self.pricing_document())

    def pricing_document(self) -> Any:
        """The rules as data."""
        return self.document["pricing"]

    def map(self, texts: Sequence[str | None]) -> MappedRecord | MappingProblem:
        """What a record becomes that has these *texts*, one for each that is `read`."""
        values: list[Value | None] = []
        for field, text in zip(self.read, texts, strict=True):
            value = None if text is None else field.parse(text)
            if value is None and (text is not None or field.required):
                complaint = MISSING if text is None else f"'{text[:SHOWN]}' {field.complaint}"
                return MappingProblem(f"{field.name}: {complaint}")
            values.append(value)
        cost = self._cost(values.pop()) if self.cost else None
        rule = self._rule_for(values) if cost is not None else None
        price = None if cost is None or rule is None else self._price(cost, rule)
        fields = {field.name: value for field, value in zip(self.fields, values, strict=True)}
        return MappedRecord(fields, cost, price, rule.name if rule else None)

    def _cost(self, told: Value | None) -> Decimal | None:
        return None if told is None else _EXACT.multiply(Decimal(told), self.unit)

    def _rule_for(self, values: Sequence[Value | None]) -> PricingRule | None:
        return next(
            (rule for rule in self.rules if all(condition.holds(values) for condition in rule.conditions)), None
        )

    def _price(self, cost: Decimal, rule: PricingRule) -> Decimal:
        exact = _EXACT.add(_EXACT.multiply(cost, rule.factor), rule.add)
        return exact.quantize(_unit(self.decimals), context=_EXACT)


def _pattern(pattern: str, make: Callable[[str], Value]) -> Callable[[str], Value | None]:
    matches = re.compile(pattern).fullmatch
    return lambda text: make(text) if matches(text) else None


_PARSERS: Mapping[FieldType, Callable[[str], Value | None]] = {
    FieldType.TEXT: lambda text: text,
    FieldType.INTEGER: _pattern(INTEGER, int),
    FieldType.DECIMAL: _pattern(DECIMAL, Decimal),
    FieldType.BOOLEAN: {"true": True, "false": False}.get,
}


def _unit(decimals: int) -> Decimal:
    return Decimal(1).scaleb(-decimals)


def _rule(rule: RuleSection, fields: Sequence[CanonicalField]) -> PricingRule:
    numbers = {field.name: number for number, field in enumerate(fields)}
    conditions = tuple(
        _condition(rule.name, asked, numbers[name], fields[numbers[name]]) for name, asked in rule.when.items()
    )
    return PricingRule(rule.name, conditions, _EXACT.multiply(100 + rule.markup_percent, _unit(2)), rule.add)


def _condition(rule: str, asked: ConditionSection, number: int, field: CanonicalField) -> FieldCondition:
    if asked.any_of is not None:
        return FieldCondition(number, any_of=frozenset(_comparable(rule, field, value) for value in asked.any_of))
    if not field.is_number:
        hint = "use any_of, or make it an integer or a decimal"
        raise _bad(rule, f"{field.name} is a {field.type.value}: it has no `from` and `below`", hint)
    lower, upper = (None if end is None else _number(rule, field, end) for end in (asked.from_, asked.below))
    return FieldCondition(number, lower=lower, upper=upper)


def _comparable(rule: str, field: CanonicalField, value: Value) -> Value:
    """*value* as a field of its type would have it."""
    if field.is_number:
        return _number(rule, field, value)
    if isinstance(value, bool) != (field.type is FieldType.BOOLEAN) or not isinstance(value, bool | str):
        raise _bad(rule, f"{field.name} is a {field.type.value}, it is never {value!r}", "mind the quotes")
    return value


def _number(rule: str, field: CanonicalField, value: Value) -> Decimal:
    """A number such as a field can hold: any other would be a mistake, and some are too large to be compared."""
    is_short = not isinstance(value, Decimal) or abs(value.adjusted()) <= _LONGEST  # else its text has no end
    text = format(value, "f") if isinstance(value, Decimal) and is_short else str(value)
    if re.fullmatch(DECIMAL, text) is None:
        raise _bad(rule, f"{field.name} is compared with {text[:SHOWN]}, which is no number it can be", None)
    return Decimal(text)


def _bad(rule: str, said: str, hint: str | None) -> BadConfig:
    return BadConfig("PRICING_RULE", f"rule {rule!r}: {said}", hint=hint)


def _document(feed: FeedSection, rules: Sequence[PricingRule]) -> Mapping[str, Any]:
    """Numbers are texts in it: canonical JSON has none that are not whole, nor large ones."""
    names = list(feed.fields)
    return {
        "fields": feed.model_dump(mode="json", include={"fields"})["fields"],
        "cost": feed.cost.model_dump(mode="json") if feed.cost else None,
        "pricing": {
            "decimals": feed.pricing.decimals,
            "rules": [
                {
                    "name": rule.name,
                    "when": {names[condition.field]: _as_data(condition) for condition in rule.conditions},
                    "markup_percent": str(section.markup_percent),
                    "add": str(section.add),
                }
                for rule, section in zip(rules, feed.pricing.rules, strict=True)
            ],
        },
    }


def _as_data(condition: FieldCondition) -> Mapping[str, Any]:
    if condition.any_of is not None:
        return {"any_of": [value if isinstance(value, bool) else str(value) for value in in_order(condition.any_of)]}
    ends = {"from": condition.lower, "below": condition.upper}
    return {name: str(end) for name, end in ends.items() if end is not None}


def in_order(values: Iterable[Any]) -> list[Any]:
    """The values of a condition, all of one type, in an order that is always the same."""
    return sorted(values)
