"""`penstock dict kept|keep|pin|unpin|rollback`: versions that are kept, and going back to them."""

from typing import Annotated

import typer

from penstock.cli.dictionary import CodeArgument, TenantArgument
from penstock.cli.output import JsonOption, emit, table
from penstock.cli.server_client import URL, UrlOption, ask_refdata, moment

VersionArgument = Annotated[int, typer.Argument(help="A version that is kept.", metavar="VERSION", min=0)]


def add_to(app: typer.Typer) -> None:
    """Have these among the commands of *app*."""
    for command in (kept, keep, pin, unpin, rollback):
        app.command()(command)


def kept(tenant: TenantArgument, code: CodeArgument, url: UrlOption = URL, json: JsonOption = False) -> None:
    """List the versions that can be pinned or gone back to, the latest first."""
    told = ask_refdata(url, lambda client: client.kept(tenant, code))
    rows = [
        [str(one["version"]), moment(one["keptAt"]), str(one["items"]), "pinned" if one["isPinned"] else ""]
        for one in told["versions"]
    ]
    text = table([["version", "kept", "items", ""], *rows]) if rows else f"no version of {code} is kept"
    emit(told, as_json=json, text=text)


def keep(tenant: TenantArgument, code: CodeArgument, url: UrlOption = URL, json: JsonOption = False) -> None:
    """Keep the last version."""
    told = ask_refdata(url, lambda client: client.keep(tenant, code))
    emit(told, as_json=json, text=f"version {told['version']} is kept")


def pin(
    tenant: TenantArgument, code: CodeArgument, version: VersionArgument, url: UrlOption = URL, json: JsonOption = False
) -> None:
    """Have readers get a version that is kept, whatever is committed later, until it is unpinned."""
    told = ask_refdata(url, lambda client: client.pin(tenant, code, version))
    emit(told, as_json=json, text=f"readers get version {version}; `penstock dict unpin {tenant} {code}` ends it")


def unpin(tenant: TenantArgument, code: CodeArgument, url: UrlOption = URL, json: JsonOption = False) -> None:
    """Have readers get the last version again."""
    told = ask_refdata(url, lambda client: client.unpin(tenant, code))
    emit(told, as_json=json, text=f"version {told['version']} is pinned no more; readers get the last one")


def rollback(
    tenant: TenantArgument, code: CodeArgument, version: VersionArgument, url: UrlOption = URL, json: JsonOption = False
) -> None:
    """Make a dictionary what it was in a version that is kept, as a new version."""
    told = ask_refdata(url, lambda client: client.roll_back(tenant, code, version))
    if "committedVersion" in told:
        text = f"version {version} again, committed as version {told['committedVersion']}"
    else:
        text = f"under way: penstock dict status {tenant} {told['eventId']}"
    emit(told, as_json=json, text=text)
