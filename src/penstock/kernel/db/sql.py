"""SQL lives in files, named and described; states in it come from the machines."""

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from penstock.kernel.machine import StateMachine

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_STATE = re.compile(r"\{([a-z]\w*)\.(\w+)\}")


def load(
    package: str, machines: Mapping[str, StateMachine[Any]] | None = None, *, file: str = "queries.sql"
) -> Mapping[str, str]:
    """The statements of *package*'s file by name, `{machine.WORD}` replaced by what `StateMachine.sql` says."""
    text = files(package).joinpath(file).read_text(encoding="utf-8")
    return parse(text, machines or {})


def parse(text: str, machines: Mapping[str, StateMachine[Any]]) -> Mapping[str, str]:
    """Cut *text* at its `-- name:` lines."""
    _, *pieces = _NAME.split(text)
    names, bodies = pieces[::2], pieces[1::2]
    if len(set(names)) != len(names):
        raise ValueError(f"a statement is named twice: {sorted(names)}")
    return {name: fill(body, machines).strip() for name, body in zip(names, bodies, strict=True)}


def fill(body: str, machines: Mapping[str, StateMachine[Any]]) -> str:
    """Put the machines' literals in place of `{machine.WORD}`; a machine nobody gave is a mistake."""

    def literal(match: re.Match[str]) -> str:
        machine, word = match.groups()
        if machine not in machines:
            raise LookupError(f"no machine {machine!r} was given for {match.group()}")
        return machines[machine].sql(word)

    return _STATE.sub(literal, body)
