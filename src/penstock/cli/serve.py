"""`penstock up`, `penstock serve` and `penstock work`: all roles in one process, or one role, until a signal."""

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import (
    ApiPortOption,
    ConfigOption,
    DataDirOption,
    HealthPortOption,
    HostOption,
    JsonOption,
    QueryPortOption,
)
from penstock.cli.terminal.output import emit, print_message

if TYPE_CHECKING:
    from penstock.app.programs import Addresses
    from penstock.settings import Settings

A = TypeVar("A")
Role = Callable[["Settings", asyncio.Event, Callable[[A], None]], Awaitable[None]]


@contextmanager
def load_program() -> Iterator[None]:
    """Import a program without garbage collection, and exclude its modules from later collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def serve(settings: "Settings", role: Role[A], on_ready: Callable[[A], None]) -> None:
    """Run *role* until SIGINT or SIGTERM; call *on_ready* with its addresses."""
    import uvloop

    from penstock.kernel.telemetry.build import find_code_commit
    from penstock.kernel.telemetry.telemetry import configure_logging

    find_code_commit()  # runs git in a checkout; later that would block the event loop
    configure_logging(settings.telemetry.log_level, settings.telemetry.log_format)
    if settings.auth.jwt is None:
        print_message(
            f"auth.jwt is not set: no authentication, connections from this machine only ({settings.server.host})"
        )
    uvloop.run(_run_role(settings, role, on_ready))


async def _run_role(settings: "Settings", role: Role[A], on_ready: Callable[[A], None]) -> None:
    from penstock.kernel.telemetry.log_level import LOG_LEVEL

    shutdown = _Shutdown()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, LOG_LEVEL.toggle_debugging)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # until the program reloads its configuration on it

    def report_ready(addresses: A) -> None:
        shutdown.is_ready = True
        on_ready(addresses)

    try:
        await role(settings, shutdown.requested, report_ready)
    except asyncio.CancelledError:
        if not shutdown.requested.is_set():
            raise


class _Shutdown:
    """The response to SIGINT and SIGTERM: stop gracefully, cancel a start, and exit at once on a second signal."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.is_ready = False
        self._task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.requested.is_set():
            os._exit(130)  # the database recovers automatically
        self.requested.set()
        if self._task is not None and not self.is_ready:  # it may wait for a lock
            self._task.cancel()


serve_app = CommandGroup(help="Serve one API in its own process.")
work_app = CommandGroup(help="Run the workers of one role in their own process.")


class WorkRole(StrEnum):
    """The roles of `penstock work`, except flows."""

    KAFKA_ADAPTER = "kafka-adapter"
    APPLY = "apply"
    RELAY = "relay"
    HARVEST = "harvest"


@serve_app.callback()
def _serve() -> None:
    """Serve one API in its own process."""


def _make_api_command(program: str, help_text: str) -> Callable[..., None]:
    def api(
        config: ConfigOption = None,
        data_dir: DataDirOption = None,
        host: HostOption = None,
        port: ApiPortOption = None,
        json: JsonOption = False,
    ) -> None:
        settings = _load_settings(config, {"data_dir": data_dir, "server.host": host, "server.port": port})

        with load_program():
            from penstock.app import programs

        serve(settings, getattr(programs, program), print_address("api", json))

    api.__doc__ = f"{help_text}, until Ctrl-C or SIGTERM."
    return api


serve_app.command("api")(_make_api_command("run_api", "Serve the API of all parts, without workers"))
serve_app.command("command-api")(_make_api_command("run_command_api", "Serve the command API: updates of dictionaries"))


