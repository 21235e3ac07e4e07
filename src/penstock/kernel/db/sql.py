"""SQL files: named statements, with the states of machines filled in."""

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
    """Return the statements in the file of *package* by name; `StateMachine.format_sql` replaces `{machine.WORD}`."""
    text = files(package).joinpath(file).read_text(encoding="utf-8")
    return parse(text, machines or {})


def parse(text: str, machines: Mapping[str, StateMachine[Any]]) -> Mapping[str, str]:
    """Return the statements in *text* by name; each begins with a line `-- name: NAME`."""
    _, *pieces = _NAME.split(text)
    names, bodies = pieces[::2], pieces[1::2]
    if len(set(names)) != len(names):
        raise ValueError(f"a statement is named twice: {sorted(names)}")
    return {name: fill(body, machines).strip() for name, body in zip(names, bodies, strict=True)}


def fill(body: str, machines: Mapping[str, StateMachine[Any]]) -> str:
    """Replace `{machine.WORD}` by the literals of the machine; an unknown machine is a LookupError."""

    def format_literal(match: re.Match[str]) -> str:
        machine, word = match.groups()
        if machine not in machines:
            raise LookupError(f"unknown machine {machine!r} in {match.group()}")
        return machines[machine].format_sql(word)

    return _STATE.sub(format_literal, body)
