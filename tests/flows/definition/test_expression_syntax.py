"""What a condition may be made of: which names it refers to, and what is not understood."""

import pytest

from penstock.flows.definition.templates import condition
from penstock.kernel.errors import Invalid


def refused(text: str) -> Invalid:
    with pytest.raises(Invalid) as caught:
        condition(text)
    return caught.value


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


def test_hints_show_how_it_is_written() -> None:
    """F15: the mistakes people make are told with their remedy."""
    assert 'steps["fetch-eu"]' in str(refused("steps.fetch-eu.outputs.rows").hint)
    assert "steps.a.outputs.rows" in str(refused("steps.a.rows").hint)
    assert 'scope["from"]' in str(refused("scope.from == 1").hint)
    assert "leave out" in str(refused("${scope.n} > 1").hint)
