"""F8, F14: the language of conditions and references: what may be written in it. Nothing here runs Python."""

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
LARGEST: Final = 2**63 - 1  # a whole number, either way: what every JSON library can hold
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
    """An expression that may be worked out."""

    text: str
    tree: ast.expr
    steps: frozenset[str]  # those it refers to
    uses_item: bool  # or the index of one


def bad(text: str, said: str, hint: str = _HINT) -> Invalid:
    """What is wrong with the expression *text*."""
    shown = text if len(text) <= 80 else f"{text[:79]}…"
    return Invalid(CODE, f"{shown!r}: {said}", hint=hint)


@lru_cache(maxsize=4_096)
def parsed(text: str) -> ParsedExpression:
    """The expression *text*; Invalid BAD_EXPRESSION for all that is not of the language."""
    if len(text) > LENGTH_LIMIT:
        raise bad(text, f"an expression has at most {LENGTH_LIMIT} characters")
    line = _LINE_END.sub(" ", text).strip()
    tree = _tree(text, line)
    steps: set[str] = set()
    uses_item = False
    for node in _walked(text, tree):
        _check(text, node)
        if isinstance(node, ast.Name):
            uses_item |= node.id in ("item", "index")
        if (step := _step_of(text, node)) is not None:
            steps.add(step)
    return ParsedExpression(text, tree, frozenset(steps), uses_item)


def _tree(text: str, line: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of style: `1if x`, or an escape in a text that is none
            tree = ast.parse(line, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise bad(text, f"cannot be read: {_reason(error)}", _hint(line)) from None
    # Python stops reading at a `#`: what comes after must not be lost unseen.
    if line.encode()[tree.end_col_offset :].decode().strip(") \t\f,"):
        raise bad(text, "comments are not part of an expression")
    return tree


def _reason(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return "it is empty" if error.text == "" else str(error.msg).removesuffix(". Perhaps you forgot a comma?")
    return "nested too deep" if isinstance(error, MemoryError | RecursionError) else "it holds what is no text"


def _hint(line: str) -> str:
    if "${" in line:
        return "this is an expression already: leave out ${ and }"
    for word, digit in _KEYWORD.findall(line):
        if digit or iskeyword(word):
            return 'names with dashes or dots, of digits or of Python go in brackets: steps["fetch-eu"], scope["from"]'
    return _HINT


def _walked(text: str, tree: ast.expr) -> Iterator[ast.AST]:
    """All nodes of *tree*, not deeper than they may be nested."""
    waiting: list[tuple[ast.AST, int]] = [(ast.Expression(tree), 0)]
    while waiting:
        node, depth = waiting.pop()
        if depth > _DEPTH_LIMIT:
            raise bad(text, f"nested deeper than {_DEPTH_LIMIT}")
        yield node
        inside = (inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.Load))
        waiting += [(inner, depth + 1) for inner in inside]


def _check(text: str, node: ast.AST) -> None:
    if isinstance(node, ast.Name):
        _check_name(text, node)
    elif isinstance(node, ast.Constant):
        _check_constant(text, node)
    elif isinstance(node, ast.Attribute):
        if node.attr.startswith("__"):
            raise bad(text, f"{node.attr} cannot be asked for")
    elif isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id != "len" or len(node.args) != 1 or node.keywords:
            raise bad(text, "len(…) of one thing is all that can be called")
    elif not isinstance(node, _NODES + _OPERATORS):
        what = _FORBIDDEN.get(type(node), f"{type(node).__name__} of Python")
        raise bad(text, f"there are no {what} in expressions")


def _check_name(text: str, node: ast.Name) -> None:
    if node.id not in ROOTS and node.id not in CONSTANTS and node.id != "len":
        said = f"there is no {node.id!r}: names begin with {', '.join(ROOTS[:-1])} or {ROOTS[-1]}"
        raise bad(text, said, 'texts are quoted; a step with a dash in its name is steps["fetch-eu"]')


def _check_constant(text: str, node: ast.Constant) -> None:
    value = node.value
    if value is not None and not isinstance(value, str | bool | int | float):
        raise bad(text, f"{value!r} is no value of JSON")
    if isinstance(value, str) and not is_storable(value):
        raise bad(text, "a text holds what no store keeps: NUL, or half a character")
    if (isinstance(value, float) and not isfinite(value)) or (isinstance(value, int) and value > LARGEST):
        raise bad(text, "a number is too large")


def _step_of(text: str, node: ast.AST) -> str | None:
    """The step *node* refers to, if it is a reference to one; Invalid where something begins like one and is none."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        if _is_named(node.value, "steps") or (_is_named(node.value, "run") and key(node) == "id"):
            return None  # a step is looked at from around it
        if (step := _named_step(text, node.value)) is not None:
            if key(node) not in ("outputs", "status"):
                hint = f"write steps.{step}.outputs.{key(node) or '…'} or steps.{step}.status"
                raise bad(text, f"a step has outputs and a status, no {key(node)!r}", hint)
            return step
    for inner in ast.iter_child_nodes(node):
        _check_whole(text, node, inner)
    return None


def _check_whole(text: str, node: ast.AST, inner: ast.AST) -> None:
    """Invalid where *inner* is not all of a name, and *node* around it does not complete it."""
    if _named_step(text, inner) is not None or _is_named(inner, "steps"):
        hint = 'a step with a dash in its name is steps["fetch-eu"].outputs.rows'
        raise bad(text, "steps are referred to as steps.NAME.outputs.… or steps.NAME.status", hint)
    if _is_named(inner, "run"):
        raise bad(text, "of the run there is run.id")
    if _is_named(inner, "len") and not (isinstance(node, ast.Call) and inner is node.func):
        raise bad(text, "len is a function: len(…)")


def _named_step(text: str, node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute | ast.Subscript) and _is_named(node.value, "steps"):
        if (name := key(node)) is None:
            raise bad(text, "a step is named as it is: steps.fetch, or in quotes")
        return name
    return None


def key(node: ast.expr) -> str | None:
    """What *node* asks of the thing before it, if that can be told from the text alone."""
    if isinstance(node, ast.Attribute):
        return node.attr
    inside = node.slice if isinstance(node, ast.Subscript) else None
    return inside.value if isinstance(inside, ast.Constant) and isinstance(inside.value, str) else None


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