@serve_app.command("query-api")
def query_api(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: HostOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", help="Port of the query server; 0 takes a free port.", show_default="8081", min=0, max=65535
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", help="Number of serving processes.", show_default="1")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Serve the query API: dictionaries from memory, until Ctrl-C or SIGTERM."""
    overrides = {"data_dir": data_dir, "server.host": host, "server.query_port": port}
    settings = _load_settings(config, {**overrides, "refdata.query.processes": processes})

    with load_program():
        from penstock.app import programs

    serve(settings, programs.run_query_api, print_address("query", json))


def _make_worker_command(role: WorkRole, help_text: str) -> Callable[..., None]:
    def work(
        config: ConfigOption = None,
        data_dir: DataDirOption = None,
        host: HostOption = None,
        port: HealthPortOption = 0,
        json: JsonOption = False,
    ) -> None:
        from functools import partial

        settings = _load_settings(config, {"data_dir": data_dir, "server.host": host, "server.port": port})

        with load_program():
            from penstock.app import programs

        program = (
            programs.run_harvest_workers if role is WorkRole.HARVEST else partial(programs.run_workers, role.value)
        )
        serve(settings, program, print_address("health", json))

    work.__doc__ = f"{help_text}, until Ctrl-C or SIGTERM."
    return work


_WORKERS = {
    WorkRole.KAFKA_ADAPTER: "Convert messages of external topics to updates",
    WorkRole.APPLY: "Apply updates to PostgreSQL",
    WorkRole.RELAY: "Announce every commit to the pods",
    WorkRole.HARVEST: "Plan, fetch and consolidate the runs of feeds",
}
for _role, _help_text in _WORKERS.items():
    work_app.command(_role.value)(_make_worker_command(_role, _help_text))


@work_app.command("flows")
def flows(
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kinds", metavar="KIND", help="Only steps of this kind, repeatable; commas separate kinds."),
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(
            "--module", metavar="MODULE", help="Module or file with workers, besides flows.modules, repeatable."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Claim steps at this server instead of in the database; only the kinds of modules.",
        ),
    ] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: HostOption = None,
    port: HealthPortOption = 0,
    json: JsonOption = False,
) -> None:
    """Execute the steps of flows, until Ctrl-C or SIGTERM."""
    from functools import partial

    with load_program():
        from penstock.app import programs

    settings = _load_settings(config, {"data_dir": data_dir, "server.host": host, "server.port": port})
    if module:
        modules = [*settings.flows.modules, *module]
        settings = settings.model_copy(update={"flows": settings.flows.model_copy(update={"modules": modules})})
    names = [kind for value in kinds or () for kind in value.split(",")]
    if url is not None:
        serve(settings, partial(programs.run_remote_flow_workers, url, names), print_address("health", json))
    else:
        serve(settings, partial(programs.run_flow_workers, names), print_address("health", json))


def _load_settings(config: Any, overrides: dict[str, Any]) -> "Settings":
    """Load the settings before the program, whose import takes longer: errors are reported at once."""
    from penstock.settings import load_settings

    return load_settings(config, overrides=overrides)


def print_address(name: str, as_json: bool) -> Callable[[str], None]:
    """Return a function that prints the address of the API *name* and `ready`."""

    def on_ready(address: str) -> None:
        data = {"event": "ready", "api": address, "pid": os.getpid()}
        emit(data, as_json=as_json, text=f"{name}    {address}\nready")

    return on_ready


def up(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: HostOption = None,
    port: ApiPortOption = None,
    query_port: QueryPortOption = None,
    json: JsonOption = False,
) -> None:
    """Run all parts in one process, until Ctrl-C or SIGTERM.

    Prints the addresses of the servers, and `ready` when they accept requests. The embedded PostgreSQL stores its
    data in the data directory; a restart continues with this data, also after kill -9.
    """
    from penstock.settings import load_settings

    overrides = {"data_dir": data_dir, "server.host": host, "server.port": port, "server.query_port": query_port}
    settings = load_settings(config, overrides=overrides)

    with load_program():  # after the settings, whose errors are reported at once
        from penstock.app import programs

    def on_ready(addresses: "Addresses") -> None:
        data = {"event": "ready", "api": addresses.api, "query": addresses.query, "pid": os.getpid()}
        emit(data, as_json=json, text=f"api    {addresses.api}\nquery  {addresses.query}\nready")

    serve(settings, programs.run_up, on_ready)
