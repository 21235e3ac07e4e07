"""F8, F14: evaluation of expressions: lookups, comparisons and arithmetic over JSON, with limits on size."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from operator import add, ge, gt, le, lt, mod, mul, sub, truediv
from typing import Any, Final

from penstock.flows.definition.expression_syntax import (
    CONSTANTS,
    LARGEST,
    ParsedExpression,
    find_static_key,
    make_expression_error,
)
from penstock.kernel.errors import Invalid

SIZE_LIMIT: Final = 256_000  # characters of a text, or items of a list, that an expression creates
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
    ast.Mod: mod,
}


class MissingValue:
    """The value of a missing name; null is not missing."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = MissingValue()


@dataclass(frozen=True)
class EvaluationContext:
    """The values that expressions can read. The outputs of a skipped step are {}."""

    run_id: str
    scope: Mapping[str, Any]
    outputs: Mapping[str, Mapping[str, Any]]
    statuses: Mapping[str, str]
    item: Any = MISSING
    index: int | None = None


def evaluate(expression: ParsedExpression, context: EvaluationContext, *, is_strict: bool) -> Any:
    """Return the value of *expression*. Missing names are null; if *is_strict*, raise Invalid REFERENCE_UNRESOLVED."""
    try:
        return _Evaluation(expression.text, context).evaluate(expression.tree, is_strict)
    except RecursionError:
        raise make_expression_error(expression.text, "a compared value is nested too deeply") from None


class _Evaluation:
    def __init__(self, text: str, context: EvaluationContext) -> None:
        self._text, self._context = text, context

    def evaluate(self, node: ast.expr, is_strict: bool) -> Any:
        value = self._evaluate_node(node, is_strict)
        if value is MISSING:
            if is_strict:
                hint = "the outputs of a skipped step are missing; write `${… or null}` for a value that may be missing"
                raise Invalid("REFERENCE_UNRESOLVED", f"{ast.unparse(node)} does not exist", hint=hint)
            return None
        return value

    def _evaluate_node(self, node: ast.expr, is_strict: bool) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._read_name(node.id)
            case ast.Attribute() | ast.Subscript():
                return self._look_up(node, is_strict)
            case ast.List() | ast.Tuple():
                return [self.evaluate(inner, is_strict) for inner in node.elts]
            case ast.BoolOp():
                return self._evaluate_boolean(node, is_strict)
            case ast.Compare():
                return self._compare(node, is_strict)
            case ast.Call():
                return self._measure(self.evaluate(node.args[0], is_strict))
            case _:
                return self._compute(node, is_strict)

    def _read_name(self, name: str) -> Any:
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name == "index":
            return MISSING if self._context.index is None else self._context.index
        return self._context.scope if name == "scope" else self._context.item

    def _look_up(self, node: ast.Attribute | ast.Subscript, is_strict: bool) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == "run":
            return self._context.run_id
        if (step := _find_step_name(node.value)) is not None:
            values = self._context.outputs if find_static_key(node) == "outputs" else self._context.statuses
            return values.get(step, MISSING)
        container = self.evaluate(node.value, is_strict)
        key: Any = node.attr if isinstance(node, ast.Attribute) else self.evaluate(node.slice, is_strict)
        if isinstance(container, Mapping):
            return container.get(key, MISSING) if isinstance(key, str) else MISSING
        is_index = isinstance(key, int) and not isinstance(key, bool)
        if isinstance(container, list) and is_index and -len(container) <= key < len(container):
            return container[key]
        return MISSING

    def _evaluate_boolean(self, node: ast.BoolOp, is_strict: bool) -> Any:
        """Return the deciding operand, as Python does. An operand before an `or` may be missing."""
        is_or = isinstance(node.op, ast.Or)
        for inner in node.values[:-1]:
            value = self.evaluate(inner, is_strict and not is_or)
            if bool(value) == is_or:
                return value
        return self.evaluate(node.values[-1], is_strict)

    def _compare(self, node: ast.Compare, is_strict: bool) -> bool:
        left = self.evaluate(node.left, is_strict)
        for operator, following in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(following, is_strict)
            if not _COMPARISONS[type(operator)](left, right):
                return False
            left = right
        return True

    def _compute(self, node: ast.expr, is_strict: bool) -> Any:
        if isinstance(node, ast.UnaryOp):
            operand = self.evaluate(node.operand, is_strict)
            if isinstance(node.op, ast.Not):
                return not operand
            return self._apply(sub if isinstance(node.op, ast.USub) else add, 0, operand)
        if not isinstance(node, ast.BinOp):
            raise make_expression_error(self._text, "it cannot be evaluated")
        left, right = self.evaluate(node.left, is_strict), self.evaluate(node.right, is_strict)
        return self._apply(_ARITHMETIC[type(node.op)], left, right)

    def _apply(self, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """Apply *operation*; the result is null if an operand is null."""
        if left is None or right is None:
            return None
        if operation is add and (isinstance(left, str | list) and _name_type(left) == _name_type(right)):
            if len(left) + len(right) > SIZE_LIMIT:
                raise make_expression_error(self._text, f"its result has more than {SIZE_LIMIT:,} characters or items")
            return left + right
        if not (_is_number(left) and _is_number(right)):
            raise make_expression_error(
                self._text, f"this operation does not support {_name_type(left)} and {_name_type(right)}"
            )
        try:
            return self._check_bounds(operation(self._check_bounds(left), self._check_bounds(right)))
        except ZeroDivisionError:
            raise make_expression_error(
                self._text, "division by zero", "check first: scope.n != 0 and scope.all / scope.n > 2"
            ) from None

    def _check_bounds(self, number: int | float) -> int | float:
        if abs(number) > LARGEST if isinstance(number, int) else not isfinite(number):
            raise make_expression_error(self._text, "a number is too large")
        return number

    def _measure(self, value: Any) -> int | None:
        if value is None:
            return None
        if not isinstance(value, str | list | Mapping):
            raise make_expression_error(self._text, f"{_name_type(value)} has no length")
        return len(value)


def _find_step_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute | ast.Subscript):
        return find_static_key(node) if isinstance(node.value, ast.Name) and node.value.id == "steps" else None
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _name_type(value: Any) -> str:
    kinds = (
        (bool, "true or false"), (int | float, "a number"), (str, "a text"), (list, "a list"), (Mapping, "a map"),
    )  # fmt: skip
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _is_equal(left: Any, right: Any) -> bool:
    return _name_type(left) == _name_type(right) and bool(left == right)  # in Python, True == 1


def _make_order_check(comparison: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(left: Any, right: Any) -> bool:
        is_alike = _name_type(left) == _name_type(right) and (_is_number(left) or isinstance(left, str))
        return is_alike and comparison(left, right)

    return compare


def _contains(left: Any, right: Any) -> bool:
    if isinstance(right, str | Mapping):
        return isinstance(left, str) and left in right
    return isinstance(right, list) and any(_is_equal(left, item) for item in right)


_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: _is_equal,
    ast.NotEq: lambda left, right: not _is_equal(left, right),
    ast.Lt: _make_order_check(lt),
    ast.LtE: _make_order_check(le),
    ast.Gt: _make_order_check(gt),
    ast.GtE: _make_order_check(ge),
    ast.In: _contains,
    ast.NotIn: lambda left, right: not _contains(left, right),
}
