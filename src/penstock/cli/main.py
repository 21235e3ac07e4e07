"""`penstock`: the program, its command groups, and the commands `doctor` and `version`."""

import os
import platform
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli import config, database, demo, dictionary, flow, harvest, ingest, serve, status, track
from penstock.cli.output import ConfigOption, DataDirOption, JsonOption, emit, fail, table
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


def doctor(config: ConfigOption = None, data_dir: DataDirOption = None, json: JsonOption = False) -> None:
    """Find out what would keep Penstock from running here, and say what to do about it."""
    import asyncio

    from penstock.app.doctor import diagnose
    from penstock.settings import load_settings

    findings = asyncio.run(diagnose(load_settings(config, overrides={"data_dir": data_dir})))
    data = [finding.as_dict() for finding in findings]
    rows = [["ok" if f.error is None else "FAIL", f.name, f.detail] for f in findings]
    hints = [f"{f.name}: {f.error.hint}" for f in findings if f.error is not None and f.error.hint]
    emit(data, as_json=json, text="\n".join([table(rows), *hints]))
    sys.exit(max((finding.error.exit_code for finding in findings if finding.error), default=0))


def print_version(json: JsonOption = False) -> None:
    """Print the version."""
    data = {"penstock": __version__, "python": platform.python_version(), "platform": platform.platform()}
    emit(data, as_json=json, text=f"penstock {__version__}")


def _print_version_and_exit(is_given: bool) -> None:
    if is_given:
        print_version()
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", is_eager=True, callback=_print_version_and_exit, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Accept the options that belong to no command."""


app.command()(serve.up)
app.command()(demo.demo)
app.command()(status.status)
app.command()(status.events)
app.command()(doctor)
app.command("version")(print_version)
app.add_typer(config.app, name="config")
app.add_typer(database.app, name="db")
app.add_typer(track.app, name="track")
app.add_typer(dictionary.app, name="dict")
app.add_typer(ingest.app, name="ingest")
app.add_typer(harvest.app, name="harvest")
app.add_typer(flow.app, name="flow")
app.add_typer(serve.serve_app, name="serve")
app.add_typer(serve.work_app, name="work")


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
