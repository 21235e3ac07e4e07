"""`pipeline-apid`: the pipeline API alone."""

from typing import Annotated

import typer

from penstock.cli.main import run_program
from penstock.cli.serve import load_program, print_address, serve
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import ConfigOption, DataDirOption, HostOption, JsonOption

PORT = 8085
app = CommandGroup("Serve the pipeline API alone.", name="pipeline-apid", no_args_is_help=False)


@app.command()
def pipeline_apid(
    port: Annotated[int, typer.Option(metavar="PORT", help="Port of the API; 0 takes a free port.")] = PORT,
    database: Annotated[
        str | None,
        typer.Option(metavar="URL|embedded", help="PostgreSQL of the pipeline; PGPASSWORD is its password."),
    ] = None,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
    host: HostOption = None,
    json: JsonOption = False,
) -> None:
    """Serve the pipeline API alone, until Ctrl-C or SIGTERM.

    Prints the address of the API, and `ready` when it accepts requests. Without --database it uses
    `tracking.database` of the configuration, else `database`, else the embedded PostgreSQL in the data directory.
    """
    from penstock.kernel.config.sections import EMBEDDED
    from penstock.settings import load_settings

    overrides = {"data_dir": data_dir, "server.host": host, "server.port": port, "database.url": database}
    settings = load_settings(config, overrides=overrides)
    if database is not None:  # the option overrides the configuration
        section = settings.database.model_copy(update={"password": None} if database != EMBEDDED else {})
        tracking = settings.tracking.model_copy(update={"database": None})
        settings = settings.model_copy(update={"database": section, "tracking": tracking})
    with load_program():  # after the settings, whose errors are reported at once
        from penstock.app import programs

    serve(settings, programs.run_pipeline_apid, print_address("api", json))


def run() -> None:
    """Run the command; every known failure is printed as an error with an exit code."""
    run_program(app, name="pipeline-apid")


if __name__ == "__main__":
    run()
