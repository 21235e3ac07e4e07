"""The reference of the command line, from the programs themselves."""

import re
from collections.abc import Iterator
from typing import Any

import typer
from docs.generators.text import code, page, said, table

from penstock.cli import main, pipeline_apid
from penstock.kernel import errors

_EXTRAS = re.compile(r"(?:^|  )\[([^\[\]]*)\]$")


def cli() -> str:
    """Every command there is."""
    commands = [*_commands("penstock", typer.main.get_command(main.app))]
    commands += _commands("pipeline-apid", typer.main.get_command(pipeline_apid.app))
    return page(
        "Command line",
        "Every command has `--help`; `penstock --version` prints the version. Data goes to standard output, words to "
        "standard error. `PENSTOCK_TOKEN` is sent to servers that ask who is there.",
        "## Exit codes",
        table(["code", "meaning", "errors"], _exit_codes()),
        *commands,
    )


def _exit_codes() -> Iterator[tuple[str, str, str]]:
    """As the program itself tells them, each with the errors that end in it."""
    kinds: dict[int, list[str]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.PenstockError):
            kinds.setdefault(kind.exit_code, []).append(code(kind.__name__))
    _, _, told = str(main.app.info.epilog).rstrip(".").partition(": ")
    for number, _, meaning in (one.partition(" ") for one in told.split(", ")):
        yield number, meaning, ", ".join(kinds.get(int(number), []))
    yield "130", "interrupted", ""


def _commands(name: str, command: Any) -> Iterator[str]:
    """Sections of a command and of those below it."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield _section(name, command)
    elif " " in name:  # a group; the program itself is what the page is about
        yield f"## {name}\n\n{said(command.help)}"
    for below, one in inner.items():
        if not one.hidden:
            yield from _commands(f"{name} {below}", one)


def _section(name: str, command: Any) -> str:
    """A command with its help, arguments and options."""
    context = command.make_context(name, [], resilient_parsing=True)
    depth = "##" if len(name.split()) < 3 else "###"
    rows = [_row(found) for param in command.params if (found := param.get_help_record(context)) is not None]
    usage = command.get_usage(context).removeprefix("Usage: ")
    help_text = "\n\n".join(said(part) for part in (command.help or "").split("\n\n"))
    shown = f"```text\n{' '.join(usage.split())}\n```"
    parts = [f"{depth} {name}", help_text, shown, table(["", "", "default, bounds"], rows)]
    return "\n\n".join(part for part in parts if part)


def _row(record: tuple[str, str]) -> tuple[str, str, str]:
    name, about = record
    extras = _EXTRAS.search(about)
    bounds = extras[1].split("; ") if extras else []
    return code(name), said(_EXTRAS.sub("", about)), ", ".join(map(_bound, bounds))


def _bound(told: str) -> str:
    """What limits an option, or what it is when it is not given."""
    if told == "required":
        return told
    return code(told.removeprefix("default: ").replace("env var: ", "$").strip("()"))
