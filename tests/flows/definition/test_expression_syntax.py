"""The syntax of conditions: references, and invalid expressions."""

import pytest

from penstock.flows.definition.templates import parse_condition
from penstock.kernel.errors import Invalid


def parse_error(text: str) -> Invalid:
    """Parse an invalid condition, and return the error."""
    with pytest.raises(Invalid) as caught:
        parse_condition(text)
    return caught.value


def test_references_of_a_condition() -> None:
    """F2: all notations of references are found, so that validation can check them."""
    text = 'steps.a.outputs.x > 1 and (steps["b-c"].status == "X" or len(steps["d"]["outputs"]) > scope.steps)'
    assert parse_condition(text).references == {"a", "b-c", "d"}
    assert not parse_condition("scope.steps and scope['steps.a.outputs']").references
    assert parse_condition("item > 1").uses_item
    assert not parse_condition("scope.item").uses_item


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
def test_other_syntax_is_refused(text: str) -> None:
    """F8: calls, attributes of Python objects, comprehensions and powers are refused during validation."""
    error = parse_error(text)
    assert error.code == "BAD_EXPRESSION"
    assert error.hint


def test_hints_show_the_correct_syntax() -> None:
    """F15: the errors of frequent mistakes have a hint with the correct syntax."""
    assert 'steps["fetch-eu"]' in str(parse_error("steps.fetch-eu.outputs.rows").hint)
    assert "steps.a.outputs.rows" in str(parse_error("steps.a.rows").hint)
    assert 'scope["from"]' in str(parse_error("scope.from == 1").hint)
    assert "remove ${" in str(parse_error("${scope.n} > 1").hint)
