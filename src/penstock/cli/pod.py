"""`penstock dict get|all|version|lag|wait|audit`: read dictionaries, asked of a query pod."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.dictionary import CodeArgument, TenantArgument
from penstock.cli.output import JsonOption, emit, say
from penstock.cli.server_client import URL, UrlOption, ask_pod, ask_refdata, until
from penstock.kernel.errors import Conflict, PenstockError, TimedOut, Transient

if TYPE_CHECKING:
    from penstock.kernel.http.client import Answer
    from penstock.refdata.client import PodClient

QUERY_URL = "http://127.0.0.1:8081"
QueryOption = Annotated[
    str,
    typer.Option("--query-url", envvar="PENSTOCK_QUERY_URL", help="The pod; a token is taken from PENSTOCK_TOKEN."),
]
LeastOption = Annotated[
    int | None, typer.Option("--min-version", min=0, help="The answer must not be of a lower version.")
]
_POLL = 0.1


def add_to(app: typer.Typer) -> None:
    """Have these among the commands of *app*."""
    for command in (get, read_all, version, lag, wait, audit):
        app.command("all" if command is read_all else None)(command)


def get(
    tenant: TenantArgument,
    code: CodeArgument,
    keys: Annotated[list[str], typer.Argument(help="One key, or several.", metavar="KEY…")],
    least: LeastOption = None,
    query_url: QueryOption = QUERY_URL,
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
            say(f"not there: {', '.join(told['missing'])}")
    emit({**_origin(answer), **found}, as_json=json, text=text)


def read_all(
    tenant: TenantArgument,
    code: CodeArgument,
    least: LeastOption = None,
    query_url: QueryOption = QUERY_URL,
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
                say(f"{count} items of version {_origin(answer)['version']}")
                return count

    ask_pod(query_url, pages)


def version(
    tenant: TenantArgument,
    code: CodeArgument,
    least: LeastOption = None,
    query_url: QueryOption = QUERY_URL,
    json: JsonOption = False,
) -> None:
    """Print the version that is read, and how many items it has."""
    import orjson

    answer = ask_pod(query_url, lambda pod: pod.version(tenant, code, least=least))
    told = orjson.loads(answer.body)
    pinned = ", pinned" if told.get("isPinned") else ""
    items = f"  ({told['items']} items{pinned})" if "items" in told else ""
    emit({**_origin(answer), **told}, as_json=json, text=f"{told['version']}{items}{_age(answer)}")


def lag(
    tenant: TenantArgument,
    code: CodeArgument,
    url: UrlOption = URL,
    query_url: QueryOption = QUERY_URL,
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


def wait(
    tenant: TenantArgument,
    code: CodeArgument,
    version: Annotated[int, typer.Option("--version", min=0, help="The version to wait for.")],
    timeout: Annotated[float, typer.Option(min=0.05, help="Seconds to wait.")] = 30,
    query_url: QueryOption = QUERY_URL,
    json: JsonOption = False,
) -> None:
    """Wait until a pod can answer from a version or a later one."""

    last = PenstockError("", "")

    async def look(pod: "PodClient") -> "Answer | None":
        nonlocal last
        try:
            return await pod.version(tenant, code, least=version)
        except (Transient, Conflict) as error:
            last = error
            return None

    def late() -> TimedOut:
        return TimedOut("NOT_YET_READABLE", f"version {version} cannot be read yet: {last.message}", hint=last.hint)

    answer = ask_pod(query_url, lambda pod: until(lambda: look(pod), timeout, late, every=_POLL))
    told = _origin(answer)
    emit(told, as_json=json, text=f"version {told['version']} is read ({told['source']})")


def audit(
    tenant: TenantArgument, code: CodeArgument, query_url: QueryOption = QUERY_URL, json: JsonOption = False
) -> None:
    """Compare a pod's items with the primary's; exit code 1 when they disagree."""
    told = ask_pod(query_url, lambda pod: pod.audit(tenant, code))
    parts = [f"{name}: {', '.join(told[name])}" for name in ("missing", "extra", "different") if told[name]]
    said = "agrees with the primary" if told["agrees"] else "DISAGREES with the primary"
    text = f"version {told['version']}, {told['items']} items, {said}"
    emit(told, as_json=json, text="\n".join([text, *parts]))
    if not told["agrees"]:
        raise typer.Exit(1)


def _origin(answer: "Answer") -> dict[str, Any]:
    from penstock.refdata.client import version_of

    return {"version": version_of(answer), "source": answer.headers["X-Data-Source"]}


def _age(answer: "Answer") -> str:
    age = answer.headers.get("X-Data-Age")
    return f"  (the primary is out of sight for {age} s)" if age else ""
