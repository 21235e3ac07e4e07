"""`penstock dict`: change dictionaries and list their versions at a running server; read items from a query server."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID, uuid4

import typer

from penstock.cli.completion import complete_from_server
from penstock.cli.server_client import ask_pod, ask_refdata, poll_until
from penstock.cli.suggestion import make_pasteable
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import JsonOption, LimitOption, QueryUrlOption, TimeoutOption, UrlOption, WaitOption
from penstock.cli.terminal.output import RawJson, append_more_note, emit, format_table, format_time, print_message
from penstock.kernel.errors import Conflict, Invalid, PenstockError, TimedOut, Transient

if TYPE_CHECKING:
    from penstock.kernel.http.client import HttpResponse
    from penstock.refdata.client import PodClient, RefdataClient
    from penstock.refdata.contract import Command

app = CommandGroup(help="Change and read dictionaries, and manage their versions.")
TenantArgument = Annotated[str, typer.Argument(help="Tenant that owns the dictionary.", metavar="TENANT")]
_complete_code = complete_from_server(
    lambda: ask_refdata,
    lambda client, context: client.dictionaries(context.params["tenant"]),
    lambda found: [dictionary["dictCode"] for dictionary in found["dictionaries"]],
)
CodeArgument = Annotated[
    str, typer.Argument(help="Code of the dictionary.", metavar="DICT", autocompletion=_complete_code)
]
KeyArgument = Annotated[str, typer.Argument(help="Key of the item.", metavar="KEY")]
VersionArgument = Annotated[int, typer.Argument(help="A retained version.", metavar="VERSION", min=0)]
RevisionOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Revision of the source; a command with an older revision is rejected."),
]
EventIdOption = Annotated[
    UUID | None, typer.Option(metavar="UUID", help="Id of the command; a repeated command with this id counts once.")
]
MinVersionOption = Annotated[
    int | None,
    typer.Option(
        "--min-version", metavar="VERSION", min=0, help="Lowest version to accept; a server with a lower one refuses."
    ),
]
_COMMIT_POLL = 0.2  # seconds
_POD_POLL = 0.1


class IncompleteUpdate(StrEnum):
    """The states of updates that can be listed."""

    PENDING = "PENDING"
    FAILED = "FAILED"


@app.command("ls")
def list_dictionaries(tenant: TenantArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """List the dictionaries of a tenant with their committed versions."""
    found = ask_refdata(url, lambda client: client.dictionaries(tenant))
    rows = [_make_dictionary_row(dictionary) for dictionary in found["dictionaries"]]
    head = ["dict", "version", "committed", "pinned"]
    text = (
        format_table([head, *rows])
        if rows
        else f"tenant {tenant} has no dictionaries; refdata.dictionaries declares them"
    )
    emit(found, as_json=json, text=text)


@app.command()
def show(
    tenant: TenantArgument,
    code: CodeArgument,
    min_version: MinVersionOption = None,
    query_url: QueryUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Print the version of a dictionary that the query server serves, and its number of items."""
    import orjson

    response = ask_pod(query_url, lambda pod: pod.version(tenant, code, min_version=min_version))
    served = orjson.loads(response.body)
    pinned = ", pinned" if served.get("isPinned") else ""
    items = f", {served['items']} items{pinned}" if "items" in served else ""
    text = f"version {served['version']}{items}{_format_age(response)}"
    emit({**_read_origin(response), **served}, as_json=json, text=text)


