"""`pipeline-apid`: the pipeline API alone."""

from typing import Annotated

import typer

from penstock.cli.main import guarded
from penstock.cli.output import ConfigOption, DataDirOption, HostOption, JsonOption
from penstock.cli.serve import loading, serve, tell_address

PORT = 8085
app = typer.Typer(
    name="pipeline-apid",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def pipeline_apid(
    port: Annotated[int, typer.Option(help="Port of the API; 0 takes a free one.")] = PORT,
    database: Annotated[
        str | None,
        typer.Option(metavar="URL|embedded", help="PostgreSQL of the pipeline; its password by PGPASSWORD."),
    ] = None,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
    host: HostOption = None,
    json: JsonOption = False,
) -> None:
    """Serve the pipeline API alone, until Ctrl-C or SIGTERM.

    Prints where it listens, and `ready` once it answers. Without --database it uses `tracking.database` of the
    configuration, else its `database`, else a PostgreSQL that comes along and lives in the data directory.
    """
    from penstock.kernel.config.sections import EMBEDDED
    from penstock.settings import load_settings

    overrides = {"data_dir": data_dir, "server.host": host, "server.port": port, "database.url": database}
    settings = load_settings(config, overrides=overrides)
    if database is not None:  # asked for here, it goes before the configuration's
        section = settings.database.model_copy(update={"password": None} if database != EMBEDDED else {})
        tracking = settings.tracking.model_copy(update={"database": None})
        settings = settings.model_copy(update={"database": section, "tracking": tracking})
    with loading():  # takes a while: what is wrong with the settings is said before
        from penstock.app import programs

    serve(settings, programs.run_pipeline_apid, tell_address("api", json))


def run() -> None:
    """Run the command; every failure we know becomes a sentence and an exit code."""
    guarded(app)


if __name__ == "__main__":
    run()
