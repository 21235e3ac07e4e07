"""Data to standard output, messages to standard error, as text for people or JSON for programs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from penstock.kernel.errors import PenstockError

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        envvar="PENSTOCK_CONFIG",
        help="The configuration; ./penstock.yaml when there is one.",
    ),
]
DataDirOption = Annotated[Path | None, typer.Option("--data-dir", metavar="DIR", help="Where embedded data lives.")]

HostOption = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
ApiPortOption = Annotated[int | None, typer.Option(help="Port of the API; 0 takes a free one.", show_default="8080")]
HealthPortOption = Annotated[int, typer.Option(help="Port of its health and metrics; 0 takes a free one.")]
RunArgument = Annotated[str, typer.Argument(help="The run's id.", metavar="RUN")]
LimitOption = Annotated[int, typer.Option(help="How many to show.", min=1, max=1000)]


def emit(data: Any, *, as_json: bool, text: str | None = None) -> None:
    """Print *data* as JSON, or *text* for people."""
    sys.stdout.write(json.dumps(data, indent=2, default=str) if as_json or text is None else text)
    sys.stdout.write("\n")
    sys.stdout.flush()


def say(message: str) -> None:
    """Tell the person at the terminal something that is not data."""
    sys.stderr.write(f"{message}\n")


def printable(text: str) -> str:
    """*text* without what would move the terminal: names of files come from outside."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def table(cells: Sequence[Sequence[str]]) -> str:
    """Columns side by side."""
    rows = [[printable(cell) for cell in row] for row in cells]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def fail(error: PenstockError) -> NoReturn:
    """Say what went wrong and what to do, and leave with its exit code."""
    if "--json" in sys.argv:
        say(json.dumps({"error": error.as_dict()}, default=str))
    else:
        say(f"error: {error.message}")
        if error.hint:
            say(f"hint: {error.hint}")
    sys.exit(error.exit_code)
