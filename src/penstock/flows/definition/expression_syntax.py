"""F8, F14: the syntax of conditions and references, a subset of Python expressions; no Python code is executed."""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword
from math import isfinite
from typing import Final

from penstock.kernel.errors import Invalid
from penstock.kernel.text import is_storable

CODE: Final = "BAD_EXPRESSION"
LENGTH_LIMIT: Final = 2_000  # characters of an expression
LARGEST: Final = 2**63 - 1  # the largest integer, positive or negative, that every JSON library supports
CONSTANTS: Final = {"true": True, "false": False, "null": None}
ROOTS: Final = ("scope", "steps", "run", "item", "index")
_DEPTH_LIMIT = 64
_HINT = 'e.g. steps.fetch.outputs.rows > 0 and scope.mode in ["full", "delta"]'
_LINE_END = re.compile(r"\r\n|\r|\n")
_KEYWORD = re.compile(r"\.([A-Za-z_]+)|\.([0-9])")
_OPERATORS = (
    *(ast.And, ast.Or, ast.Not, ast.USub, ast.UAdd, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
)
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.List, ast.Tuple),
    *(ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Call),
)
_FORBIDDEN = {
    ast.Pow: "powers",
    ast.Is: "`is` (write ==)",
    ast.IsNot: "`is not` (write !=)",
    ast.Lambda: "functions",
    ast.JoinedStr: "f-strings (put several ${…} into a text)",
    ast.IfExp: "`if … else`",
    ast.Dict: "maps",
    ast.Set: "sets",
    ast.Slice: "slices",
    ast.NamedExpr: "assignments",
}


@dataclass(frozen=True)
class ParsedExpression:
    """A valid expression."""

    text: str
    tree: ast.expr
    steps: frozenset[str]  # the steps that it refers to
    uses_item: bool  # it refers to `item` or `index`


def make_expression_error(text: str, problem: str, hint: str = _HINT) -> Invalid:
    """Return the error BAD_EXPRESSION for the expression *text*."""
    shown = text if len(text) <= 80 else f"{text[:79]}…"
    return Invalid(CODE, f"invalid expression {shown!r}: {problem}", hint=hint)


@lru_cache(maxsize=4_096)
def parse_expression(text: str) -> ParsedExpression:
    """Parse the expression *text*; raise Invalid BAD_EXPRESSION if it is not valid."""
    if len(text) > LENGTH_LIMIT:
        raise make_expression_error(text, f"it is longer than {LENGTH_LIMIT} characters")
    line = _LINE_END.sub(" ", text).strip()
    tree = _parse_tree(text, line)
    steps: set[str] = set()
    uses_item = False
    for node in _walk_nodes(text, tree):
        _check_node(text, node)
        if isinstance(node, ast.Name):
            uses_item |= node.id in ("item", "index")
        if (step := _find_step(text, node)) is not None:
            steps.add(step)
    return ParsedExpression(text, tree, frozenset(steps), uses_item)


