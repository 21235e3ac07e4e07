"""F8, F14: what an expression is worth: lookups, comparisons and sums over JSON, and no way out of it."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from operator import add, ge, gt, le, lt, mod, mul, sub, truediv
from typing import Any, Final

from penstock.flows.definition.expression_syntax import CONSTANTS, LARGEST, ParsedExpression, bad, key
from penstock.kernel.errors import Invalid

SIZE_LIMIT: Final = 256_000  # characters of a text, or members of a list, that an expression makes
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
    ast.Mod: mod,
}


class MissingValue:
    """What is not there; null counts as there."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = MissingValue()


@dataclass(frozen=True)
class EvaluationContext:
    """What expressions can ask for. A step that was skipped has no outputs: {}."""

    run_id: str
    scope: Mapping[str, Any]
    outputs: Mapping[str, Mapping[str, Any]]
    statuses: Mapping[str, str]
    item: Any = MISSING
    index: int | None = None


def worth(expression: ParsedExpression, context: EvaluationContext, *, is_strict: bool) -> Any:
    """What *expression* gives. What is missing is null, or Invalid REFERENCE_UNRESOLVED where that *is_strict*."""
    try:
        return _Evaluation(expression.text, context).worth(expression.tree, is_strict)
    except RecursionError:
        raise bad(expression.text, "what it compares is nested too deep") from None


class _Evaluation:
    def __init__(self, text: str, context: EvaluationContext) -> None:
        self._text, self._context = text, context

    def worth(self, node: ast.expr, is_strict: bool) -> Any:
        found = self._found(node, is_strict)
        if found is MISSING:
            if is_strict:
                hint = "a skipped step has no outputs; `${… or null}` stands for what may be missing"
                raise Invalid("REFERENCE_UNRESOLVED", f"there is no {ast.unparse(node)}", hint=hint)
            return None
        return found

    def _found(self, node: ast.expr, is_strict: bool) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._named(node.id)
            case ast.Attribute() | ast.Subscript():
                return self._looked_up(node, is_strict)
            case ast.List() | ast.Tuple():
                return [self.worth(inner, is_strict) for inner in node.elts]
            case ast.BoolOp():
                return self._either(node, is_strict)
            case ast.Compare():
                return self._compared(node, is_strict)
            case ast.Call():
                return self._length(self.worth(node.args[0], is_strict))
            case _:
                return self._computed(node, is_strict)

    def _named(self, name: str) -> Any:
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name == "index":
            return MISSING if self._context.index is None else self._context.index
        return self._context.scope if name == "scope" else self._context.item

    def _looked_up(self, node: ast.Attribute | ast.Subscript, is_strict: bool) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == "run":
            return self._context.run_id
        if (step := _step(node.value)) is not None:
            kept = self._context.outputs if key(node) == "outputs" else self._context.statuses
            return kept.get(step, MISSING)
        holder = self.worth(node.value, is_strict)
        wanted: Any = node.attr if isinstance(node, ast.Attribute) else self.worth(node.slice, is_strict)
        if isinstance(holder, Mapping):
            return holder.get(wanted, MISSING) if isinstance(wanted, str) else MISSING
        is_place = isinstance(wanted, int) and not isinstance(wanted, bool)
        if isinstance(holder, list) and is_place and -len(holder) <= wanted < len(holder):
            return holder[wanted]
        return MISSING

    def _either(self, node: ast.BoolOp, is_strict: bool) -> Any:
        """As in Python: the operand that decides. What stands before an `or` may be missing."""
        is_or = isinstance(node.op, ast.Or)
        for inner in node.values[:-1]:
            found = self.worth(inner, is_strict and not is_or)
            if bool(found) == is_or:
                return found
        return self.worth(node.values[-1], is_strict)

    def _compared(self, node: ast.Compare, is_strict: bool) -> bool:
        left = self.worth(node.left, is_strict)
        for operator, following in zip(node.ops, node.comparators, strict=True):
            right = self.worth(following, is_strict)
            if not _COMPARISONS[type(operator)](left, right):
                return False
            left = right
        return True

    def _computed(self, node: ast.expr, is_strict: bool) -> Any:
        if isinstance(node, ast.UnaryOp):
            operand = self.worth(node.operand, is_strict)
            if isinstance(node.op, ast.Not):
                return not operand
            return self._sum(sub if isinstance(node.op, ast.USub) else add, 0, operand)
        if not isinstance(node, ast.BinOp):
            raise bad(self._text, "cannot be worked out")
        left, right = self.worth(node.left, is_strict), self.worth(node.right, is_strict)
        return self._sum(_ARITHMETIC[type(node.op)], left, right)

    def _sum(self, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """Null where either is."""
        if left is None or right is None:
            return None
        if operation is add and (isinstance(left, str | list) and _kind(left) == _kind(right)):
            if len(left) + len(right) > SIZE_LIMIT:
                raise bad(self._text, f"gives more than {SIZE_LIMIT:,} characters or members")
            return left + right
        if not (_is_number(left) and _is_number(right)):
            raise bad(self._text, f"{_kind(left)} and {_kind(right)} do not go together here")
        try:
            return self._in_bounds(operation(self._in_bounds(left), self._in_bounds(right)))
        except ZeroDivisionError:
            raise bad(self._text, "divides by zero", "ask first: scope.n != 0 and scope.all / scope.n > 2") from None

    def _in_bounds(self, number: int | float) -> int | float:
        if abs(number) > LARGEST if isinstance(number, int) else not isfinite(number):
            raise bad(self._text, "a number is too large")
        return number

    def _length(self, value: Any) -> int | None:
        if value is None:
            return None
        if not isinstance(value, str | list | Mapping):
            raise bad(self._text, f"{_kind(value)} has no length")
        return len(value)


def _step(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute | ast.Subscript):
        return key(node) if isinstance(node.value, ast.Name) and node.value.id == "steps" else None
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    kinds = (
        (bool, "true or false"), (int | float, "a number"), (str, "a text"), (list, "a list"), (Mapping, "a map"),
    )  # fmt: skip
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _equal(left: Any, right: Any) -> bool:
    return _kind(left) == _kind(right) and bool(left == right)  # to Python, true is 1


def _ordered(comparison: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compared(left: Any, right: Any) -> bool:
        is_alike = _kind(left) == _kind(right) and (_is_number(left) or isinstance(left, str))
        return is_alike and comparison(left, right)

    return compared


def _within(left: Any, right: Any) -> bool:
    if isinstance(right, str | Mapping):
        return isinstance(left, str) and left in right
    return isinstance(right, list) and any(_equal(left, one) for one in right)


_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: _equal,
    ast.NotEq: lambda left, right: not _equal(left, right),
    ast.Lt: _ordered(lt),
    ast.LtE: _ordered(le),
    ast.Gt: _ordered(gt),
    ast.GtE: _ordered(ge),
    ast.In: _within,
    ast.NotIn: lambda left, right: not _within(left, right),
}
