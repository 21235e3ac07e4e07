"""The command API and the pods from Python: a method per route."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote
from uuid import UUID

from penstock.kernel.http.client import ApiClient, HttpResponse, Json
from penstock.refdata.contract import PREFIX, Command, encode_command

_SILENT_FOR = 60.0  # seconds; a feed says something every 15


class RefdataClient(ApiClient):
    """One server's commands and what became of them."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def submit(self, tenant: str, command: Command, *, waits: bool = False) -> Json:
        """Send a command; with *waits* the answer tells its version, unless that takes too long."""
        params = {"consistencyMode": "WAIT_COMMIT" if waits else "ASYNC"}
        return await self._call("POST", f"{_name(tenant)}/updates", encode_command(command), params=params)

    async def update(self, tenant: str, event_id: UUID | str) -> Json:
        """How an update stands."""
        return await self._get(f"{_name(tenant)}/updates{_name(str(event_id))}")

    async def updates(self, tenant: str, **params: Any) -> Json:
        """The updates under way, or those that failed."""
        return await self._get(f"{_name(tenant)}/updates", params)

    async def dictionaries(self, tenant: str) -> Json:
        """Return the dictionaries of a tenant with their last committed versions."""
        return await self._get(f"{_name(tenant)}/dictionaries")

    async def retained(self, tenant: str, dict_code: str) -> Json:
        """The versions that can be pinned or gone back to."""
        return await self._get(f"{_name(tenant)}/retained{_name(dict_code)}")

    async def retain(self, tenant: str, dict_code: str) -> Json:
        """Keep the last version."""
        return await self._post(f"{_name(tenant)}/retained{_name(dict_code)}")

    async def pin(self, tenant: str, dict_code: str, version: int) -> Json:
        """Have readers get *version*."""
        return await self._call("PUT", f"{_name(tenant)}/pins{_name(dict_code)}", {"version": version})

    async def unpin(self, tenant: str, dict_code: str) -> Json:
        """Have readers get the last version again."""
        return await self._call("DELETE", f"{_name(tenant)}/pins{_name(dict_code)}")

    async def roll_back(self, tenant: str, dict_code: str, version: int) -> Json:
        """Make a dictionary what it was in *version*, as a new version."""
        return await self._post(f"{_name(tenant)}/rollbacks{_name(dict_code)}", version=version)

    async def history(self, tenant: str, dict_code: str, **params: Any) -> Json:
        """The versions of a dictionary."""
        return await self._get(f"{_name(tenant)}/history{_name(dict_code)}", params)


class PodClient(ApiClient):
    """One pod's dictionaries, read as they are there; *least* is the version an answer must not be below."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def item(self, tenant: str, dict_code: str, key: str, *, least: int | None = None) -> HttpResponse:
        """One item; NotFound when there is none."""
        return await self._read(tenant, dict_code, f"items{_name(key)}", least)

    async def items(
        self, tenant: str, dict_code: str, keys: Sequence[str], *, least: int | None = None
    ) -> HttpResponse:
        """Several items, of one version."""
        query = "&".join(f"key={quote(key, safe='')}" for key in keys)
        return await self._read(tenant, dict_code, f"items?{query}", least)

    async def page(
        self, tenant: str, dict_code: str, *, cursor: str | None = None, least: int | None = None, limit: int = 10_000
    ) -> HttpResponse:
        """Some of all items; with the `next` of the page before, those after it, of the same version."""
        after = f"&cursor={cursor}" if cursor else ""
        return await self._read(tenant, dict_code, f"all?limit={limit}{after}", None if cursor else least)

    async def version(self, tenant: str, dict_code: str, *, least: int | None = None) -> HttpResponse:
        """The version it is at."""
        return await self._read(tenant, dict_code, "version", least)

    async def audit(self, tenant: str, dict_code: str) -> Json:
        """R32: whether it is what the primary has."""
        return await self._call("GET", f"{_name(tenant)}/dictionaries{_name(dict_code)}/audit", wait=600)

    @asynccontextmanager
    async def changes(
        self, tenant: str, dict_code: str, since: int | None = None
    ) -> AsyncIterator[AsyncIterator[Mapping[str, Any]]]:
        """Every change after version *since*, as it comes; without one, after the version there is now."""
        path = f"{_name(tenant)}/dictionaries{_name(dict_code)}/changes"
        address = self._address(path, {} if since is None else {"since": str(since)})
        async with self._stream(address, silent_for=_SILENT_FOR) as events:
            yield ({"event": event.name, **event.data} async for event in events)

    async def _read(self, tenant: str, dict_code: str, rest: str, least: int | None) -> HttpResponse:
        headers = {} if least is None else {"X-Min-Version": str(least)}
        return await self._send("GET", f"{_name(tenant)}/dictionaries{_name(dict_code)}/{rest}", headers=headers)


def version_of(answer: HttpResponse) -> int:
    """The version an answer is of."""
    return int(answer.headers["X-Dict-Version"])


def _name(name: str) -> str:
    return "/" + quote(name, safe="")
