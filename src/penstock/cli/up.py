"""`penstock up`."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import ConfigOption, DataDirOption, HostOption, JsonOption, emit
from penstock.cli.serving import loading, serve

if TYPE_CHECKING:
    from penstock.app.programs import Addresses


def up(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: HostOption = None,
    port: Annotated[int | None, typer.Option(help="Port of the API; 0 takes a free one.", show_default="8080")] = None,
    query_port: Annotated[
        int | None, typer.Option(help="Port of the query server; 0 takes a free one.", show_default="8081")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run everything in one place, until Ctrl-C or SIGTERM.

    Prints where it listens, and `ready` once it answers. Nothing needs to be installed: PostgreSQL comes along, and
    what it keeps is in the data directory. Start it there again and it goes on where it was, even after kill -9.
    """
    from penstock.settings import load_settings

    overrides = {"data_dir": data_dir, "server.host": host, "server.port": port, "server.query_port": query_port}
    settings = load_settings(config, overrides=overrides)

    with loading():  # takes a while: what is wrong with the settings is said before
        from penstock.app import programs

    def on_ready(addresses: "Addresses") -> None:
        data = {"event": "ready", "api": addresses.api, "query": addresses.query, "pid": os.getpid()}
        emit(data, as_json=json, text=f"api    {addresses.api}\nquery  {addresses.query}\nready")

    serve(settings, programs.up, on_ready)
