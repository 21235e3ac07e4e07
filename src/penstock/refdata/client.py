"""Clients of the command API and of a pod: one method per route; errors are those of the server."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote
from uuid import UUID

from penstock.kernel.http.client import ApiClient, HttpResponse, Json
from penstock.refdata.contract import PREFIX, Command, encode_command

_SILENCE_LIMIT = 60.0  # seconds; a pod sends a comment every 15 seconds


class RefdataClient(ApiClient):
    """The command API of one server: commands, updates and versions."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def submit(self, tenant: str, command: Command, *, waits: bool = False) -> Json:
        """Send a command; with *waits* wait for its commit for a short time, and return its version."""
        params = {"consistencyMode": "WAIT_COMMIT" if waits else "ASYNC"}
        return await self._call("POST", f"{_quote_segment(tenant)}/updates", encode_command(command), params=params)

    async def update(self, tenant: str, event_id: UUID | str) -> Json:
        """Return the status of an update."""
        return await self._get(f"{_quote_segment(tenant)}/updates{_quote_segment(str(event_id))}")

    async def updates(self, tenant: str, **params: Any) -> Json:
        """Return the pending or the failed updates."""
        return await self._get(f"{_quote_segment(tenant)}/updates", params)

    async def dictionaries(self, tenant: str) -> Json:
        """Return the dictionaries of a tenant with their last committed versions."""
        return await self._get(f"{_quote_segment(tenant)}/dictionaries")

    async def retained(self, tenant: str, dict_code: str) -> Json:
        """Return the retained versions, which can be pinned or rolled back to."""
        return await self._get(f"{_quote_segment(tenant)}/retained{_quote_segment(dict_code)}")

    async def retain(self, tenant: str, dict_code: str) -> Json:
        """Retain the latest version."""
        return await self._post(f"{_quote_segment(tenant)}/retained{_quote_segment(dict_code)}")

    async def pin(self, tenant: str, dict_code: str, version: int) -> Json:
        """Pin a dictionary: readers get *version* until it is unpinned."""
        return await self._call(
            "PUT", f"{_quote_segment(tenant)}/pins{_quote_segment(dict_code)}", {"version": version}
        )

    async def unpin(self, tenant: str, dict_code: str) -> Json:
        """Unpin a dictionary: readers get the latest version again."""
        return await self._call("DELETE", f"{_quote_segment(tenant)}/pins{_quote_segment(dict_code)}")

    async def roll_back(self, tenant: str, dict_code: str, version: int) -> Json:
        """Commit the content of a retained *version* as a new version."""
        return await self._post(f"{_quote_segment(tenant)}/rollbacks{_quote_segment(dict_code)}", version=version)

    async def history(self, tenant: str, dict_code: str, **params: Any) -> Json:
        """Return the versions of a dictionary, the latest first."""
        return await self._get(f"{_quote_segment(tenant)}/history{_quote_segment(dict_code)}", params)


class PodClient(ApiClient):
    """The dictionaries of one pod; *min_version* is the version barrier: a response has this version or a later one."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def item(self, tenant: str, dict_code: str, key: str, *, min_version: int | None = None) -> HttpResponse:
        """Return an item; NotFound if there is none."""
        return await self._read(tenant, dict_code, f"items{_quote_segment(key)}", min_version)

    async def items(
        self, tenant: str, dict_code: str, keys: Sequence[str], *, min_version: int | None = None
    ) -> HttpResponse:
        """Return several items of one version."""
        query = "&".join(f"key={quote(key, safe='')}" for key in keys)
        return await self._read(tenant, dict_code, f"items?{query}", min_version)

    async def page(
        self,
        tenant: str,
        dict_code: str,
        *,
        cursor: str | None = None,
        min_version: int | None = None,
        limit: int = 10_000,
    ) -> HttpResponse:
        """Return a page of all items; with *cursor*, the `next` of a page, the following page of the same version."""
        after = f"&cursor={cursor}" if cursor else ""
        return await self._read(tenant, dict_code, f"all?limit={limit}{after}", None if cursor else min_version)

    async def version(self, tenant: str, dict_code: str, *, min_version: int | None = None) -> HttpResponse:
        """Return the version of a dictionary."""
        return await self._read(tenant, dict_code, "version", min_version)

    async def audit(self, tenant: str, dict_code: str) -> Json:
        """R32: compare a dictionary with the primary, and return the result."""
        return await self._call(
            "GET", f"{_quote_segment(tenant)}/dictionaries{_quote_segment(dict_code)}/audit", wait=600
        )

    @asynccontextmanager
    async def changes(
        self, tenant: str, dict_code: str, since: int | None = None
    ) -> AsyncIterator[AsyncIterator[Mapping[str, Any]]]:
        """Open a stream of the changes after version *since*, or after the current version."""
        path = f"{_quote_segment(tenant)}/dictionaries{_quote_segment(dict_code)}/changes"
        address = self._make_address(path, {} if since is None else {"since": str(since)})
        async with self._stream(address, silent_for=_SILENCE_LIMIT) as events:
            yield ({"event": event.name, **event.data} async for event in events)

    async def _read(self, tenant: str, dict_code: str, rest: str, min_version: int | None) -> HttpResponse:
        headers = {} if min_version is None else {"X-Min-Version": str(min_version)}
        return await self._send(
            "GET", f"{_quote_segment(tenant)}/dictionaries{_quote_segment(dict_code)}/{rest}", headers=headers
        )


def read_version(response: HttpResponse) -> int:
    """Return the version of a response."""
    return int(response.headers["X-Dict-Version"])


def _quote_segment(name: str) -> str:
    return "/" + quote(name, safe="")
