"""`penstock dict`: change dictionaries, and see what became of it, asked of a running server."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID, uuid4

import typer

from penstock.cli.output import JsonOption, emit, say, table
from penstock.cli.server_client import URL, UrlOption, ask_refdata, moment, until
from penstock.kernel.errors import Invalid, PenstockError, TimedOut

if TYPE_CHECKING:
    from penstock.refdata.client import RefdataClient
    from penstock.refdata.contract import Command

app = typer.Typer(
    help="Change dictionaries, follow the changes, and read them.", no_args_is_help=True, rich_markup_mode=None
)
TenantArgument = Annotated[str, typer.Argument(help="Whose dictionary.", metavar="TENANT")]
CodeArgument = Annotated[str, typer.Argument(help="Its code.", metavar="DICT")]
RevisionOption = Annotated[int | None, typer.Option(help="The source's own revision; an older one is refused.")]
TimeoutOption = Annotated[float, typer.Option(min=0.05, help="Seconds to wait for the commit.")]
_POLL = 0.2


class Unfinished(StrEnum):
    """The states of updates that can be listed."""

    PENDING = "PENDING"
    FAILED = "FAILED"


@app.command()
def put(
    tenant: TenantArgument,
    code: CodeArgument,
    key: Annotated[str, typer.Argument(help="The item's key.")],
    payload: Annotated[str | None, typer.Argument(help="Its payload as JSON; - reads standard input.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the key instead.")] = False,
    revision: RevisionOption = None,
    event_id: Annotated[UUID | None, typer.Option(help="Makes a repeated command count once.")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait for the commit.")] = False,
    timeout: TimeoutOption = 10,
    url: UrlOption = URL,
    json: JsonOption = False,
) -> None:
    """Put one item into a dictionary, or delete one; prints the version it is committed under."""
    from penstock.refdata import item_files

    if (payload is None) != delete:
        raise Invalid("PAYLOAD_MISSING", "give a payload, or --delete", hint="penstock dict put --help")
    text = sys.stdin.read() if payload == "-" else payload
    command = item_files.delta_commands(code, [item_files.item(key, text)], revision)[0]
    command.event_id = event_id or uuid4()
    told = ask_refdata(url, lambda client: _sent(client, tenant, [command], timeout=None if no_wait else timeout))
    emit(told, as_json=json, text=_ended(told))


@app.command("import")
def import_file(
    tenant: TenantArgument,
    code: CodeArgument,
    file: Annotated[Path, typer.Argument(help="JSON, JSON lines (.jsonl) or CSV (.csv).")],
    key: Annotated[str | None, typer.Option(help="The column of a CSV that is the key.")] = None,
    delta: Annotated[
        bool, typer.Option("--delta", help="Add, change and delete items; without it the file is all there is.")
    ] = False,
    revision: RevisionOption = None,
    allow_drop: Annotated[
        bool, typer.Option("--allow-drop", help="It is meant, should most items go (maxDropPercent).")
    ] = False,
    timeout: TimeoutOption = 300,
    url: UrlOption = URL,
    json: JsonOption = False,
) -> None:
    """Make a file's items the content of a dictionary: all of them, under one version, or none.

    With --delta a large file goes in several commands, each a version of its own.
    """
    from penstock.refdata import item_files

    items = item_files.read_items(file, key)
    if delta:
        commands = item_files.delta_commands(code, items, revision)
    else:
        commands = item_files.snapshot_commands(code, items, uuid4(), revision)
    for command in commands:
        command.event_id, command.allow_row_drop = uuid4(), allow_drop
    told = ask_refdata(url, lambda client: _sent(client, tenant, commands, timeout=timeout))
    emit({**told, "items": len(items)}, as_json=json, text=f"{len(items)} items, {_ended(told)}")


@app.command()
def status(
    tenant: TenantArgument,
    event_id: Annotated[UUID | None, typer.Argument(help="An update; without one, those not committed.")] = None,
    status: Annotated[Unfinished, typer.Option(help="Which are listed.")] = Unfinished.FAILED,
    code: Annotated[str | None, typer.Option("--dict", help="Only of this dictionary.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    url: UrlOption = URL,
    json: JsonOption = False,
) -> None:
    """Show how an update stands, or which failed or are under way."""
    if event_id is not None:
        told = ask_refdata(url, lambda client: client.update(tenant, event_id))
        emit(told, as_json=json, text=_ended(told))
        return
    told = ask_refdata(url, lambda client: client.updates(tenant, status=status.value, dictCode=code, limit=limit))
    rows = [[moment(one["updatedAt"]), one["dictCode"], one["eventId"], _reason(one)] for one in told["updates"]]
    text = table([["updated", "dict", "eventId", "why"], *rows]) if rows else f"no update is {status.value}"
    emit(told, as_json=json, text=f"{text}\n… and more: raise --limit" if told["next"] else text)


@app.command()
def history(
    tenant: TenantArgument,
    code: CodeArgument,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: UrlOption = URL,
    json: JsonOption = False,
) -> None:
    """Show the versions of a dictionary and what made them, the latest first."""
    told = ask_refdata(url, lambda client: client.history(tenant, code, limit=limit))
    rows = [_version(one) for one in told["versions"]]
    head = ["version", "committed", "type", "source", "items", "keys"]
    text = table([head, *rows]) if rows else f"{code} has no version yet"
    emit(told, as_json=json, text=f"{text}\n… and more: raise --limit" if told["next"] else text)


async def _sent(
    client: "RefdataClient", tenant: str, commands: "list[Command]", *, timeout: float | None
) -> dict[str, Any]:
    """How the last of *commands* stands, once all of them have ended; without a *timeout*, as it stands now."""
    from time import monotonic

    deadline, sent = monotonic() + (timeout or 0), list[str]()
    for number, command in enumerate(commands, start=1):
        if len(commands) > 1:
            say(f"sending {number} of {len(commands)}")
        sent.append(await _submitted(client, tenant, command, waits=timeout is not None and len(commands) == 1))
    if timeout is None:
        return _judged(await client.update(tenant, sent[-1]))
    ends = [await _end_of(client, tenant, event_id, deadline - monotonic()) for event_id in sent]
    return ends[-1]


async def _submitted(client: "RefdataClient", tenant: str, command: "Command", *, waits: bool) -> str:
    """The id under which a command was taken in, also when it is known already that it failed."""
    try:
        return str((await client.submit(tenant, command, waits=waits))["eventId"])
    except Invalid as error:
        if "eventId" not in error.details:
            raise
        return str(error.details["eventId"])


def _judged(told: dict[str, Any]) -> dict[str, Any]:
    """*told*, unless it failed: then so does the command."""
    if told["status"] == "FAILED":
        raise PenstockError(told["errorCode"], f"the update failed, {_reason(told)}", eventId=told["eventId"])
    return told


async def _end_of(client: "RefdataClient", tenant: str, event_id: str, timeout: float) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        told = _judged(await client.update(tenant, event_id))
        return told if told["status"] == "COMMITTED" else None

    def late() -> TimedOut:
        hint = f"it goes on: penstock dict status {tenant} {event_id}"
        return TimedOut("NOT_YET_COMMITTED", "the commit takes longer", hint=hint, eventId=event_id)

    return await until(look, timeout, late, every=_POLL)


def _ended(told: Mapping[str, Any]) -> str:
    if told["status"] == "COMMITTED":
        return f"committed as version {told['committedVersion']}  (event {told['eventId']})"
    reason = f": {_reason(told)}" if told["status"] == "FAILED" else ""
    return f"{told['status'].lower()}{reason}  (event {told['eventId']})"


def _reason(told: Mapping[str, Any]) -> str:
    return f"{told['errorCode']}: {told['error']}" if told.get("errorCode") else ""


def _version(one: Mapping[str, Any]) -> list[str]:
    keys = "all" if one["keys"] is None else ", ".join(one["keys"][:5]) + (" …" if len(one["keys"]) > 5 else "")
    return [
        str(one["version"]), moment(one["committedAt"]), one["eventType"], one["source"], str(one["items"]), keys,
    ]  # fmt: skip
