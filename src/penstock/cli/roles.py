"""`penstock serve` and `penstock work`: one role alone, as it runs in a pod of its own."""

import os
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import ConfigOption, DataDirOption, HostOption, JsonOption, emit
from penstock.cli.serving import loading, serve

if TYPE_CHECKING:
    from penstock.settings import Settings

serve_app = typer.Typer(help="Serve one role alone.", no_args_is_help=True, rich_markup_mode=None)
work_app = typer.Typer(help="Run the workers of one role.", no_args_is_help=True, rich_markup_mode=None)


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
        port: Annotated[
            int | None, typer.Option(help="Port of the API; 0 takes a free one.", show_default="8080")
        ] = None,
        json: JsonOption = False,
    ) -> None:
        settings = _settings(config, {"data_dir": data_dir, "server.host": host, "server.port": port})

        with loading():
            from penstock.app import programs

        serve(settings, getattr(programs, program), tell_address("api", json))

    api.__doc__ = f"{about}, until Ctrl-C or SIGTERM."
    return api


serve_app.command("api")(_api("api", "Serve the API of all parts, without workers"))
serve_app.command("command-api")(_api("command_api", "Take updates of dictionaries in"))


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

    serve(settings, programs.query_api, tell_address("query", json))


def _work(role: WorkRole, about: str) -> Callable[..., None]:
    def work(
        config: ConfigOption = None,
        data_dir: DataDirOption = None,
        host: HostOption = None,
        port: Annotated[int, typer.Option(help="Port of its health and metrics; 0 takes a free one.")] = 0,
        json: JsonOption = False,
    ) -> None:
        from functools import partial

        settings = _settings(config, {"data_dir": data_dir, "server.host": host, "server.port": port})

        with loading():
            from penstock.app import programs

        program = programs.work_harvest if role is WorkRole.HARVEST else partial(programs.work, role.value)
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
    port: Annotated[int, typer.Option(help="Port of its health and metrics; 0 takes a free one.")] = 0,
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
        serve(settings, partial(programs.work_flows_remotely, url, wanted), tell_address("health", json))
    else:
        serve(settings, partial(programs.work_flows, wanted), tell_address("health", json))


def _settings(config: Any, overrides: dict[str, Any]) -> "Settings":
    """Loaded before the program is, which takes a while: what is wrong with them is said at once."""
    from penstock.settings import load_settings

    return load_settings(config, overrides=overrides)


def tell_address(name: str, as_json: bool) -> Callable[[str], None]:
    def on_ready(address: str) -> None:
        data = {"event": "ready", "api": address, "pid": os.getpid()}
        emit(data, as_json=as_json, text=f"{name}    {address}\nready")

    return on_ready
