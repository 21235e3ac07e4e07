"""Mappings: values of texts, the choice of the pricing rule, and reasons of rejects."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.harvest.config import FeedSection
from penstock.harvest.feed.mapping import FeedMapping, MappedRecord, MappingProblem
from penstock.kernel.errors import BadConfig
from tests.support.soak import examples

FIELDS: dict[str, Any] = {
    "shape": {"path": "a.shape"},
    "carat": {"path": "a.carat", "type": "decimal"},
    "stock": {"path": "stock", "type": "integer"},
    "grown": {"path": "grown", "type": "boolean"},
}


def make_mapping(rules: list[dict[str, Any]] = [], *, decimals: int = 2, **fields: Any) -> FeedMapping:  # noqa: B006 - only read
    feed: dict[str, Any] = {
        "source": {"kind": "rest", "url": "http://source.test"},
        "key": "id",
        "fields": fields or FIELDS,
        "cost": {"path": "price", "decimals": 2},
        "pricing": {"rules": rules, "decimals": decimals},
    }
    return FeedMapping.from_feed(FeedSection.model_validate(feed))


def mapped(mapping: FeedMapping, *texts: str | None) -> MappedRecord:
    record = mapping.map(texts)
    assert isinstance(record, MappedRecord), record
    return record


def test_values_are_parsed_by_type() -> None:
    """H7: text, whole numbers, decimals with all their digits, and booleans; a missing value is null."""
    record = mapped(make_mapping(), "ROUND", "1.50", "-7", "false", "12345")
    assert record.fields == {"shape": "ROUND", "carat": Decimal("1.50"), "stock": -7, "grown": False}
    assert str(record.fields["carat"]) == "1.50"
    assert record.cost == Decimal("123.45")
    assert set(mapped(make_mapping(), None, None, None, None, None).fields.values()) == {None}


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
def test_value_of_another_type_is_rejected(texts: tuple[str | None, ...], reason: str) -> None:
    """H7: the reason of a reject has the name and the value of the field, cut if it is long."""
    assert make_mapping().map(texts) == MappingProblem(reason)


def test_missing_required_value_is_rejected() -> None:
    """H7: null counts as missing, which is a problem if the value is required."""
    mapping = make_mapping(carat={"path": "carat", "type": "decimal", "required": True})
    assert mapping.map([None, "1"]) == MappingProblem("carat: is missing")
    assert mapped(mapping, "0", "1").fields == {"carat": 0}


def test_first_matching_rule_makes_the_price() -> None:
    """H7: the first rule whose conditions are all true makes the price; without such a rule there is no price."""
    mapping = make_mapping(
        [
            {"name": "fine", "when": {"shape": {"any_of": ["ROUND", "OVAL"]}, "carat": {"from": 1, "below": 2}}},
            {"name": "few", "when": {"stock": {"any_of": [1, "2"]}}, "markup_percent": 50},
            {"name": "grown", "when": {"grown": {"any_of": [True]}}, "add": "-1"},
        ]
    )
    assert mapped(mapping, "OVAL", "1", "1", None, "1000").rule == "fine"
    assert mapped(mapping, "OVAL", "2", "1", None, "1000").rule == "few"
    assert mapped(mapping, "OVAL", "1.99", "2", None, "1000").price == Decimal("10.00")
    assert mapped(mapping, "oval", "1.5", "2", "true", "1000").price == Decimal("15.00")
    assert mapped(mapping, None, None, None, "true", "1000").price == Decimal("9.00")
    assert mapped(mapping, None, None, None, "false", "1000") == MappedRecord(
        {"shape": None, "carat": None, "stock": None, "grown": False}, Decimal(10), None, None
    )
    assert mapped(mapping, "OVAL", "1", "1", None, None).rule is None, "a record without a cost has no price"


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
    mapping = make_mapping([{"name": "all", "markup_percent": percent, "add": add}])
    assert str(mapped(mapping, None, None, None, None, cost).price) == price


@pytest.mark.soak
@settings(max_examples=examples(300, soak=10_000))
@given(
    st.decimals(-(10**15), 10**15, places=6),
    st.decimals(-100, 100_000, places=6),
    st.decimals(-1000, 1000, places=6),
    st.integers(0, 6),
)
def test_prices_are_exact(cost: Decimal, percent: Decimal, add: Decimal, decimals: int) -> None:
    """H7: a price differs from the exact one by at most half of its last digit; halves are rounded away from zero."""
    mapping = make_mapping([{"name": "all", "markup_percent": percent, "add": add}], decimals=decimals)
    price = mapped(mapping, None, None, None, None, format(cost, "f")).price
    assert price is not None
    exact = Fraction(cost) / 100 * (100 + Fraction(percent)) / 100 + Fraction(add)
    assert abs(Fraction(price)) == Fraction(int(abs(exact) * 10**decimals + Fraction(1, 2)), 10**decimals)
    assert price == 0 or (price > 0) == (exact > 0)
    assert price.as_tuple().exponent == -decimals


@pytest.mark.parametrize(
    ("when", "problem"),
    [
        ({"shape": {"from": 1}}, "the field shape is of the type text, which has no order"),
        ({"grown": {"below": 1}}, "the field grown is of the type boolean, which has no order"),
        ({"shape": {"any_of": ["NO", False]}}, "the field shape is of the type text, but any_of has False"),
        ({"grown": {"any_of": ["true"]}}, "the field grown is of the type boolean, but any_of has 'true'"),
        ({"carat": {"any_of": ["much"]}}, "the field carat is compared with much"),
        ({"carat": {"any_of": [True]}}, "the field carat is compared with True"),
        ({"carat": {"from": "1E+999999999"}}, "the field carat is compared with 1E+999999999"),
        ({"carat": {"below": "1E-999999999"}}, "the field carat is compared with 1E-999999999"),
    ],
)
def test_invalid_comparison_in_a_rule_is_an_error(when: dict[str, Any], problem: str) -> None:
    """H7: an invalid rule is reported with its name, before any record is priced."""
    with pytest.raises(BadConfig, match="rule 'odd'") as error:
        make_mapping([{"name": "odd", "when": when}])
    assert problem in error.value.message


def test_digest_changes_with_the_records() -> None:
    """H7: the digest depends on fields, cost and rules, but not on the order of fields or values."""
    rule = {"name": "all", "when": {"stock": {"any_of": [2**60, 1]}}, "markup_percent": 20}
    mapping = make_mapping([rule])
    same = make_mapping([{**rule, "when": {"stock": {"any_of": [1, 2**60, 1]}}}], **dict(reversed(FIELDS.items())))
    assert (same.digest, same.pricing_digest) == (mapping.digest, mapping.pricing_digest)
    other_rule, other_fields = (
        make_mapping([{**rule, "markup_percent": 21}]),
        make_mapping([rule], **{**FIELDS, "lab": FIELDS["shape"]}),
    )
    assert len({mapping.digest, other_rule.digest, other_fields.digest}) == 3
    assert other_fields.pricing_digest == mapping.pricing_digest != other_rule.pricing_digest
    assert mapping.make_pricing_document()["rules"][0]["when"] == {"stock": {"any_of": ["1", str(2**60)]}}
