"""`penstock dict`: change dictionaries and follow the changes on a running server; read them from a query pod."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID, uuid4

import typer

from penstock.cli.server_client import ask_pod, ask_refdata, poll_until
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import JsonOption, QueryUrlOption, UrlOption
from penstock.cli.terminal.output import emit, print_message, table, time_text
from penstock.kernel.errors import Conflict, Invalid, PenstockError, TimedOut, Transient

if TYPE_CHECKING:
    from penstock.kernel.http.client import HttpResponse
    from penstock.refdata.client import PodClient, RefdataClient
    from penstock.refdata.contract import Command

app = CommandGroup(help="Change dictionaries, follow the changes, and read them.")
TenantArgument = Annotated[str, typer.Argument(help="Whose dictionary.", metavar="TENANT")]
CodeArgument = Annotated[str, typer.Argument(help="Its code.", metavar="DICT")]
VersionArgument = Annotated[int, typer.Argument(help="A version that is kept.", metavar="VERSION", min=0)]
RevisionOption = Annotated[int | None, typer.Option(help="The source's own revision; an older one is refused.")]
TimeoutOption = Annotated[float, typer.Option(min=0.05, help="Seconds to wait for the commit.")]
LeastOption = Annotated[
    int | None, typer.Option("--min-version", min=0, help="The answer must not be of a lower version.")
]
_COMMIT_POLL = 0.2  # seconds
_POD_POLL = 0.1


class IncompleteSnapshot(StrEnum):
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
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Put one item into a dictionary, or delete one; prints the version it is committed under."""
    from penstock.refdata import item_files

    if (payload is None) != delete:
        raise Invalid("PAYLOAD_MISSING", "give a payload, or --delete", hint="penstock dict put --help")
    text = sys.stdin.read() if payload == "-" else payload
    command = item_files.delta_commands(code, [item_files.item(key, text)], revision)[0]
    command.event_id = event_id or uuid4()
    told = ask_refdata(url, lambda client: _send(client, tenant, [command], timeout=None if no_wait else timeout))
    emit(told, as_json=json, text=_status_text(told))


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
    url: UrlOption = None,
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
    told = ask_refdata(url, lambda client: _send(client, tenant, commands, timeout=timeout))
    emit({**told, "items": len(items)}, as_json=json, text=f"{len(items)} items, {_status_text(told)}")


