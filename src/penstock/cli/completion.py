"""`penstock completion`: scripts for shells, and the names that a running server adds to completions."""

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal.options import JsonOption
from penstock.cli.terminal.output import emit

if TYPE_CHECKING:
    from penstock.cli.server_client import ServerClient

_NAME_TIMEOUT = 1.0  # seconds that the Tab key waits for a server
_PROGRAMS = ("penstock", "pipeline-apid")


class Shell(StrEnum):
    """The shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def print_completion(
    shell: Annotated[Shell, typer.Argument(help="Shell to complete in.")], json: JsonOption = False
) -> None:
    """Print the completion script of a shell.

    In ~/.bashrc: `source <(penstock completion bash)`. docs/install.md describes the other shells.
    """
    from typer import completion as shell_completion

    make_script = shell_completion.get_completion_script  # type: ignore[attr-defined]
    scripts = [make_script(prog_name=name, complete_var=name_variable(name), shell=shell.value) for name in _PROGRAMS]
    emit({"shell": shell.value, "script": "\n\n".join(scripts)}, as_json=json, text="\n\n".join(scripts))


def name_variable(program: str) -> str:
    """Return the environment variable by which a shell asks *program* for completions."""
    return f"_{program.replace('-', '_').upper()}_COMPLETE"


def prepare(program: str) -> None:
    """Register the shells, if a shell asks for completions."""
    if name_variable(program) not in os.environ:
        return
    from typer import completion as shell_completion

    shell_completion.completion_init()  # type: ignore[attr-defined]
    # The parser prints what callbacks raise; a Tab key must not.
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends


def complete_from_server(
    client: "Callable[[], ServerClient[Any]]", call: Callable[[Any, Any], Any], names: Callable[[Any], list[str]]
) -> Callable[[typer.Context, str], list[str]]:
    """Return a completion of names that a server knows; empty if it does not answer within a second.

    *call* gets the client and the parsing context, so that one argument can depend on another.
    """

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        url = ctx.params.get("url")
        try:
            found = client()(url, lambda connected: call(connected, ctx), timeout=_NAME_TIMEOUT)
            return [name for name in names(found) if name.startswith(incomplete)]
        except Exception:  # noqa: BLE001 - a Tab key shows no errors
            return []

    return complete
