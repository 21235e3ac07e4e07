"""`penstock status` and `penstock events`: all parts of a running server, on one screen and in one stream."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.server_address import find_server
from penstock.cli.server_client import ask_overview
from penstock.cli.terminal.options import JsonOption, UrlOption
from penstock.cli.terminal.output import emit, printable, table, time_text
from penstock.overview.contract import LAST_LIMIT, Part

if TYPE_CHECKING:
    from penstock.overview.client import OverviewClient

_OK = "OK"


def status(url: UrlOption = None, json: JsonOption = False) -> None:
    """Say on one screen what is late or broken, and what to do about it. Exit code 1 when something is."""
    told = ask_overview(url, lambda client: client.status())
    emit(told, as_json=json, text=_screen(told, find_server(url).url))
    sys.exit(0 if told["status"] == _OK else 1)


def _screen(told: Mapping[str, Any], url: str) -> str:
    found = [(part["part"], one) for part in told["parts"] for one in part["issues"]]
    # What is broken first, each with its next step on a line of its own: it is to be copied.
    found.sort(key=lambda one: one[1]["severity"] != "BROKEN")
    lines = [f"{told['status']}  Penstock {told['version']} at {url}, {time_text(told['at'])}", ""]
    lines.append(table([[part["part"], part["summary"]] for part in told["parts"]]))
    for part, one in found:
        lines += ["", f"{one['severity']}  {part}  {printable(one['subject'])}: {printable(one['problem'])}"]
        if one["hint"]:
            lines.append(f"        → {printable(one['hint'])}")
    return "\n".join(lines if found else [*lines, "", "nothing is late or broken"])


def events(
    part: Annotated[list[Part] | None, typer.Option(help="Only of this part; may be given several times.")] = None,
    subject: Annotated[str, typer.Option(help="Only subjects that begin so: a file, a run, tenant/dictionary.")] = "",
    last: Annotated[int, typer.Option(min=0, max=LAST_LIMIT, help="Begin with so many moves already made.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with moves as they are made.")] = False,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Tell every move of every part: what, when, by whom, why. With --json, a document a line."""

    async def tell(client: "OverviewClient") -> None:
        import orjson

        asked = [one.value for one in part or ()]
        async for event in client.events(parts=asked, subject=subject, last=last, follow=follow):
            sys.stdout.write(f"{orjson.dumps(event).decode() if json else _line(event)}\n")
            sys.stdout.flush()

    ask_overview(url, tell)


def _line(event: Mapping[str, Any]) -> str:
    move = f"{event['from']} → {event['to']}" if event["from"] else f"→ {event['to']}"
    because = f": {event['reason']}" if event["reason"] else ""
    told = f"{time_text(event['at'])}  {event['machine']}  {event['subject']}  {move}  by {event['actor']}{because}"
    return printable(told)
