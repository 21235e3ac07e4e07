"""Generate the reference of error codes from the source that raises them."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from docs.generators.text import code, describe, page, table
from ruamel.yaml import YAML

import penstock
from penstock.flows.kinds.market.renderers import RenderFailed
from penstock.flows.step import StepFailed
from penstock.harvest.sources.port import SourceFailed
from penstock.kernel import errors
from penstock.kernel.errors import PenstockError
from penstock.refdata.model import CommandRefusal

_INGEST = Path(__file__).parent.parent / "etl" / "reason_codes.yaml"
_APART = ("penstock.harvest.simulator",)  # the simulated source of harvest is not part of the API
_WHERE = {
    "kernel": "Everywhere",
    "tracking": "Tracking",
    "refdata": "Refdata",
    "ingest": "Ingest",
    "harvest": "Harvest",
    "flows": "Flows",
}
# Errors that are not HTTP responses, by the object that failed.
_INSIDE: Mapping[type, str] = {
    CommandRefusal: "update",
    StepFailed: "step",
    RenderFailed: "picture",
    SourceFailed: "source",
}
_CODE = re.compile(r"[A-Z][A-Z0-9_]+")
_PROGRAM = "Program: settings, start, command line"


class RaisedCode(NamedTuple):
    """An error code with its HTTP status and the fixed part of its message."""

    where: str
    code: str
    answer: str
    message: str


def reason_codes() -> str:
    """Return the page with all codes by part."""
    found = sorted(set(_all()))
    places = [*_WHERE.values(), _PROGRAM]
    return page(
        "Error codes",
        "Codes are stable; messages may change. `…` is a value that is filled in.",
        "## Error classes",
        table(["class", "HTTP status", "exit code", "meaning"], _kinds()),
        "## Error codes by part",
        "A number is the status of an HTTP response. Other words name the object that failed: an update of a "
        "dictionary, a "
        "step of a flow, a chart (picture), or a source of harvest. In addition a server returns `MALFORMED` (422) "
        "for a "
        "request that does not match its schema, `INTERNAL` (500) for a bug in Penstock, and otherwise the name of "
        "the status, such "
        "as `NOT_FOUND`.",
        *(
            f"### {place}\n\n"
            + table(["code", "status", "message"], _rows([item for item in found if item.where == place]))
            for place in places
        ),
        *_ingest(),
    )


def _kinds() -> Iterator[tuple[str, str, str, str]]:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, PenstockError):
            yield code(kind.__name__), str(kind.status), str(kind.exit_code), describe(kind.__doc__)


def _rows(found: list[RaisedCode]) -> Iterator[tuple[str, str, str]]:
    """Yield a row per code."""
    for name in dict.fromkeys(item.code for item in found):
        alike = [item for item in found if item.code == name]
        answers = dict.fromkeys(item.answer for item in alike)
        messages = dict.fromkeys(item.message for item in alike if item.message)
        yield code(name), ", ".join(answers), "; ".join(messages)


def _ingest() -> Iterator[str]:
    """Yield the registry of reason codes of ingest."""
    registry: Mapping[str, Mapping[str, str]] = YAML(typ="safe").load(_INGEST)
    for title, part in (
        ("Reason codes of bad rows (ingest)", "reason_codes"),
        ("Reason codes of failed runs (ingest)", "failure_codes"),
    ):
        rows = ((code(name), about) for name, about in registry[part].items())
        yield f"## {title}\n\n" + table(["code", "meaning"], rows)


def _all() -> Iterator[RaisedCode]:
    for found in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not found.name.startswith(_APART) and not found.name.endswith("__main__"):
            module = importlib.import_module(found.name)
            where = _WHERE.get(found.name.split(".")[1], _PROGRAM)
            tree = ast.parse(Path(str(module.__file__)).read_text())
            names = {**_imported_late(tree), **vars(module)}
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
                yield from _codes_of_call(names, where, call)


def _imported_late(tree: ast.Module) -> Mapping[str, Any]:
    """Return the names that functions import when they are called, as commands do."""
    late = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == errors.__name__]
    return {name.name: getattr(errors, name.name) for node in late for name in node.names}


def _codes_of_call(names: Mapping[str, Any], where: str, call: ast.Call) -> Iterator[RaisedCode]:
    kind = names.get(call.func.id) if isinstance(call.func, ast.Name) else None
    answer = _answer(kind)
    if answer is not None:
        message = _words(call.args[1]) if len(call.args) > 1 else ""
        yield from (RaisedCode(where, name, answer, message) for name in _codes(names, call.args[0]))


def _answer(kind: Any) -> str | None:
    """Return the HTTP status or the object that failed; None if *kind* is no error."""
    if not isinstance(kind, type):
        return None
    if issubclass(kind, PenstockError):
        return str(kind.status)
    return next((answer for error, answer in _INSIDE.items() if issubclass(kind, error)), None)


def _codes(names: Mapping[str, Any], node: ast.expr) -> Iterator[str]:
    """Yield the codes of an expression: a constant, both branches of a condition, or a constant of the module."""
    if isinstance(node, ast.IfExp):
        yield from (*_codes(names, node.body), *_codes(names, node.orelse))
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(node, ast.Name):
        value = names.get(node.id)
    if isinstance(value, str) and _CODE.fullmatch(value):
        yield value


def _words(node: ast.expr) -> str:
    """Return the fixed part of a message; an empty text if it is built elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""
