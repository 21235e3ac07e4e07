"""Conditions and references: what they give, and that there is no way out of them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.definition.expression_eval import EvaluationContext
from penstock.flows.definition.templates import fill, has_references, references, uses_item
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
    """F14: a reference alone gives its value as it is, one within a text its text; `$${` is an escape."""
    assert fill(template, CONTEXT) == filled


def test_what_was_filled_in_is_not_looked_at_again() -> None:
    """F14: data that looks like a reference stays data."""
    assert (
        fill("${scope.a}", EvaluationContext("r", {"a": "${scope.secret}", "secret": "s"}, {}, {})) == "${scope.secret}"
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
def test_a_reference_to_nothing_is_named(template: str, name: str) -> None:
    """F14: inputs are never made of what is not there."""
    with pytest.raises(Invalid) as caught:
        fill({"deep": [template]}, CONTEXT)
    assert (caught.value.code, caught.value.message) == ("REFERENCE_UNRESOLVED", f"there is no {name}")


def test_an_item_is_there_only_within_a_map() -> None:
    """F14: elsewhere it is as missing as any other name."""
    outside = EvaluationContext("r", {}, {}, {})
    for template in ("${item}", "${index}"):
        assert uses_item([template])
        with pytest.raises(Invalid, match="there is no"):
            fill(template, outside)
    assert fill("${item or 1}", EvaluationContext("r", {}, {}, {}, item=None)) == 1


@pytest.mark.parametrize("template", ["${", "a ${scope.n", "${}", "${{}}", "${scope.n + }", '${"}', "${ {} }"])
def test_a_template_that_is_none_is_told(template: str) -> None:
    """F2: at the latest when its flow is checked."""
    with pytest.raises(Invalid) as caught:
        references({"a": template})
    assert caught.value.code == "BAD_EXPRESSION"


def test_references_are_found_wherever_they_are() -> None:
    """F2: in lists and maps of any depth; an escape alone is filled too, but refers to nothing."""
    template = {"a": [{"b": "x ${steps.one.outputs.x} ${steps['t-w'].status}"}], "c": "$${steps.no.outputs.x}"}
    assert references(template) == {"one", "t-w"}
    assert has_references(template)
    assert has_references(["$${x}"])
    assert has_references("${scope.a}")
    assert not has_references({"a": ["$", "{", "$x", 1, None], "${scope.a}": 1})


def test_what_is_filled_in_has_an_end() -> None:
    """F14: a thousand references to one large thing do not make a document without end."""
    context = EvaluationContext("r", {"big": ["x" * 100] * 1_000}, {}, {})
    assert len(fill("${scope.big}", context)) == 1_000
    with pytest.raises(Invalid, match="more than") as caught:
        fill(["${scope.big}"] * 1_000, context)
    assert caught.value.code == "BAD_EXPRESSION"


WORDS = r"""scope steps run item index len true null and or not in is if else lambda for . .outputs .status .id .n .list
.__class__ [ ] ( ) { } , : := 0 1 -1 2.5 1e308 9999999999 'a' "b" '}' + - * / % ** // < > == != ${ $${ } # \
steps.fetch.outputs.rows scope.list scope.map[ scope.n x 1if @ ~ f'{ b' j"""
TOKENS = st.sampled_from([*WORDS.split(), "\n", "\t", " "])


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(150, soak=20_000))
@given(st.one_of(st.lists(TOKENS, max_size=25).map(" ".join), st.lists(TOKENS, max_size=25).map("".join), st.text()))
def test_no_text_makes_anything_but_an_answer_or_invalid(text: str) -> None:
    """F8: whatever is written, it is answered or refused, as a condition and as a template."""
    for work in (lambda: holds(text), lambda: fill([text, f"${{{text}}}"], CONTEXT), lambda: references(text)):
        try:
            work()
        except Invalid as error:
            assert error.code in {"BAD_EXPRESSION", "REFERENCE_UNRESOLVED"}  # noqa: PT017
