"""The command API from Python: a method per route."""

from typing import Any
from urllib.parse import quote
from uuid import UUID

from penstock.kernel.api_client import ApiClient, Json
from penstock.refdata.contract import PREFIX, Command, encode


class RefdataClient(ApiClient):
    """One server's commands and what became of them."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def submit(self, tenant: str, command: Command, *, waits: bool = False) -> Json:
        """Send a command; with *waits* the answer tells its version, unless that takes too long."""
        params = {"consistencyMode": "WAIT_COMMIT" if waits else "ASYNC"}
        return await self._call("POST", f"{_name(tenant)}/updates", encode(command), params=params)

    async def update(self, tenant: str, event_id: UUID | str) -> Json:
        """How an update stands."""
        return await self._get(f"{_name(tenant)}/updates{_name(str(event_id))}")

    async def updates(self, tenant: str, **params: Any) -> Json:
        """The updates under way, or those that failed."""
        return await self._get(f"{_name(tenant)}/updates", params)

    async def history(self, tenant: str, dict_code: str, **params: Any) -> Json:
        """The versions of a dictionary."""
        return await self._get(f"{_name(tenant)}/history{_name(dict_code)}", params)


def _name(name: str) -> str:
    return "/" + quote(name, safe="")
