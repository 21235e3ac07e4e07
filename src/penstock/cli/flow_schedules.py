"""`penstock flow schedule`: when flows run by themselves; asks a running server."""

from typing import Annotated, Any

import typer

from penstock.cli.output import JsonOption, emit, printable, say, table
from penstock.cli.server_client import URL, UrlOption, ask_flows, moment

app = typer.Typer(help="See and pause when flows run by themselves.", no_args_is_help=True, rich_markup_mode=None)
FlowArgument = Annotated[str, typer.Argument(help="The flow's name.", metavar="FLOW")]


@app.command("ls")
def list_schedules(url: UrlOption = URL, json: JsonOption = False) -> None:
    """Show when flows run next, and when they ran last."""
    told = ask_flows(url, lambda client: client.flows())
    for file, trouble in told["troubles"].items():
        say(printable(f"{file}: {trouble}"))
    scheduled = [one for one in told["flows"] if one["schedule"]]
    rows = [_row(one["name"], one["schedule"]) for one in scheduled]
    head = ["flow", "cron", "time zone", "next", "last run", "note"]
    text = table([head, *rows]) if rows else "no flow runs by itself; give one a `schedule`"
    emit(scheduled, as_json=json, text=text)


@app.command()
def pause(flow: FlowArgument, url: UrlOption = URL, json: JsonOption = False) -> None:
    """Do not start a flow by itself for the time being."""
    told = ask_flows(url, lambda client: client.pause(flow))
    emit(
        told, as_json=json, text=f"{flow} no longer runs by itself; `penstock flow schedule resume {flow}` changes that"
    )


@app.command()
def resume(flow: FlowArgument, url: UrlOption = URL, json: JsonOption = False) -> None:
    """Start a flow by itself again; what passed meanwhile is not caught up."""
    told = ask_flows(url, lambda client: client.unpause(flow))
    emit(told, as_json=json, text=f"{flow} runs by itself again, next: {_next(told['schedule'])}")


def _row(name: str, schedule: dict[str, Any]) -> list[str]:
    last, note = schedule["lastRun"] or "never", schedule["note"] or ""
    return [name, schedule["cron"], schedule["timezone"], _next(schedule), last, note]


def _next(schedule: dict[str, Any]) -> str:
    if schedule["paused"]:
        return "paused"
    return f"{moment(schedule['next'][0])} UTC" if schedule["next"] else "never"
