"""`penstock status` and `penstock events`: the problems and the events of all parts of a running server."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.server_address import find_server
from penstock.cli.server_client import ask_overview
from penstock.cli.suggestion import split_hint
from penstock.cli.terminal.options import JsonOption, UrlOption
from penstock.cli.terminal.output import emit, format_table, format_time, make_printable
from penstock.cli.terminal.style import colour_status
from penstock.overview.contract import LAST_LIMIT, Part

if TYPE_CHECKING:
    from penstock.overview.client import OverviewClient

_OK = "OK"


def status(url: UrlOption = None, json: JsonOption = False) -> None:
    """Show the status of all parts: each problem with the next command.

    The exit code is 0 if there is no problem, 1 otherwise.
    """
    report = ask_overview(url, lambda client: client.status())
    emit(report, as_json=json, text=_format_status(report, url))
    sys.exit(0 if report["status"] == _OK else 1)


def _format_status(report: Mapping[str, Any], url: str | None) -> str:
    issues = [(part["part"], issue) for part in report["parts"] for issue in part["issues"]]
    issues.sort(key=lambda issue: issue[1]["severity"] != "BROKEN")
    server, at = find_server(url).url, format_time(report["at"])
    lines = [f"{colour_status(report['status'])}  Penstock {report['version']} at {server}, {at}", ""]
    lines.append(format_table([[part["part"], part["summary"]] for part in report["parts"]]))
    for part, issue in issues:
        subject, problem = make_printable(issue["subject"]), make_printable(issue["problem"])
        lines += ["", f"{colour_status(issue['severity'])}  {part}  {subject}: {problem}"]
        lines += [
            f"        → {make_printable(step)}" for step in split_hint(issue["hint"] or "", url=url, query_url=None)
        ]
    return "\n".join(lines if issues else [*lines, "", "no problems"])


def events(
    part: Annotated[list[Part] | None, typer.Option(help="Only events of this part, repeatable.")] = None,
    subject: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Only subjects that start with this text: a file, a run, TENANT/DICT."),
    ] = "",
    last: Annotated[
        int, typer.Option(metavar="N", min=0, max=LAST_LIMIT, help="Number of past events to start with.")
    ] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new events, until Ctrl-C.")] = False,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Print the state changes of all parts: time, subject, change, actor and reason.

    With --json, each line is a JSON document.
    """

    async def print_events(client: "OverviewClient") -> None:
        import orjson

        parts = [name.value for name in part or ()]
        async for event in client.events(parts=parts, subject=subject, last=last, follow=follow):
            sys.stdout.write(f"{orjson.dumps(event).decode() if json else _format_event(event)}\n")
            sys.stdout.flush()

    ask_overview(url, print_events)


def _format_event(event: Mapping[str, Any]) -> str:
    move = f"{event['from']} → {event['to']}" if event["from"] else f"→ {event['to']}"
    reason = f": {event['reason']}" if event["reason"] else ""
    at, machine, subject, actor = format_time(event["at"]), event["machine"], event["subject"], event["actor"]
    return make_printable(f"{at}  {machine}  {subject}  {move}  by {actor}{reason}")
