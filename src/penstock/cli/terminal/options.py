"""Options and arguments that several commands share, with one name, one help text and one meaning."""

import getpass
import re
import socket
from pathlib import Path
from typing import Annotated

import typer

_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.IGNORECASE)
_SECONDS = (86_400, 3_600, 60, 1)


def parse_duration(text: str | float) -> float:
    """Return the seconds of a duration: `300`, or ISO 8601 such as `PT5M`."""
    if isinstance(text, int | float):
        return float(text)
    found = _DURATION.fullmatch(text.strip())
    if found and any(found.groups()):
        return sum(float(number) * unit for number, unit in zip(found.groups(), _SECONDS, strict=True) if number)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a duration, e.g. 300 or PT5M")
    return seconds


def resolve_operator(name: str | None) -> str:
    """Return the name recorded in the history: *name*, else user@host."""
    if name:
        return name
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a passwd entry
        user = "operator"
    return f"{user}@{socket.gethostname()}"


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        envvar="PENSTOCK_CONFIG",
        help="Configuration file.",
        show_default="./penstock.yaml if it exists",
    ),
]
DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="Directory of the embedded PostgreSQL and of stored objects.",
        show_default=".penstock",
    ),
]
HostOption = Annotated[
    str | None, typer.Option("--host", metavar="HOST", help="Address to listen on.", show_default="127.0.0.1")
]
ApiPortOption = Annotated[
    int | None,
    typer.Option(
        "--port", metavar="PORT", help="Port of the API; 0 takes a free port.", show_default="8080", min=0, max=65535
    ),
]
QueryPortOption = Annotated[
    int | None,
    typer.Option(
        "--query-port",
        metavar="PORT",
        help="Port of the query server; 0 takes a free port.",
        show_default="8081",
        min=0,
        max=65535,
    ),
]
HealthPortOption = Annotated[
    int,
    typer.Option(
        "--port", metavar="PORT", help="Port of the health and metrics routes; 0 takes a free port.", min=0, max=65535
    ),
]

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Address of the API; PENSTOCK_TOKEN is sent as a bearer token. [env: PENSTOCK_URL]",
        show_default="server.port of the configuration, else http://127.0.0.1:8080",
    ),
]
QueryUrlOption = Annotated[
    str | None,
    typer.Option(
        "--query-url",
        metavar="URL",
        help="Address of the query server; PENSTOCK_TOKEN is sent as a bearer token. [env: PENSTOCK_QUERY_URL]",
        show_default="server.query_port of the configuration, else http://127.0.0.1:8081",
    ),
]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the end, with progress on a terminal.")]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="DURATION",
        parser=parse_duration,
        help="Longest wait, in seconds or as PT5M; when it passes, the exit code is 124.",
    ),
]
AsOption = Annotated[
    str | None,
    typer.Option("--as", metavar="NAME", help="Name recorded in the history.", show_default="user@host"),
]
LimitOption = Annotated[int, typer.Option("--limit", metavar="N", help="Largest number of rows.", min=1, max=1000)]
ReasonOption = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Reason recorded in the history.")]
RunArgument = Annotated[str, typer.Argument(help="Id of the run.", metavar="RUN")]
