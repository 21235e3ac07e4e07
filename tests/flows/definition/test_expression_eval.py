"""Evaluation of conditions over outputs, statuses and scope."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.definition.expression_eval import EvaluationContext
from penstock.kernel.errors import Invalid
from tests.flows.definition.expressions import SCOPE, holds
from tests.support.soak import examples


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
        'scope.map.items == "own"',  # a name in the data, not a method of Python
        "scope.list[scope.n - 3] == 1",
        "true and not false and null == None and True",
        "scope.n == 3.0 and scope.half < 1",
        "(scope.zero or\n  scope.n) == 3",
    ],
)
def test_true_conditions(text: str) -> None:
    """F8: conditions read, compare and calculate with outputs, statuses and scope."""
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
def test_missing_values_are_null(text: str) -> None:
    """F8: a missing name, and a comparison of different types, make a condition false and are no errors."""
    assert not holds(text)


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
def test_evaluation_errors(text: str) -> None:
    """F8: operations on unsuitable types, and results over the size limit, raise Invalid."""
    context = EvaluationContext("r", {**SCOPE, "huge": 10**5_000, "long": "x" * 200_000}, {}, {})
    with pytest.raises(Invalid, match=r".") as caught:
        holds(text, context)
    assert caught.value.code == "BAD_EXPRESSION"


def test_deeply_nested_data() -> None:
    """F8: a comparison of data that is nested too deeply raises Invalid."""
    context = EvaluationContext("r", {"a": _nested(100_000), "b": _nested(100_000)}, {}, {})
    with pytest.raises(Invalid, match="nested"):
        holds("scope.a == scope.b", context)


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


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
def test_arithmetic_equals_python(text: str) -> None:
    """F8: arithmetic has the results of Python; a division by zero raises Invalid."""
    try:
        expected = bool(eval(text))
    except ZeroDivisionError:
        with pytest.raises(Invalid, match="zero"):
            holds(text)
    else:
        assert holds(text) is expected
