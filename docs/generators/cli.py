"""Generate the reference of the command line from the programs."""

import re
from collections.abc import Iterator
from typing import Any

import typer
from docs.generators.text import code, describe, page, table

from penstock.cli import main, pipeline_apid
from penstock.kernel import errors

_TYPE = re.compile(r" <(?:str|path|list\[\w+\])>")  # what the parser prints for an argument without choices
_RANGE = re.compile(r"(?:([\d.]+)<=)?x(?:([<>])=([\d.]+))")
_EXTRAS = re.compile(r"(?:^|  )\[([^\[\]]*)\]$")


def cli() -> str:
    """Return the page with every command."""
    commands = [*_commands("penstock", typer.main.get_command(main.app))]
    commands += _commands("pipeline-apid", typer.main.get_command(pipeline_apid.app))
    return page(
        "Command line",
        "Every command has `--help`; `penstock --version` prints the version. Commands print data to standard output "
        "and "
        "messages to standard error. `PENSTOCK_TOKEN` contains the bearer token for servers with authentication.",
        "## Exit codes",
        table(["code", "meaning", "errors"], _exit_codes()),
        *commands,
    )


def _exit_codes() -> Iterator[tuple[str, str, str]]:
    """Yield the exit codes of the epilog of the help, with the errors that cause them."""
    kinds: dict[int, list[str]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.PenstockError):
            kinds.setdefault(kind.exit_code, []).append(code(kind.__name__))
    _, _, codes = str(main.app.info.epilog).rstrip(".").partition(": ")
    for number, _, meaning in (entry.partition(" ") for entry in codes.split(", ")):
        yield number, meaning, ", ".join(kinds.get(int(number), []))
    yield "130", "interrupted", ""


def _commands(name: str, command: Any) -> Iterator[str]:
    """Yield the sections of a command and of its subcommands."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield _section(name, command)
    elif " " in name:  # a group; the page itself describes the program
        yield f"## {name}\n\n{describe(command.help)}"
    for subname, subcommand in inner.items():
        if not subcommand.hidden:
            yield from _commands(f"{name} {subname}", subcommand)


def _section(name: str, command: Any) -> str:
    """Return a command with its help, arguments and options."""
    context = command.make_context(name, [], resilient_parsing=True)
    depth = "##" if len(name.split()) < 3 else "###"
    rows = [_row(found) for param in command.params if (found := param.get_help_record(context)) is not None]
    usage = command.get_usage(context).removeprefix("Usage: ")
    help_text = "\n\n".join(describe(part) for part in (command.help or "").split("\n\n"))
    shown = f"```text\n{' '.join(usage.split())}\n```"
    parts = [f"{depth} {name}", help_text, shown, table(["option", "description", "default, limits"], rows)]
    return "\n\n".join(part for part in parts if part)


def _row(record: tuple[str, str]) -> tuple[str, str, str]:
    name, about = record
    extras = _EXTRAS.search(about)
    bounds = extras[1].split("; ") if extras else []
    return code(_TYPE.sub("", name)), describe(_EXTRAS.sub("", about)), ", ".join(map(_bound, bounds))


def _bound(extra: str) -> str:
    """Return the limits or the default of an option."""
    if extra == "required":
        return extra
    if limits := _RANGE.fullmatch(extra):
        low, sign, high = limits.groups()
        return f"{low} to {high}" if low else f"at {'least' if sign == '>' else 'most'} {high}"
    return code(extra.removeprefix("default: ").replace("env var: ", "$").strip("()"))