@app.command()
def get(
    tenant: TenantArgument,
    code: CodeArgument,
    keys: Annotated[list[str], typer.Argument(help="Keys of the items.", metavar="KEY")],
    min_version: MinVersionOption = None,
    query_url: QueryUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Print the payload of an item, or of several items of one version; numbers keep every digit."""
    import msgspec
    from msgspec import Raw

    if len(keys) == 1:
        response = ask_pod(query_url, lambda pod: pod.item(tenant, code, keys[0], min_version=min_version))
        text = response.body.decode()
        data: dict[str, Any] = {"key": keys[0], "value": RawJson(text)}
    else:
        response = ask_pod(query_url, lambda pod: pod.items(tenant, code, keys, min_version=min_version))
        body = msgspec.json.decode(response.body, type=dict[str, Raw])
        text, missing = bytes(body["items"]).decode(), msgspec.json.decode(body["missing"], type=list[str])
        data = {name: RawJson(bytes(value).decode()) for name, value in body.items()}
        if missing:
            print_message(f"missing: {', '.join(missing)}")
    emit({**_read_origin(response), **data}, as_json=json, text=text)


@app.command("items")
def read_items(
    tenant: TenantArgument,
    code: CodeArgument,
    min_version: MinVersionOption = None,
    query_url: QueryUrlOption = None,
    json: JsonOption = False,  # noqa: ARG001 - the output is JSON in any case
) -> None:
    """Print all items of one version as JSON lines; numbers keep every digit."""
    import msgspec
    from msgspec import Raw

    async def print_pages(pod: "PodClient") -> int:
        cursor, count = None, 0
        while True:
            response = await pod.page(tenant, code, cursor=cursor, min_version=min_version)
            page = msgspec.json.decode(response.body, type=dict[str, Raw])
            items = msgspec.json.decode(page["items"], type=list[Raw])
            for item in items:
                sys.stdout.write(bytes(item).decode() + "\n")
            cursor, count = msgspec.json.decode(page["next"]), count + len(items)
            if cursor is None:
                print_message(f"{count} items of version {_read_origin(response)['version']}")
                return count

    ask_pod(query_url, print_pages)


@app.command()
def put(
    tenant: TenantArgument,
    code: CodeArgument,
    key: KeyArgument,
    payload: Annotated[
        str, typer.Argument(metavar="PAYLOAD", help="Payload of the item as JSON; - reads standard input.")
    ],
    revision: RevisionOption = None,
    event_id: EventIdOption = None,
    wait: WaitOption = True,
    timeout: TimeoutOption = 10,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Insert or replace an item, and print the version of the commit."""
    text = sys.stdin.read() if payload == "-" else payload
    _send_item(tenant, code, key, text, revision, event_id, timeout if wait else None, url, json)


@app.command()
def delete(
    tenant: TenantArgument,
    code: CodeArgument,
    key: KeyArgument,
    revision: RevisionOption = None,
    event_id: EventIdOption = None,
    wait: WaitOption = True,
    timeout: TimeoutOption = 10,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Delete an item, and print the version of the commit."""
    _send_item(tenant, code, key, None, revision, event_id, timeout if wait else None, url, json)


@app.command("import")
def import_file(
    tenant: TenantArgument,
    code: CodeArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON, JSON lines (.jsonl) or CSV (.csv).")],
    key: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of a CSV file that contains the key.")
    ] = None,
    delta: Annotated[
        bool,
        typer.Option("--delta", help="Insert, replace and delete single items; without it the file is the snapshot."),
    ] = False,
    revision: RevisionOption = None,
    allow_drop: Annotated[
        bool, typer.Option("--allow-drop", help="Allow more items to be removed than maxDropPercent.")
    ] = False,
    timeout: TimeoutOption = 300,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Replace the content of a dictionary with the items of a file: all of them under one version, or none.

    With --delta a large file is sent in several commands, each with its own version.
    """
    from penstock.refdata import item_files

    items = item_files.read_items(file, key)
    if delta:
        commands = item_files.make_delta_commands(code, items, revision)
    else:
        commands = item_files.make_snapshot_commands(code, items, uuid4(), revision)
    for command in commands:
        command.event_id, command.allow_row_drop = uuid4(), allow_drop
    update = ask_refdata(url, lambda client: _send(client, tenant, commands, timeout=timeout))
    emit({**update, "items": len(items)}, as_json=json, text=f"{len(items)} items, {_format_update(update)}")


@app.command()
def updates(
    tenant: TenantArgument,
    event_id: Annotated[
        UUID | None, typer.Argument(metavar="EVENT_ID", help="Id of one update; without it, incomplete updates.")
    ] = None,
    status: Annotated[IncompleteUpdate, typer.Option(help="Status of the listed updates.")] = IncompleteUpdate.FAILED,
    code: Annotated[str | None, typer.Option("--dict", metavar="DICT", help="Only updates of this dictionary.")] = None,
    limit: LimitOption = 100,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List the failed or pending updates of a tenant, or show one update."""
    if event_id is not None:
        update = ask_refdata(url, lambda client: client.update(tenant, event_id))
        emit(update, as_json=json, text=_format_update(update))
        return
    page = ask_refdata(url, lambda client: client.updates(tenant, status=status.value, dictCode=code, limit=limit))
    rows = [
        [format_time(update["updatedAt"]), update["dictCode"], update["eventId"], _format_reason(update)]
        for update in page["updates"]
    ]
    text = format_table([["updated", "dict", "event id", "error"], *rows]) if rows else f"no {status.value} updates"
    emit(page, as_json=json, text=append_more_note(text, has_more=page["next"] is not None))


@app.command()
def history(
    tenant: TenantArgument, code: CodeArgument, limit: LimitOption = 20, url: UrlOption = None, json: JsonOption = False
) -> None:
    """List the committed versions of a dictionary and their commands, newest first."""
    page = ask_refdata(url, lambda client: client.history(tenant, code, limit=limit))
    rows = [_make_version_row(version) for version in page["versions"]]
    head = ["version", "committed", "type", "source", "items", "keys"]
    text = format_table([head, *rows]) if rows else f"{code} has no version yet"
    emit(page, as_json=json, text=append_more_note(text, has_more=page["next"] is not None))


@app.command()
def lag(
    tenant: TenantArgument,
    code: CodeArgument,
    url: UrlOption = None,
    query_url: QueryUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Print by how many versions a query server is behind the last commit."""
    response = ask_pod(query_url, lambda pod: pod.version(tenant, code))
    versions = ask_refdata(url, lambda client: client.history(tenant, code, limit=1))["versions"]
    served = _read_origin(response)["version"]
    committed = versions[0]["version"] if versions else served
    data = {"version": served, "committedVersion": committed, "lag": max(committed - served, 0)}
    text = f"{data['lag']} behind: version {served} is served, version {committed} is committed{_format_age(response)}"
    emit({**_read_origin(response), **data}, as_json=json, text=text)


@app.command()
def wait(
    tenant: TenantArgument,
    code: CodeArgument,
    version: Annotated[int, typer.Option("--version", metavar="VERSION", min=0, help="Version to wait for.")],
    timeout: TimeoutOption = 30,
    query_url: QueryUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Wait until a query server serves a version or a later one."""
    last = PenstockError("", "")

    async def poll(pod: "PodClient") -> "HttpResponse | None":
        nonlocal last
        try:
            return await pod.version(tenant, code, min_version=version)
        except (Transient, Conflict) as error:
            last = error
            return None

    def make_timeout_error() -> TimedOut:
        return TimedOut("VERSION_NOT_READABLE", f"version {version} is not served yet: {last.message}", hint=last.hint)

    response = ask_pod(
        query_url, lambda pod: poll_until(lambda: poll(pod), timeout, make_timeout_error, interval=_POD_POLL)
    )
    origin = _read_origin(response)
    emit(origin, as_json=json, text=f"version {origin['version']} is served ({origin['source']})")


@app.command()
def audit(
    tenant: TenantArgument, code: CodeArgument, query_url: QueryUrlOption = None, json: JsonOption = False
) -> None:
    """Compare the items of a query server with the database; exit code 1 if they differ."""
    result = ask_pod(query_url, lambda pod: pod.audit(tenant, code))
    differences = [f"{name}: {', '.join(result[name])}" for name in ("missing", "extra", "different") if result[name]]
    verdict = "agrees with the database" if result["matches"] else "DISAGREES with the database"
    text = f"version {result['version']}, {result['items']} items, {verdict}"
    emit(result, as_json=json, text="\n".join([text, *differences]))
    if not result["matches"]:
        raise typer.Exit(1)


@app.command("retained")
def list_retained(tenant: TenantArgument, code: CodeArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """List the retained versions, which can be pinned or rolled back to, newest first."""
    found = ask_refdata(url, lambda client: client.retained(tenant, code))
    rows = [
        [str(row["version"]), format_time(row["retainedAt"]), str(row["items"]), "pinned" if row["isPinned"] else ""]
        for row in found["versions"]
    ]
    text = format_table([["version", "retained", "items", ""], *rows]) if rows else f"{code} has no retained version"
    emit(found, as_json=json, text=text)


@app.command()
def retain(tenant: TenantArgument, code: CodeArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Retain the last version, so that it can be pinned or rolled back to."""
    result = ask_refdata(url, lambda client: client.retain(tenant, code))
    emit(result, as_json=json, text=f"version {result['version']} is retained")


@app.command()
def pin(
    tenant: TenantArgument,
    code: CodeArgument,
    version: VersionArgument,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Serve a retained version to all readers until it is unpinned, whatever is committed meanwhile."""
    result = ask_refdata(url, lambda client: client.pin(tenant, code, version))
    hint = make_pasteable(f"`penstock dict unpin {tenant} {code}` ends the pin", url=url)
    emit(result, as_json=json, text=f"readers get version {version}; {hint}")


@app.command()
def unpin(tenant: TenantArgument, code: CodeArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Serve the last version again."""
    result = ask_refdata(url, lambda client: client.unpin(tenant, code))
    emit(result, as_json=json, text=f"version {result['version']} is unpinned; readers get the last version")


@app.command()
def rollback(
    tenant: TenantArgument,
    code: CodeArgument,
    version: VersionArgument,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Commit the content of a retained version as a new version."""
    result = ask_refdata(url, lambda client: client.roll_back(tenant, code, version))
    if "committedVersion" in result:
        text = f"the content of version {version} is committed as version {result['committedVersion']}"
    else:
        text = make_pasteable(
            f"pending; `penstock dict updates {tenant} {result['eventId']}` shows the status", url=url
        )
    emit(result, as_json=json, text=text)


def _send_item(
    tenant: str,
    code: str,
    key: str,
    payload: str | None,
    revision: int | None,
    event_id: UUID | None,
    timeout: float | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Send a command with one item, whose *payload* is None to delete the item, and print the update."""
    from penstock.refdata import item_files

    command = item_files.make_delta_commands(code, [item_files.make_item(key, payload)], revision)[0]
    command.event_id = event_id or uuid4()
    update = ask_refdata(url, lambda client: _send(client, tenant, [command], timeout=timeout))
    emit(update, as_json=as_json, text=_format_update(update))


async def _send(
    client: "RefdataClient", tenant: str, commands: "list[Command]", *, timeout: float | None
) -> dict[str, Any]:
    """Return the last update when all *commands* are committed; without a *timeout*, its present state."""
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


def _raise_if_failed(update: dict[str, Any]) -> dict[str, Any]:
    """Return the update unless it failed."""
    if update["status"] == "FAILED":
        raise PenstockError(
            update["errorCode"], f"the update failed, {_format_reason(update)}", eventId=update["eventId"]
        )
    return update


async def _wait_for_commit(client: "RefdataClient", tenant: str, event_id: str, timeout: float) -> dict[str, Any]:
    async def poll() -> dict[str, Any] | None:
        update = _raise_if_failed(await client.update(tenant, event_id))
        return update if update["status"] == "COMMITTED" else None

    def make_timeout_error() -> TimedOut:
        hint = f"the update continues; `penstock dict updates {tenant} {event_id}` shows it"
        message = f"update {event_id} is not committed within the timeout"
        return TimedOut("NOT_YET_COMMITTED", message, hint=hint, eventId=event_id)

    return await poll_until(poll, timeout, make_timeout_error, interval=_COMMIT_POLL)


def _format_update(update: Mapping[str, Any]) -> str:
    if update["status"] == "COMMITTED":
        return f"committed as version {update['committedVersion']}  (event {update['eventId']})"
    reason = f": {_format_reason(update)}" if update["status"] == "FAILED" else ""
    return f"{update['status'].lower()}{reason}  (event {update['eventId']})"


def _format_reason(update: Mapping[str, Any]) -> str:
    return f"{update['errorCode']}: {update['error']}" if update.get("errorCode") else ""


def _make_dictionary_row(dictionary: Mapping[str, Any]) -> list[str]:
    committed = format_time(dictionary["committedAt"]) if dictionary["committedAt"] and dictionary["version"] else ""
    pinned = "" if dictionary["pinnedVersion"] is None else str(dictionary["pinnedVersion"])
    return [dictionary["dictCode"], str(dictionary["version"]), committed, pinned]


def _make_version_row(version: Mapping[str, Any]) -> list[str]:
    keys = "all" if version["keys"] is None else ", ".join(version["keys"][:5])
    more = " …" if len(version["keys"] or ()) > 5 else ""
    committed, items = format_time(version["committedAt"]), str(version["items"])
    return [str(version["version"]), committed, version["eventType"], version["source"], items, keys + more]


def _read_origin(response: "HttpResponse") -> dict[str, Any]:
    from penstock.refdata.client import read_version

    return {"version": read_version(response), "source": response.headers["X-Data-Source"]}


def _format_age(response: "HttpResponse") -> str:
    age = response.headers.get("X-Data-Age")
    return f"  (the database has been unreachable for {age} s)" if age else ""