@app.command()
def status(
    tenant: TenantArgument,
    event_id: Annotated[UUID | None, typer.Argument(help="An update; without one, those not committed.")] = None,
    status: Annotated[IncompleteSnapshot, typer.Option(help="Which are listed.")] = IncompleteSnapshot.FAILED,
    code: Annotated[str | None, typer.Option("--dict", help="Only of this dictionary.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show how an update stands, or which failed or are under way."""
    if event_id is not None:
        told = ask_refdata(url, lambda client: client.update(tenant, event_id))
        emit(told, as_json=json, text=_status_text(told))
        return
    told = ask_refdata(url, lambda client: client.updates(tenant, status=status.value, dictCode=code, limit=limit))
    rows = [[time_text(one["updatedAt"]), one["dictCode"], one["eventId"], _reason(one)] for one in told["updates"]]
    text = table([["updated", "dict", "eventId", "why"], *rows]) if rows else f"no update is {status.value}"
    emit(told, as_json=json, text=f"{text}\n… and more: raise --limit" if told["next"] else text)


@app.command()
def history(
    tenant: TenantArgument,
    code: CodeArgument,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show the versions of a dictionary and what made them, the latest first."""
    told = ask_refdata(url, lambda client: client.history(tenant, code, limit=limit))
    rows = [_version_row(one) for one in told["versions"]]
    head = ["version", "committed", "type", "source", "items", "keys"]
    text = table([head, *rows]) if rows else f"{code} has no version yet"
    emit(told, as_json=json, text=f"{text}\n… and more: raise --limit" if told["next"] else text)


@app.command()
def get(
    tenant: TenantArgument,
    code: CodeArgument,
    keys: Annotated[list[str], typer.Argument(help="One key, or several.", metavar="KEY…")],
    least: LeastOption = None,
    query_url: QueryUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Print one item's payload, or several items of one version by their keys; every digit as it is kept."""
    import msgspec
    import orjson
    from msgspec import Raw

    if len(keys) == 1:
        answer = ask_pod(query_url, lambda pod: pod.item(tenant, code, keys[0], least=least))
        found, text = {"key": keys[0], "value": orjson.loads(answer.body)}, answer.body.decode()
    else:
        answer = ask_pod(query_url, lambda pod: pod.items(tenant, code, keys, least=least))
        told = orjson.loads(answer.body)
        found, text = told, bytes(msgspec.json.decode(answer.body, type=dict[str, Raw])["items"]).decode()
        if told["missing"]:
            print_message(f"not there: {', '.join(told['missing'])}")
    emit({**_origin(answer), **found}, as_json=json, text=text)


@app.command("all")
def read_all(
    tenant: TenantArgument,
    code: CodeArgument,
    least: LeastOption = None,
    query_url: QueryUrlOption = None,
    json: JsonOption = False,  # noqa: ARG001 - it is JSON in any case
) -> None:
    """Print every item of one version, as JSON lines; every digit as it is kept."""
    import msgspec
    from msgspec import Raw

    async def pages(pod: "PodClient") -> int:
        cursor, count = None, 0
        while True:
            answer = await pod.page(tenant, code, cursor=cursor, least=least)
            page = msgspec.json.decode(answer.body, type=dict[str, Raw])
            items = msgspec.json.decode(page["items"], type=list[Raw])
            for item in items:
                sys.stdout.write(bytes(item).decode() + "\n")
            cursor, count = msgspec.json.decode(page["next"]), count + len(items)
            if cursor is None:
                print_message(f"{count} items of version {_origin(answer)['version']}")
                return count

    ask_pod(query_url, pages)


@app.command()
def version(
    tenant: TenantArgument,
    code: CodeArgument,
    least: LeastOption = None,
    query_url: QueryUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Print the version that is read, and how many items it has."""
    import orjson

    answer = ask_pod(query_url, lambda pod: pod.version(tenant, code, least=least))
    told = orjson.loads(answer.body)
    pinned = ", pinned" if told.get("isPinned") else ""
    items = f"  ({told['items']} items{pinned})" if "items" in told else ""
    emit({**_origin(answer), **told}, as_json=json, text=f"{told['version']}{items}{_age(answer)}")


@app.command()
def lag(
    tenant: TenantArgument,
    code: CodeArgument,
    url: UrlOption = None,
    query_url: QueryUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Print how many versions a pod is behind what is committed."""
    held = ask_pod(query_url, lambda pod: pod.version(tenant, code))
    known = ask_refdata(url, lambda client: client.history(tenant, code, limit=1))
    at = _origin(held)["version"]
    committed = known["versions"][0]["version"] if known["versions"] else at
    told = {"version": at, "committedVersion": committed, "lag": max(committed - at, 0)}
    text = f"{told['lag']} behind: the pod is at {at}, {committed} is committed{_age(held)}"
    emit({**_origin(held), **told}, as_json=json, text=text)


@app.command()
def wait(
    tenant: TenantArgument,
    code: CodeArgument,
    version: Annotated[int, typer.Option("--version", min=0, help="The version to wait for.")],
    timeout: Annotated[float, typer.Option(min=0.05, help="Seconds to wait.")] = 30,
    query_url: QueryUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Wait until a pod can answer from a version or a later one."""
    last = PenstockError("", "")

    async def look(pod: "PodClient") -> "HttpResponse | None":
        nonlocal last
        try:
            return await pod.version(tenant, code, least=version)
        except (Transient, Conflict) as error:
            last = error
            return None

    def late() -> TimedOut:
        return TimedOut("VERSION_NOT_READABLE", f"version {version} cannot be read yet: {last.message}", hint=last.hint)

    answer = ask_pod(query_url, lambda pod: poll_until(lambda: look(pod), timeout, late, interval=_POD_POLL))
    told = _origin(answer)
    emit(told, as_json=json, text=f"version {told['version']} is read ({told['source']})")


@app.command()
def audit(
    tenant: TenantArgument, code: CodeArgument, query_url: QueryUrlOption = None, json: JsonOption = False
) -> None:
    """Compare a pod's items with the primary's; exit code 1 when they disagree."""
    told = ask_pod(query_url, lambda pod: pod.audit(tenant, code))
    parts = [f"{name}: {', '.join(told[name])}" for name in ("missing", "extra", "different") if told[name]]
    said = "agrees with the primary" if told["agrees"] else "DISAGREES with the primary"
    text = f"version {told['version']}, {told['items']} items, {said}"
    emit(told, as_json=json, text="\n".join([text, *parts]))
    if not told["agrees"]:
        raise typer.Exit(1)


@app.command()
def retained(tenant: TenantArgument, code: CodeArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """List the versions that can be pinned or gone back to, the latest first."""
    told = ask_refdata(url, lambda client: client.retained(tenant, code))
    rows = [
        [str(one["version"]), time_text(one["retainedAt"]), str(one["items"]), "pinned" if one["isPinned"] else ""]
        for one in told["versions"]
    ]
    text = table([["version", "retained", "items", ""], *rows]) if rows else f"no version of {code} is retained"
    emit(told, as_json=json, text=text)


@app.command()
def retain(tenant: TenantArgument, code: CodeArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Keep the last version."""
    told = ask_refdata(url, lambda client: client.retain(tenant, code))
    emit(told, as_json=json, text=f"version {told['version']} is retained")


@app.command()
def pin(
    tenant: TenantArgument,
    code: CodeArgument,
    version: VersionArgument,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Have readers get a version that is retained, whatever is committed later, until it is unpinned."""
    told = ask_refdata(url, lambda client: client.pin(tenant, code, version))
    emit(told, as_json=json, text=f"readers get version {version}; `penstock dict unpin {tenant} {code}` ends it")


@app.command()
def unpin(tenant: TenantArgument, code: CodeArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Have readers get the last version again."""
    told = ask_refdata(url, lambda client: client.unpin(tenant, code))
    emit(told, as_json=json, text=f"version {told['version']} is pinned no more; readers get the last one")


@app.command()
def rollback(
    tenant: TenantArgument,
    code: CodeArgument,
    version: VersionArgument,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Make a dictionary what it was in a version that is kept, as a new version."""
    told = ask_refdata(url, lambda client: client.roll_back(tenant, code, version))
    if "committedVersion" in told:
        text = f"version {version} again, committed as version {told['committedVersion']}"
    else:
        text = f"under way: penstock dict status {tenant} {told['eventId']}"
    emit(told, as_json=json, text=text)


async def _send(
    client: "RefdataClient", tenant: str, commands: "list[Command]", *, timeout: float | None
) -> dict[str, Any]:
    """Return the last update once all *commands* are committed; without a *timeout*, as it is now."""
    from time import monotonic

    deadline, sent = monotonic() + (timeout or 0), list[str]()
    for number, command in enumerate(commands, start=1):
        if len(commands) > 1:
            print_message(f"sending {number} of {len(commands)}")
        sent.append(await _submit(client, tenant, command, waits=timeout is not None and len(commands) == 1))
    if timeout is None:
        return _raise_if_failed(await client.update(tenant, sent[-1]))
    ends = [await _wait_for_commit(client, tenant, event_id, deadline - monotonic()) for event_id in sent]
    return ends[-1]


async def _submit(client: "RefdataClient", tenant: str, command: "Command", *, waits: bool) -> str:
    """Return the id of the update, also if the server already knows that it failed."""
    try:
        return str((await client.submit(tenant, command, waits=waits))["eventId"])
    except Invalid as error:
        if "eventId" not in error.details:
            raise
        return str(error.details["eventId"])


def _raise_if_failed(told: dict[str, Any]) -> dict[str, Any]:
    """Return the update unless it failed."""
    if told["status"] == "FAILED":
        raise PenstockError(told["errorCode"], f"the update failed, {_reason(told)}", eventId=told["eventId"])
    return told


async def _wait_for_commit(client: "RefdataClient", tenant: str, event_id: str, timeout: float) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        told = _raise_if_failed(await client.update(tenant, event_id))
        return told if told["status"] == "COMMITTED" else None

    def late() -> TimedOut:
        hint = f"it goes on: penstock dict status {tenant} {event_id}"
        return TimedOut("NOT_YET_COMMITTED", "the commit takes longer", hint=hint, eventId=event_id)

    return await poll_until(look, timeout, late, interval=_COMMIT_POLL)


def _status_text(told: Mapping[str, Any]) -> str:
    if told["status"] == "COMMITTED":
        return f"committed as version {told['committedVersion']}  (event {told['eventId']})"
    reason = f": {_reason(told)}" if told["status"] == "FAILED" else ""
    return f"{told['status'].lower()}{reason}  (event {told['eventId']})"


def _reason(told: Mapping[str, Any]) -> str:
    return f"{told['errorCode']}: {told['error']}" if told.get("errorCode") else ""


def _version_row(one: Mapping[str, Any]) -> list[str]:
    keys = "all" if one["keys"] is None else ", ".join(one["keys"][:5]) + (" …" if len(one["keys"]) > 5 else "")
    committed, items = time_text(one["committedAt"]), str(one["items"])
    return [str(one["version"]), committed, one["eventType"], one["source"], items, keys]


def _origin(answer: "HttpResponse") -> dict[str, Any]:
    from penstock.refdata.client import version_of

    return {"version": version_of(answer), "source": answer.headers["X-Data-Source"]}


def _age(answer: "HttpResponse") -> str:
    age = answer.headers.get("X-Data-Age")
    return f"  (the primary is out of sight for {age} s)" if age else ""
