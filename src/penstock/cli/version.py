"""`penstock version` and `penstock --version`."""

import platform
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli.output import JsonOption, emit


def version(json: JsonOption = False) -> None:
    """Print the version."""
    data = {"penstock": __version__, "python": platform.python_version(), "platform": platform.platform()}
    emit(data, as_json=json, text=f"penstock {__version__}")


def _print_and_exit(is_given: bool) -> None:
    if is_given:
        version()
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", "-V", is_eager=True, callback=_print_and_exit, help="Print the version and exit.")
]
