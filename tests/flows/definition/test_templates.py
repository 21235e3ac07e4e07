"""Conditions and references: what they give, and that there is no way out of them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.definition.expression_eval import Context
from penstock.flows.definition.templates import condition, fill, has_references, references, uses_item
from penstock.kernel.errors import Invalid
from tests.support.soak import examples

SCOPE = {
    "mode": "full",
    "n": 3,
    "zero": 0,
    "half": 0.5,
    "on": True,
    "nothing": None,
    "list": [1, 2, {"k": "v"}],
    "map": {"items": "own", "a b": 1, "from": 2},
    "empty": [],
}
CONTEXT = Context(
    "run-1",
    SCOPE,
    {"fetch": {"rows": 5, "keys": ["a"]}, "fetch-eu": {"rows": 7}, "lost": {}},
    {"fetch": "SUCCEEDED", "lost": "SKIPPED"},
    item={"symbol": "BTC"},
    index=4,
)


def holds(text: str, context: Context = CONTEXT) -> bool:
    return condition(text).holds(context)


def refused(text: str) -> Invalid:
    with pytest.raises(Invalid) as caught:
        condition(text)
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        "steps.fetch.outputs.rows > 3",
        'steps["fetch-eu"].outputs.rows == 7',
        'steps.fetch.status == "SUCCEEDED" and steps.lost.status == "SKIPPED"',
        'run.id == "run-1" and run["id"] == "run-1"',
        "item.symbol == 'BTC' and index == 4",
        'scope.mode in ["full", "delta"] and scope.mode not in ("x", "y")',
        '"k" in scope.list[2] and "ul" in scope.mode and 2 in scope.list',
        "0 < scope.n <= 3 < 4",
        "len(scope.list) == 3 and len(scope.mode) == 4 and len(scope.map) == 3",
        "scope.n + 1 == 4 and scope.n - 1 == 2 and scope.n * 2 == 6 and scope.n / 2 == 1.5 and scope.n % 2 == 1",
        '-scope.n == -3 and +scope.n == 3 and "a" + "b" == "ab" and [1] + [2] == [1, 2]',
        'scope.list[-1].k == "v" and scope.map["a b"] == 1 and scope.map["from"] == 2',
        'scope.map.items == "own"',  # a name in the data, never one of Python's
        "scope.list[scope.n - 3] == 1",
        "true and not false and null == None and True",
        "scope.n == 3.0 and scope.half < 1",
        "(scope.zero or\n  scope.n) == 3",
    ],
)
def test_what_is_so_holds(text: str) -> None:
    """F8: outputs, states and scope can be asked for, compared and reckoned with."""
    assert holds(text)


@pytest.mark.parametrize(
    "text",
    [
        "scope.gone",
        "scope.gone.further[3].more",
        "steps.fetch.outputs.gone",
        "steps.never.outputs.rows > 0",
        "steps.lost.outputs.rows > 0",
        "scope.gone > 1 or scope.gone < 1 or scope.gone >= null or null <= null",
        'scope.mode > 1 or 1 < scope.mode or scope.list < scope.list or scope.on < 2 or "1" == 1',
        "scope.gone + 1 > 0 or scope.nothing * 2 > 0 or -scope.gone > 0",
        "scope.on == 1 or scope.zero == false or scope.zero == null",
        "1 in scope.mode or 1 in scope.map or [1] in scope.map or 1 in null or 1 in 5",
        "scope.list[9] or scope.list[true] or scope.list.k or scope.mode[0]",
        "len(scope.gone) > 0",
        "scope.empty or scope.zero or '' or null",
    ],
)
def test_what_is_missing_is_null_and_compares_to_nothing(text: str) -> None:
    """F8: no name that is not there, and no two things of unlike types, make a condition an error."""
    assert not holds(text)


def test_a_condition_names_the_steps_it_refers_to() -> None:
    """F2: in whatever way they are written, so that they can be checked to come before."""
    text = 'steps.a.outputs.x > 1 and (steps["b-c"].status == "X" or len(steps["d"]["outputs"]) > scope.steps)'
    assert condition(text).references == {"a", "b-c", "d"}
    assert not condition("scope.steps and scope['steps.a.outputs']").references
    assert condition("item > 1").uses_item
    assert not condition("scope.item").uses_item


@pytest.mark.parametrize(
    "text",
    [
        '__import__("os").system("true")',
        "().__class__.__bases__[0].__subclasses__()",
        "scope.__class__",
        "scope.mode.upper()",
        "scope.mode.__len__()",
        'scope["get"]("x")',
        "len.__self__",
        "len(len)",
        "len",
        "len()",
        "len(scope, scope)",
        "len(*scope)",
        "len(obj=scope)",
        "(lambda: 1)()",
        "[x for x in scope.list]",
        "{x: 1 for x in scope.list}",
        "f'{scope}'",
        "(x := 1)",
        "9**9**9",
        "1 << 99",
        "~1",
        "1 // 2",
        "scope @ scope",
        "scope is scope",
        "1 if scope else 2",
        "scope.list[0:1]",
        "{'a': 1}",
        "{1}",
        "b'a'",
        "1j",
        "...",
        "1e999",
        "99999999999999999999",
        "eval",
        "open('x')",
        "print",
        "await scope",
        "yield",
        "scope; scope",
        "import os",
        "x = 1",
        "*scope",
        "'\\x00'",
        "'\\ud800'",
        "steps",
        "steps.a",
        "steps.a.inputs",
        "steps.fetch-eu.outputs.rows",
        "steps[scope.mode].outputs",
        "steps[0].outputs",
        "len(steps)",
        "steps == steps",
        "run",
        "run.scope",
        "scope.from",
        "${scope.n}",
        "scope.n # and the rest",
        "scope.n) or (scope.n",
        "",
        "   ",
        "(",
        "\0",
        "\ud800",
        "(" * 500 + "1" + ")" * 500,
        "-" * 1_999 + "1",
        "not " * 400 + "1",
        "1" + "+1" * 900,
        "scope" + "[0]" * 600,
        "1" * 2_001,
    ],
)
def test_nothing_but_the_language_is_understood(text: str) -> None:
    """F8: no calls, no attributes of Python objects, no comprehensions, no powers: told before anything is run."""
    error = refused(text)
    assert error.code == "BAD_EXPRESSION"
    assert error.hint


@pytest.mark.parametrize(
    "text",
    [
        "scope.n / scope.zero",
        "scope.n % 0",
        '"a" * 1000000000',
        "[1] * 1000000000",
        '"%s" % scope.mode',
        'scope.mode + 1 == "full1"',
        "scope.on + 1",
        "scope.map + scope.map",
        "-scope.mode",
        "len(5)",
        "9223372036854775807 * 9223372036854775807",
        "1e308 * 10",
        "scope.huge + 1",
        "scope.long + scope.long",
    ],
)
def test_what_cannot_be_worked_out_is_told(text: str) -> None:
    """F8: unlike things that do not go together, and results without end, are Invalid when they are met."""
    context = Context("r", {**SCOPE, "huge": 10**5_000, "long": "x" * 200_000}, {}, {})
    with pytest.raises(Invalid, match=r".") as caught:
        holds(text, context)
    assert caught.value.code == "BAD_EXPRESSION"


def test_data_nested_without_end_is_told() -> None:
    """F8: comparing what is nested too deep is an error like others."""
    context = Context("r", {"a": _nested(100_000), "b": _nested(100_000)}, {}, {})
    with pytest.raises(Invalid, match="nested"):
        holds("scope.a == scope.b", context)


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def test_hints_show_how_it_is_written() -> None:
    """F15: the mistakes people make are told with their remedy."""
    assert 'steps["fetch-eu"]' in str(refused("steps.fetch-eu.outputs.rows").hint)
    assert "steps.a.outputs.rows" in str(refused("steps.a.rows").hint)
    assert 'scope["from"]' in str(refused("scope.from == 1").hint)
    assert "leave out" in str(refused("${scope.n} > 1").hint)


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
    assert fill("${scope.a}", Context("r", {"a": "${scope.secret}", "secret": "s"}, {}, {})) == "${scope.secret}"


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
    assert (caught.value.code, caught.value.message) == ("UNRESOLVED", f"there is no {name}")


def test_an_item_is_there_only_within_a_map() -> None:
    """F14: elsewhere it is as missing as any other name."""
    outside = Context("r", {}, {}, {})
    for template in ("${item}", "${index}"):
        assert uses_item([template])
        with pytest.raises(Invalid, match="there is no"):
            fill(template, outside)
    assert fill("${item or 1}", Context("r", {}, {}, {}, item=None)) == 1


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
    context = Context("r", {"big": ["x" * 100] * 1_000}, {}, {})
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
            assert error.code in {"BAD_EXPRESSION", "UNRESOLVED"}  # noqa: PT017


NUMBERS = st.integers(-9, 9).map(str)
SUMS = st.recursive(
    NUMBERS,
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "%", "/"]), inner),
    max_leaves=8,
)
CLAIMS = st.recursive(
    st.builds("({} {} {})".format, SUMS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), SUMS),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner), inner.map("(not {})".format)
    ),
    max_leaves=6,
)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(100, soak=10_000))
@given(CLAIMS)
def test_numbers_are_reckoned_with_as_everywhere(text: str) -> None:
    """F8: where Python has an answer it is the same; where it divides by zero, ours says so."""
    try:
        expected = bool(eval(text))
    except ZeroDivisionError:
        with pytest.raises(Invalid, match="zero"):
            holds(text)
    else:
        assert holds(text) is expected
