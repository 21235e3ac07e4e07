"""`penstock up`."""

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import ConfigOption, DataDirOption, JsonOption, emit, say

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

    if settings.auth.jwt is None:
        say(f"no authentication is set, so only this machine can connect ({settings.server.host})")
    uvloop.run(_main(settings, as_json))


async def _main(settings: "Settings", as_json: bool) -> None:
    from penstock.serving import up as run_up

    ending = _Ending()

    def on_ready(addresses: "Addresses") -> None:
        ending.is_ready = True
        data = {"event": "ready", "api": addresses.api, "query": addresses.query, "pid": os.getpid()}
        emit(data, as_json=as_json, text=f"api    {addresses.api}\nquery  {addresses.query}\nready")

    try:
        await run_up(settings, ending.asked, on_ready)
    except asyncio.CancelledError:
        if not ending.asked.is_set():
            raise


class _Ending:
    """What SIGINT and SIGTERM mean: stop once it runs, give up while it starts, leave at once when asked twice."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.is_ready = False
        self._task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.asked.is_set():
            os._exit(130)  # the database recovers by itself
        self.asked.set()
        if self._task is not None and not self.is_ready:  # perhaps it waits for somebody's lock
            self._task.cancel()
