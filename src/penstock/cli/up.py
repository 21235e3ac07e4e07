"""`penstock up`."""

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import ConfigOption, DataDirOption, JsonOption, emit

if TYPE_CHECKING:
    from penstock.serving import Addresses
    from penstock.settings import Settings


def up(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
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
    from penstock.kernel.telemetry import configure_logging
    from penstock.settings import load_settings

    overrides = {"data_dir": data_dir, "server.host": host, "server.port": port, "server.query_port": query_port}
    settings = load_settings(config, overrides=overrides)
    configure_logging(settings.telemetry.log_level, settings.telemetry.log_format)
    _run(settings, json)


def _run(settings: "Settings", as_json: bool) -> None:
    import uvloop

    from penstock.serving import up as run_up

    def on_ready(addresses: "Addresses") -> None:
        data = {"event": "ready", "api": addresses.api, "query": addresses.query, "pid": os.getpid()}
        emit(data, as_json=as_json, text=f"api    {addresses.api}\nquery  {addresses.query}\nready")

    async def main() -> None:
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():  # asked twice: leave at once, the database recovers by itself
                os._exit(130)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        await run_up(settings, stop, on_ready)

    uvloop.run(main())
