"""`penstock`: the one program."""

import os
import sys
from collections.abc import Callable

import typer

from penstock.cli import (
    config,
    database,
    demo,
    dictionary,
    doctor,
    flow,
    harvest,
    ingest,
    roles,
    status,
    track,
    up,
    version,
)
from penstock.cli.output import fail
from penstock.cli.version import VersionOption
from penstock.kernel.errors import PenstockError

app = typer.Typer(
    name="penstock",
    help="Leads data from where it arises to where it is served.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 the work failed, 2 usage, 3 config, 4 auth, 5 not found, 6 conflict or locked, "
    "7 a dependency is down, 124 time-out.",
)


@app.callback()
def penstock(version: VersionOption = False) -> None:
    """Accept the options that belong to no command."""


app.command()(up.up)
app.command()(demo.demo)
app.command()(status.status)
app.command()(status.events)
app.command()(doctor.doctor)
app.command()(version.version)
app.add_typer(config.app, name="config")
app.add_typer(database.app, name="db")
app.add_typer(track.app, name="track")
app.add_typer(dictionary.app, name="dict")
app.add_typer(ingest.app, name="ingest")
app.add_typer(harvest.app, name="harvest")
app.add_typer(flow.app, name="flow")
app.add_typer(roles.serve_app, name="serve")
app.add_typer(roles.work_app, name="work")


def run() -> None:
    """Run the command line."""
    guarded(app)


def guarded(program: Callable[[], object]) -> None:
    """Run *program*; every failure we know becomes a sentence and an exit code, never a traceback."""
    try:
        program()
    except PenstockError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has seen enough; say nothing while Python flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if os.environ.get("PENSTOCK_DEBUG"):
            raise
        hint = "this is a mistake in Penstock; PENSTOCK_DEBUG=1 shows where"
        fail(PenstockError("INTERNAL", f"{type(error).__name__}: {error}", hint=hint))


if __name__ == "__main__":
    run()
