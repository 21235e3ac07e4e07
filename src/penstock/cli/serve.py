"""`penstock up`, `penstock serve` and `penstock work`: everything in one place, or one role alone; and their end."""

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
)
from penstock.cli.terminal.output import emit, print_message

if TYPE_CHECKING:
    from penstock.app.programs import Addresses
    from penstock.settings import Settings

A = TypeVar("A")
Role = Callable[["Settings", asyncio.Event, Callable[[A], None]], Awaitable[None]]


@contextmanager
def loading() -> Iterator[None]:
    """Modules that are loaded meanwhile stay for good: nobody looks for garbage among them, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def serve(settings: "Settings", role: Role[A], on_ready: Callable[[A], None]) -> None:
    """Run *role* until SIGINT or SIGTERM; *on_ready* tells where it listens."""
    import uvloop

    from penstock.kernel.telemetry.build import code_commit
    from penstock.kernel.telemetry.telemetry import configure_logging

    code_commit()  # a checkout asks git; later that would be on the event loop
    configure_logging(settings.telemetry.log_level, settings.telemetry.log_format)
    if settings.auth.jwt is None:
        print_message(f"no authentication is set, so only this machine can connect ({settings.server.host})")
    uvloop.run(_main(settings, role, on_ready))


async def _main(settings: "Settings", role: Role[A], on_ready: Callable[[A], None]) -> None:
    from penstock.kernel.telemetry.log_level import LOG_LEVEL

    ending = _Shutdown()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, LOG_LEVEL.toggle_debugging)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # until somebody looks at the configuration

    def ready(addresses: A) -> None:
        ending.is_ready = True
        on_ready(addresses)

    try:
        await role(settings, ending.asked, ready)
    except asyncio.CancelledError:
        if not ending.asked.is_set():
            raise


class _Shutdown:
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


serve_app = CommandGroup(help="Serve one role alone.")
work_app = CommandGroup(help="Run the workers of one role.")


class WorkRole(StrEnum):
    """The roles that work."""

    KAFKA_ADAPTER = "kafka-adapter"
    APPLY = "apply"
    RELAY = "relay"
    HARVEST = "harvest"


@serve_app.callback()
def _serve() -> None:
    """Serve one role alone."""


def _api(program: str, about: str) -> Callable[..., None]:
    def api(
        config: ConfigOption = None,
        data_dir: DataDirOption = None,
        host: HostOption = None,
        port: ApiPortOption = None,
        json: JsonOption = False,
    ) -> None:
        settings = _settings(config, {"data_dir": data_dir, "server.host": host, "server.port": port})

        with loading():
            from penstock.app import programs

        serve(settings, getattr(programs, program), tell_address("api", json))

    api.__doc__ = f"{about}, until Ctrl-C or SIGTERM."
    return api


serve_app.command("api")(_api("run_api", "Serve the API of all parts, without workers"))
serve_app.command("command-api")(_api("run_command_api", "Take updates of dictionaries in"))


@serve_app.command("query-api")
def query_api(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: HostOption = None,
    port: Annotated[
        int | None, typer.Option(help="Port it serves on; 0 takes a free one.", show_default="8081")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Processes that serve.", show_default="1")] = None,
    json: JsonOption = False,
) -> None:
    """Serve dictionaries from memory, until Ctrl-C or SIGTERM."""
    overrides = {"data_dir": data_dir, "server.host": host, "server.query_port": port}
    settings = _settings(config, {**overrides, "refdata.query.processes": processes})

    with loading():
        from penstock.app import programs

    serve(settings, programs.run_query_api, tell_address("query", json))


def _work(role: WorkRole, about: str) -> Callable[..., None]:
    def work(
        config: ConfigOption = None,
        data_dir: DataDirOption = None,
        host: HostOption = None,
        port: HealthPortOption = 0,
        json: JsonOption = False,
    ) -> None:
        from functools import partial

        settings = _settings(config, {"data_dir": data_dir, "server.host": host, "server.port": port})

        with loading():
            from penstock.app import programs

        program = (
            programs.run_harvest_workers if role is WorkRole.HARVEST else partial(programs.run_workers, role.value)
        )
        serve(settings, program, tell_address("health", json))

    work.__doc__ = f"{about}, until Ctrl-C or SIGTERM."
    return work


_ABOUT = {
    WorkRole.KAFKA_ADAPTER: "Turn the messages of other topics into updates",
    WorkRole.APPLY: "Apply updates to PostgreSQL",
    WorkRole.RELAY: "Tell the pods of every commit",
    WorkRole.HARVEST: "Plan, fetch and consolidate the runs of feeds",
}
for _role, _about in _ABOUT.items():
    work_app.command(_role.value)(_work(_role, _about))


@work_app.command("flows")
def flows(
    kinds: Annotated[list[str] | None, typer.Option("--kinds", help="Only these; may come again.")] = None,
    module: Annotated[
        list[str] | None, typer.Option("--module", help="Python with workers, besides flows.modules; may come again.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="Get steps from this server, not from the database; only those of modules."),
    ] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: HostOption = None,
    port: HealthPortOption = 0,
    json: JsonOption = False,
) -> None:
    """Do the steps of flows, until Ctrl-C or SIGTERM."""
    from functools import partial

    with loading():
        from penstock.app import programs

    settings = _settings(config, {"data_dir": data_dir, "server.host": host, "server.port": port})
    if module:
        both = [*settings.flows.modules, *module]
        settings = settings.model_copy(update={"flows": settings.flows.model_copy(update={"modules": both})})
    wanted = [kind for some in kinds or () for kind in some.split(",")]
    if url is not None:
        serve(settings, partial(programs.run_remote_flow_workers, url, wanted), tell_address("health", json))
    else:
        serve(settings, partial(programs.run_flow_workers, wanted), tell_address("health", json))


def _settings(config: Any, overrides: dict[str, Any]) -> "Settings":
    """Loaded before the program is, which takes a while: what is wrong with them is said at once."""
    from penstock.settings import load_settings

    return load_settings(config, overrides=overrides)


def tell_address(name: str, as_json: bool) -> Callable[[str], None]:
    def on_ready(address: str) -> None:
        data = {"event": "ready", "api": address, "pid": os.getpid()}
        emit(data, as_json=as_json, text=f"{name}    {address}\nready")

    return on_ready


def up(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    host: HostOption = None,
    port: ApiPortOption = None,
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

    serve(settings, programs.run_up, on_ready)
