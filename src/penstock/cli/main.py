"""`penstock`: the program, its command groups, and the commands `doctor` and `version`."""

import os
import platform
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli import completion, config, database, demo, dictionary, flow, harvest, ingest, serve, status, track
from penstock.cli.suggestion import register_program
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import ConfigOption, DataDirOption, JsonOption
from penstock.cli.terminal.output import emit, fail, format_table, print_message
from penstock.cli.terminal.usage_error import UsageError, translate_parser_error
from penstock.kernel.errors import PenstockError

RUN, PARTS, OPERATE = "Run Penstock", "Work with a running server", "Check and maintain"
app = CommandGroup(
    name="penstock",
    help="Ingest, version and serve reference data, exactly once, on one PostgreSQL.",
    epilog="Exit codes: 0 ok, 1 the work failed, 2 usage, 3 config, 4 auth, 5 not found, 6 conflict or locked, "
    "7 a dependency is down, 124 time-out, 130 interrupted.",
)


def doctor(config: ConfigOption = None, data_dir: DataDirOption = None, json: JsonOption = False) -> None:
    """Check the configuration, the databases and all other dependencies from this machine.

    Each failed check prints the next step. The exit code is the highest code of the failed checks.
    """
    import asyncio

    from penstock.app.doctor import diagnose
    from penstock.settings import load_settings

    checks = asyncio.run(diagnose(load_settings(config, overrides={"data_dir": data_dir})))
    data = [check.as_dict() for check in checks]
    rows = [["ok" if check.error is None else "FAIL", check.name, check.detail] for check in checks]
    hints = [f"{check.name}: {check.error.hint}" for check in checks if check.error is not None and check.error.hint]
    emit(data, as_json=json, text="\n".join([format_table(rows), *hints]))
    sys.exit(max((check.error.exit_code for check in checks if check.error), default=0))


def print_version(json: JsonOption = False) -> None:
    """Print the version of Penstock; with --json also of Python and the platform."""
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


app.command(rich_help_panel=RUN)(serve.up)
app.command(rich_help_panel=RUN)(demo.demo)
app.add_typer(serve.serve_app, name="serve", rich_help_panel=RUN)
app.add_typer(serve.work_app, name="work", rich_help_panel=RUN)
app.command(rich_help_panel=PARTS)(status.status)
app.command(rich_help_panel=PARTS)(status.events)
app.add_typer(dictionary.app, name="dict", rich_help_panel=PARTS)
app.add_typer(ingest.app, name="ingest", rich_help_panel=PARTS)
app.add_typer(harvest.app, name="harvest", rich_help_panel=PARTS)
app.add_typer(track.app, name="track", rich_help_panel=PARTS)
app.add_typer(flow.app, name="flow", rich_help_panel=PARTS)
app.command(rich_help_panel=OPERATE)(doctor)
app.add_typer(config.app, name="config", rich_help_panel=OPERATE)
app.add_typer(database.app, name="db", rich_help_panel=OPERATE)
app.command("completion", rich_help_panel=OPERATE)(completion.print_completion)
app.command("version", rich_help_panel=OPERATE)(print_version)


register_program(app)


def run() -> None:
    """Run the command line."""
    run_program(app, name="penstock")


def run_program(program: Callable[..., Any], *, name: str) -> None:
    """Run *program* and exit; every known failure is printed as an error and a hint, never as a traceback."""
    try:
        completion.prepare(name)
        code = program(prog_name=name, complete_var=completion.name_variable(name), standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except UsageError as error:
        _fail_usage(error)
    except PenstockError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the output closed it, such as `head`. Keep Python quiet while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if os.environ.get("PENSTOCK_DEBUG"):
            raise
        hint = "this is a bug in Penstock; PENSTOCK_DEBUG=1 prints the traceback"
        fail(PenstockError("INTERNAL", f"{type(error).__name__}: {error}", hint=hint))


def _fail_usage(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        print_message(error.ctx.get_help())
        sys.exit(error.exit_code)
    fail(translate_parser_error(error))


if __name__ == "__main__":
    run()
