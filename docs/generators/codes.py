"""The reference of codes: why something failed, found in the source where it is said."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from docs.generators.text import code, page, said, table
from ruamel.yaml import YAML

import penstock
from penstock.flows.kinds.market.renderers import PictureFailed
from penstock.flows.step import StepFailed
from penstock.harvest.sources.port import SourceFailed
from penstock.kernel import errors
from penstock.kernel.errors import PenstockError
from penstock.refdata.model import CommandRefusal

_INGEST = Path(__file__).parent.parent / "etl" / "reason_codes.yaml"
_APART = ("penstock.harvest.simulator",)  # the source to try harvest with is nobody's API
_WHERE = {
    "kernel": "Everywhere",
    "tracking": "Tracking",
    "refdata": "Refdata",
    "ingest": "Ingest",
    "harvest": "Harvest",
    "flows": "Flows",
}
# What no request is answered with, but what something failed by.
_INSIDE: Mapping[type, str] = {
    CommandRefusal: "update",
    StepFailed: "step",
    PictureFailed: "picture",
    SourceFailed: "source",
}
_CODE = re.compile(r"[A-Z][A-Z0-9_]+")
_PROGRAM = "The program: settings, start, command line"


class Said(NamedTuple):
    """A code, what it is answered with, and what is said with it where that is fixed."""

    where: str
    code: str
    answer: str
    message: str


def reason_codes() -> str:
    """All codes, by where they come from."""
    found = sorted(set(_all()))
    places = [*_WHERE.values(), _PROGRAM]
    return page(
        "Codes",
        "Codes are stable; the words beside them are for people, and may change. `…` stands for what is filled in.",
        "## Kinds of errors",
        table(["kind", "status", "exit code", ""], _kinds()),
        "## Codes of errors",
        "A number is the status of an HTTP answer. The others tell why an update of a dictionary has FAILED, a step of "
        "a flow or a picture failed, or a source of harvest gave nothing. Besides, a server answers `MALFORMED` (422) "
        "to what its schema refuses, `INTERNAL` (500) where we made a mistake, and else the words of the status, as "
        "`NOT_FOUND`.",
        *(
            f"### {place}\n\n" + table(["code", "answer", ""], _rows([one for one in found if one.where == place]))
            for place in places
        ),
        *_ingest(),
    )


def _kinds() -> Iterator[tuple[str, str, str, str]]:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, PenstockError):
            yield code(kind.__name__), str(kind.status), str(kind.exit_code), said(kind.__doc__)


def _rows(found: list[Said]) -> Iterator[tuple[str, str, str]]:
    """A row for each code."""
    for name in dict.fromkeys(one.code for one in found):
        alike = [one for one in found if one.code == name]
        answers = dict.fromkeys(one.answer for one in alike)
        messages = dict.fromkeys(one.message for one in alike if one.message)
        yield code(name), ", ".join(answers), "; ".join(messages)


def _ingest() -> Iterator[str]:
    """The closed registry of ingest, as it stands."""
    registry: Mapping[str, Mapping[str, str]] = YAML(typ="safe").load(_INGEST)
    for title, part in (
        ("Why a row of ingest is bad", "reason_codes"),
        ("Why a run of ingest failed", "failure_codes"),
    ):
        rows = ((code(name), about) for name, about in registry[part].items())
        yield f"## {title}\n\n" + table(["code", ""], rows)


def _all() -> Iterator[Said]:
    for found in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not found.name.startswith(_APART) and not found.name.endswith("__main__"):
            module = importlib.import_module(found.name)
            where = _WHERE.get(found.name.split(".")[1], _PROGRAM)
            tree = ast.parse(Path(str(module.__file__)).read_text())
            names = {**_imported_late(tree), **vars(module)}
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
                yield from _said(names, where, call)


def _imported_late(tree: ast.Module) -> Mapping[str, Any]:
    """What functions import when they are called, as commands do."""
    late = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == errors.__name__]
    return {name.name: getattr(errors, name.name) for node in late for name in node.names}


def _said(names: Mapping[str, Any], where: str, call: ast.Call) -> Iterator[Said]:
    kind = names.get(call.func.id) if isinstance(call.func, ast.Name) else None
    answer = _answer(kind)
    if answer is not None:
        message = _words(call.args[1]) if len(call.args) > 1 else ""
        yield from (Said(where, name, answer, message) for name in _codes(names, call.args[0]))


def _answer(kind: Any) -> str | None:
    """What somebody is answered with; None for anything that is no failure."""
    if not isinstance(kind, type):
        return None
    if issubclass(kind, PenstockError):
        return str(kind.status)
    return next((answer for told, answer in _INSIDE.items() if issubclass(kind, told)), None)


def _codes(names: Mapping[str, Any], node: ast.expr) -> Iterator[str]:
    """What stands there as a code: itself, one of two, or a name of the module."""
    if isinstance(node, ast.IfExp):
        yield from (*_codes(names, node.body), *_codes(names, node.orelse))
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(node, ast.Name):
        value = names.get(node.id)
    if isinstance(value, str) and _CODE.fullmatch(value):
        yield value


def _words(node: ast.expr) -> str:
    """A sentence as far as it is fixed; nothing where it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""
