"""Recipes: what a text stands for, which rule makes a price, and what is told of what cannot be."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.harvest.config import FeedSection
from penstock.harvest.feed.recipe import FeedMapping, MappedRecord, MappingProblem
from penstock.kernel.errors import BadConfig
from tests.support.soak import examples

FIELDS: dict[str, Any] = {
    "shape": {"path": "a.shape"},
    "carat": {"path": "a.carat", "type": "decimal"},
    "stock": {"path": "stock", "type": "integer"},
    "grown": {"path": "grown", "type": "boolean"},
}


def recipe(rules: list[dict[str, Any]] = [], *, decimals: int = 2, **fields: Any) -> FeedMapping:  # noqa: B006 - only read
    feed: dict[str, Any] = {
        "source": {"kind": "rest", "url": "http://source.test"},
        "key": "id",
        "fields": fields or FIELDS,
        "cost": {"path": "price", "decimals": 2},
        "pricing": {"rules": rules, "decimals": decimals},
    }
    return FeedMapping.of(FeedSection.model_validate(feed))


def mapped(made: FeedMapping, *texts: str | None) -> MappedRecord:
    found = made.map(texts)
    assert isinstance(found, MappedRecord), found
    return found


def test_a_record_is_read_by_type() -> None:
    """H7: texts, whole numbers, decimals with all their digits, booleans; what is missing is null."""
    found = mapped(recipe(), "ROUND", "1.50", "-7", "false", "12345")
    assert found.fields == {"shape": "ROUND", "carat": Decimal("1.50"), "stock": -7, "grown": False}
    assert str(found.fields["carat"]) == "1.50"
    assert found.cost == Decimal("123.45")
    assert set(mapped(recipe(), None, None, None, None, None).fields.values()) == {None}


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (("x", "abc", None, None, None), "carat: 'abc' is not a decimal"),
        (("x", "1e5", None, None, None), "carat: '1e5' is not a decimal"),
        (("x", "١", None, None, None), "carat: '١' is not a decimal"),
        (("x", "1\n", None, None, None), "carat: '1\n' is not a decimal"),
        (("x", "", None, None, None), "carat: '' is not a decimal"),
        (("x", "9" * 31, None, None, None), f"carat: '{'9' * 31}' is not a decimal"),
        (("x", None, "1.0", None, None), "stock: '1.0' is not an integer"),
        (("x", None, "1" * 19, None, None), f"stock: '{'1' * 19}' is not an integer"),
        (("x", None, None, "yes", None), "grown: 'yes' is not a boolean"),
        (("x", None, None, None, "12,5"), "cost: '12,5' is not a decimal"),
        (("x", "y" * 1000, None, None, None), f"carat: '{'y' * 100}' is not a decimal"),
    ],
)
def test_what_is_not_of_its_type_is_told(texts: tuple[str | None, ...], reason: str) -> None:
    """H7: a record that cannot be mapped is rejected with the field and what it held, cut when long."""
    assert recipe().map(texts) == MappingProblem(reason)


def test_what_is_required_must_be_there() -> None:
    """H7: null and missing are the same, and a problem where a value is required."""
    made = recipe(carat={"path": "carat", "type": "decimal", "required": True})
    assert made.map([None, "1"]) == MappingProblem("carat: is missing")
    assert mapped(made, "0", "1").fields == {"carat": 0}


def test_the_first_rule_that_fits_makes_the_price() -> None:
    """H7: rules are tried in their order, all conditions hold; where none fits there is no price."""
    made = recipe(
        [
            {"name": "fine", "when": {"shape": {"any_of": ["ROUND", "OVAL"]}, "carat": {"from": 1, "below": 2}}},
            {"name": "few", "when": {"stock": {"any_of": [1, "2"]}}, "markup_percent": 50},
            {"name": "grown", "when": {"grown": {"any_of": [True]}}, "add": "-1"},
        ]
    )
    assert mapped(made, "OVAL", "1", "1", None, "1000").rule == "fine"
    assert mapped(made, "OVAL", "2", "1", None, "1000").rule == "few"
    assert mapped(made, "OVAL", "1.99", "2", None, "1000").price == Decimal("10.00")
    assert mapped(made, "oval", "1.5", "2", "true", "1000").price == Decimal("15.00")
    assert mapped(made, None, None, None, "true", "1000").price == Decimal("9.00")
    assert mapped(made, None, None, None, "false", "1000") == MappedRecord(
        {"shape": None, "carat": None, "stock": None, "grown": False}, Decimal(10), None, None
    )
    assert mapped(made, "OVAL", "1", "1", None, None).rule is None, "without a cost there is nothing to price"


@pytest.mark.parametrize(
    ("cost", "percent", "add", "price"),
    [
        ("100", "0.5", "0", "1.01"),  # 1.005
        ("-100", "0.5", "0", "-1.01"),
        ("1000", "-100", "0.125", "0.13"),
        ("1000", "-100", "-0.125", "-0.13"),
        ("1000", "33.333333", "0", "13.33"),
        ("99999999999999999999999999999999"[:30], "0.000001", "0", "10000000099999999999999999999.99"),
    ],
)
def test_prices_are_rounded_half_away_from_zero(cost: str, percent: str, add: str, price: str) -> None:
    """H7: exact decimals, rounded once, half away from zero on both sides."""
    made = recipe([{"name": "all", "markup_percent": percent, "add": add}])
    assert str(mapped(made, None, None, None, None, cost).price) == price


@pytest.mark.soak
@settings(max_examples=examples(300, soak=10_000))
@given(
    st.decimals(-(10**15), 10**15, places=6),
    st.decimals(-100, 100_000, places=6),
    st.decimals(-1000, 1000, places=6),
    st.integers(0, 6),
)
def test_prices_are_exact(cost: Decimal, percent: Decimal, add: Decimal, decimals: int) -> None:
    """H7: no price is further from the exact one than half of its last digit, and halves go away from zero."""
    made = recipe([{"name": "all", "markup_percent": percent, "add": add}], decimals=decimals)
    price = mapped(made, None, None, None, None, format(cost, "f")).price
    assert price is not None
    exact = Fraction(cost) / 100 * (100 + Fraction(percent)) / 100 + Fraction(add)
    assert abs(Fraction(price)) == Fraction(int(abs(exact) * 10**decimals + Fraction(1, 2)), 10**decimals)
    assert price == 0 or (price > 0) == (exact > 0)
    assert price.as_tuple().exponent == -decimals


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ({"shape": {"from": 1}}, "shape is a text: it has no `from` and `below`"),
        ({"grown": {"below": 1}}, "grown is a boolean: it has no `from` and `below`"),
        ({"shape": {"any_of": ["NO", False]}}, "shape is a text, it is never False"),
        ({"grown": {"any_of": ["true"]}}, "grown is a boolean, it is never 'true'"),
        ({"carat": {"any_of": ["much"]}}, "carat is compared with much"),
        ({"carat": {"any_of": [True]}}, "carat is compared with True"),
        ({"carat": {"from": "1E+999999999"}}, "carat is compared with 1E+999999999"),
        ({"carat": {"below": "1E-999999999"}}, "carat is compared with 1E-999999999"),
    ],
)
def test_a_rule_that_compares_what_cannot_be_is_refused(when: dict[str, Any], said: str) -> None:
    """H7: a mistake in a rule is told before anything is priced with it, and which rule it is."""
    with pytest.raises(BadConfig, match="rule 'odd'") as refused:
        recipe([{"name": "odd", "when": when}])
    assert said in refused.value.message


def test_the_digest_tells_what_changes_records() -> None:
    """H7: fields, cost and rules are in it, the order of fields or values is not; the rules have one of their own."""
    rule = {"name": "all", "when": {"stock": {"any_of": [2**60, 1]}}, "markup_percent": 20}
    made = recipe([rule])
    same = recipe([{**rule, "when": {"stock": {"any_of": [1, 2**60, 1]}}}], **dict(reversed(FIELDS.items())))
    assert (same.digest, same.pricing_digest) == (made.digest, made.pricing_digest)
    other_rule, other_fields = (
        recipe([{**rule, "markup_percent": 21}]),
        recipe([rule], **{**FIELDS, "lab": FIELDS["shape"]}),
    )
    assert len({made.digest, other_rule.digest, other_fields.digest}) == 3
    assert other_fields.pricing_digest == made.pricing_digest != other_rule.pricing_digest
    assert made.pricing_document()["rules"][0]["when"] == {"stock": {"any_of": ["1", str(2**60)]}}