def _parse_tree(text: str, line: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # style warnings, e.g. for `1if x` or an invalid escape
            tree = ast.parse(line, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise make_expression_error(
            text, f"syntax error: {_describe_syntax_error(error)}", _suggest_fix(line)
        ) from None
    # Python ignores everything after a `#`: refuse it, so that no part of an expression is lost silently.
    if line.encode()[tree.end_col_offset :].decode().strip(") \t\f,"):
        raise make_expression_error(text, "comments are not allowed")
    return tree


def _describe_syntax_error(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return "it is empty" if error.text == "" else str(error.msg).removesuffix(". Perhaps you forgot a comma?")
    return (
        "it is nested too deeply"
        if isinstance(error, MemoryError | RecursionError)
        else "it contains invalid characters"
    )


def _suggest_fix(line: str) -> str:
    if "${" in line:
        return "this is an expression already: remove ${ and }"
    for word, digit in _KEYWORD.findall(line):
        if digit or iskeyword(word):
            names = "names with dashes, dots or leading digits, and Python keywords"
            return f'write {names}, in brackets: steps["fetch-eu"], scope["from"]'
    return _HINT


def _walk_nodes(text: str, tree: ast.expr) -> Iterator[ast.AST]:
    """Yield all nodes of *tree*; raise Invalid if it is nested too deeply."""
    pending: list[tuple[ast.AST, int]] = [(ast.Expression(tree), 0)]
    while pending:
        node, depth = pending.pop()
        if depth > _DEPTH_LIMIT:
            raise make_expression_error(text, f"it is nested deeper than {_DEPTH_LIMIT} levels")
        yield node
        inside = (inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.Load))
        pending += [(inner, depth + 1) for inner in inside]


def _check_node(text: str, node: ast.AST) -> None:
    if isinstance(node, ast.Name):
        _check_name(text, node)
    elif isinstance(node, ast.Constant):
        _check_constant(text, node)
    elif isinstance(node, ast.Attribute):
        if node.attr.startswith("__"):
            raise make_expression_error(text, f"the attribute {node.attr} is not allowed")
    elif isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id != "len" or len(node.args) != 1 or node.keywords:
            raise make_expression_error(text, "the only function is len(…), with one argument")
    elif not isinstance(node, _NODES + _OPERATORS):
        syntax = _FORBIDDEN.get(type(node), type(node).__name__)
        raise make_expression_error(text, f"{syntax}: not supported")


def _check_name(text: str, node: ast.Name) -> None:
    if node.id not in ROOTS and node.id not in CONSTANTS and node.id != "len":
        problem = f"unknown name {node.id!r}; references begin with {', '.join(ROOTS[:-1])} or {ROOTS[-1]}"
        raise make_expression_error(
            text, problem, 'put texts in quotes; write steps["fetch-eu"] for a name with a dash'
        )


def _check_constant(text: str, node: ast.Constant) -> None:
    value = node.value
    if value is not None and not isinstance(value, str | bool | int | float):
        raise make_expression_error(text, f"{value!r} is not a JSON value")
    if isinstance(value, str) and not is_storable(value):
        raise make_expression_error(text, "a text contains NUL or an unpaired surrogate")
    if (isinstance(value, float) and not isfinite(value)) or (isinstance(value, int) and value > LARGEST):
        raise make_expression_error(text, "a number is too large")


def _find_step(text: str, node: ast.AST) -> str | None:
    """Return the step that *node* refers to; raise Invalid for an incomplete reference."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        if _is_name(node.value, "steps") or (_is_name(node.value, "run") and find_static_key(node) == "id"):
            return None  # part of a reference; the enclosing node is checked
        if (step := _find_step_name(text, node.value)) is not None:
            if find_static_key(node) not in ("outputs", "status"):
                hint = f"write steps.{step}.outputs.{find_static_key(node) or '…'} or steps.{step}.status"
                raise make_expression_error(
                    text, f"a step has no {find_static_key(node)!r}, only outputs and status", hint
                )
            return step
    for inner in ast.iter_child_nodes(node):
        _check_reference(text, node, inner)
    return None


def _check_reference(text: str, node: ast.AST, inner: ast.AST) -> None:
    """Raise Invalid if *inner* is an incomplete reference and *node* around it does not complete it."""
    if _find_step_name(text, inner) is not None or _is_name(inner, "steps"):
        hint = 'for a step with a dash in its name, write steps["fetch-eu"].outputs.rows'
        raise make_expression_error(text, "write steps.NAME.outputs.… or steps.NAME.status", hint)
    if _is_name(inner, "run"):
        raise make_expression_error(text, "the run has only run.id")
    if _is_name(inner, "len") and not (isinstance(node, ast.Call) and inner is node.func):
        raise make_expression_error(text, "len is a function: write len(…)")


def _find_step_name(text: str, node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute | ast.Subscript) and _is_name(node.value, "steps"):
        if (name := find_static_key(node)) is None:
            raise make_expression_error(text, 'the name of a step must be constant: steps.fetch or steps["fetch"]')
        return name
    return None


def find_static_key(node: ast.expr) -> str | None:
    """Return the key that *node* looks up, if it is constant."""
    if isinstance(node, ast.Attribute):
        return node.attr
    inside = node.slice if isinstance(node, ast.Subscript) else None
    return inside.value if isinstance(inside, ast.Constant) and isinstance(inside.value, str) else None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
