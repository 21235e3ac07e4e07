"""Templates: filling of references, errors and limits."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.definition.expression_eval import EvaluationContext
from penstock.flows.definition.templates import fill_template, find_references, has_references, uses_item
from penstock.kernel.errors import Invalid
from tests.flows.definition.expressions import CONTEXT, holds
from tests.support.soak import examples


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("${steps.fetch.outputs.rows}", 5),
        ("${scope.list}", [1, 2, {"k": "v"}]),
        ("${scope.nothing}", None),
        ("${ scope.n + 1 }", 4),
        ("rows: ${steps.fetch.outputs.rows}/${scope.n}", "rows: 5/3"),
        ("${scope.on} ${scope.nothing} ${scope.list} ${scope.half}", 'true null [1,2,{"k":"v"}] 0.5'),
        ("${item.symbol}-${index}", "BTC-4"),
        ("$${scope.n}", "${scope.n}"),
        ("$${scope.n} is ${scope.n}", "${scope.n} is 3"),
        ("$ {scope.n} $5 {} }", "$ {scope.n} $5 {} }"),
        ('${scope["}"] or "}"}', "}"),
        ("${scope.gone or null}", None),
        ("${scope.gone or steps.lost.outputs.x or 7}", 7),
        ({"a": ["${scope.n}", {"${scope.n}": "x"}], "b": 1}, {"a": [3, {"${scope.n}": "x"}], "b": 1}),
        ("", ""),
        (None, None),
    ],
)
def test_templates_are_filled(template: Any, filled: Any) -> None:
    """F14: a single reference gives its value, a reference within a text its text; `$${` is an escape."""
    assert fill_template(template, CONTEXT) == filled


def test_inserted_values_are_not_filled_again() -> None:
    """F14: data with the syntax of a reference stays data."""
    assert (
        fill_template("${scope.a}", EvaluationContext("r", {"a": "${scope.secret}", "secret": "s"}, {}, {}))
        == "${scope.secret}"
    )


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("${steps.lost.outputs.rows}", "steps.lost.outputs.rows"),
        ("x ${scope.gone.further}", "scope.gone"),
        ("${scope.list[7]}", "scope.list[7]"),
        ("${scope.gone + 1}", "scope.gone"),
        ("${scope.gone and 1}", "scope.gone"),
        ("${null or scope.gone}", "scope.gone"),
        ("${len(scope.gone)}", "scope.gone"),
        ("${[scope.gone]}", "scope.gone"),
    ],
)
def test_error_names_the_missing_value(template: str, name: str) -> None:
    """F14: a missing value in inputs raises REFERENCE_UNRESOLVED with its name."""
    with pytest.raises(Invalid) as caught:
        fill_template({"deep": [template]}, CONTEXT)
    assert (caught.value.code, caught.value.message) == ("REFERENCE_UNRESOLVED", f"{name} does not exist")


def test_item_exists_only_in_a_map() -> None:
    """F14: outside of a map, `item` and `index` are missing values."""
    outside = EvaluationContext("r", {}, {}, {})
    for template in ("${item}", "${index}"):
        assert uses_item([template])
        with pytest.raises(Invalid, match="does not exist"):
            fill_template(template, outside)
    assert fill_template("${item or 1}", EvaluationContext("r", {}, {}, {}, item=None)) == 1


@pytest.mark.parametrize("template", ["${", "a ${scope.n", "${}", "${{}}", "${scope.n + }", '${"}', "${ {} }"])
def test_invalid_template(template: str) -> None:
    """F2: an invalid template raises BAD_EXPRESSION during validation."""
    with pytest.raises(Invalid) as caught:
        find_references({"a": template})
    assert caught.value.code == "BAD_EXPRESSION"


def test_references_are_found_at_any_depth() -> None:
    """F2: references are found in lists and maps of any depth; an escape is filled, and is no reference."""
    template = {"a": [{"b": "x ${steps.one.outputs.x} ${steps['t-w'].status}"}], "c": "$${steps.no.outputs.x}"}
    assert find_references(template) == {"one", "t-w"}
    assert has_references(template)
    assert has_references(["$${x}"])
    assert has_references("${scope.a}")
    assert not has_references({"a": ["$", "{", "$x", 1, None], "${scope.a}": 1})


def test_size_of_filled_inputs_is_limited() -> None:
    """F14: many references to a large value raise Invalid."""
    context = EvaluationContext("r", {"big": ["x" * 100] * 1_000}, {}, {})
    assert len(fill_template("${scope.big}", context)) == 1_000
    with pytest.raises(Invalid, match="more than") as caught:
        fill_template(["${scope.big}"] * 1_000, context)
    assert caught.value.code == "BAD_EXPRESSION"


WORDS = r"""scope steps run item index len true null and or not in is if else lambda for . .outputs .status .id .n .list
.__class__ [ ] ( ) { } , : := 0 1 -1 2.5 1e308 9999999999 'a' "b" '}' + - * / % ** // < > == != ${ $${ } # \
steps.fetch.outputs.rows scope.list scope.map[ scope.n x 1if @ ~ f'{ b' j"""
TOKENS = st.sampled_from([*WORDS.split(), "\n", "\t", " "])


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(150, soak=20_000))
@given(st.one_of(st.lists(TOKENS, max_size=25).map(" ".join), st.lists(TOKENS, max_size=25).map("".join), st.text()))
def test_any_text_gives_a_value_or_invalid(text: str) -> None:
    """F8: any text, as a condition or a template, gives a value or raises Invalid."""
    for work in (
        lambda: holds(text),
        lambda: fill_template([text, f"${{{text}}}"], CONTEXT),
        lambda: find_references(text),
    ):
        try:
            work()
        except Invalid as error:
            assert error.code in {"BAD_EXPRESSION", "REFERENCE_UNRESOLVED"}  # noqa: PT017
