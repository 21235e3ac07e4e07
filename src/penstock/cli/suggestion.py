"""Commands that a message suggests: complete, so that they can be pasted in any folder."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from penstock.cli.server_address import API, QUERY_API, ServerKind, find_server

_SUGGESTED = re.compile(r"`penstock ([^`\n]+)`")
_program: dict[str, Any] = {}  # the application whose commands are suggested
_SERVERS: Mapping[str, ServerKind] = {"url": API, "query_url": QUERY_API}


def register_program(app: Any) -> None:
    """Make *app* the application whose commands are suggested."""
    _program["app"] = app


def make_pasteable(text: str, **options: str | None) -> str:
    """Return *text*; each command in it between backticks gets the options it needs to work in any folder.

    `pasteable(text, url=url)` appends `--url` to commands that accept it, unless they find the same server without
    it. Any other option, such as `root=DIR`, is appended if it is not None.
    """
    if not _SUGGESTED.search(text):
        return text
    values = {name: _select_needed(name, value) for name, value in options.items()}
    if not any(values.values()):
        return text
    return _SUGGESTED.sub(lambda found: f"`penstock {_complete(found[1], values)}`", text)


def split_hint(hint: str, **options: str | None) -> list[str]:
    """Return the steps of the hint of an issue, which semicolons separate; a step that is a command is pasteable."""
    steps = [step.removeprefix("then ") for step in hint.split("; ") if step]
    return [make_pasteable(f"`{step}`", **options)[1:-1] if step.startswith("penstock ") else step for step in steps]


def _select_needed(name: str, value: str | None) -> str | None:
    if name not in _SERVERS:
        return value
    address = find_server(value, _SERVERS[name])
    return None if address.is_found_from_anywhere else address.url


def _complete(command: str, values: Mapping[str, str | None]) -> str:
    accepted = _find_accepted_options(command)
    added = [
        f"{accepted[name]} {shlex.quote(value)}"
        for name, value in values.items()
        if value and name in accepted and accepted[name] not in command.split()
    ]
    return " ".join([command, *added])


def _find_accepted_options(command: str) -> dict[str, str]:
    """Return the options of the command that *command* begins with, by parameter name."""
    import typer

    target: Any = typer.main.get_command(_program["app"])
    for word in command.split():
        if word not in getattr(target, "commands", {}):
            break
        target = target.commands[word]
    return {parameter.name: parameter.opts[0] for parameter in target.params if parameter.param_type_name == "option"}
