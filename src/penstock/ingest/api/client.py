"""The API of ingest from Python: a method per route."""

from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import quote

from penstock.ingest.contract import PREFIX
from penstock.kernel.http.client import ApiClient, Download, Json


class IngestClient(ApiClient):
    """The suppliers, runs and states of a server."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def suppliers(self) -> Json:
        """Return the status of every supplier."""
        return await self._get("/suppliers")

    async def supplier(self, name: str) -> Json:
        """Return the status of a supplier."""
        return await self._get(f"/suppliers/{_quote_segment(name)}")

    async def quarantine(self, supplier: str, **params: Any) -> Json:
        """I3: return the files of a supplier in quarantine."""
        return await self._get(f"/suppliers/{_quote_segment(supplier)}/quarantine", params)

    async def runs(self, **params: Any) -> Json:
        """Return runs, newest first."""
        return await self._get("/runs", params)

    async def run(self, run_id: str) -> Json:
        """Return a run with its manifest and history."""
        return await self._get(f"/runs/{_quote_segment(run_id)}")

    async def bad_rows(self, run_id: str, **params: Any) -> Json:
        """I9: return the first bad rows of a run."""
        return await self._get(f"/runs/{_quote_segment(run_id)}/bad-rows", params)

    async def state(self, supplier: str) -> Json:
        """Return the published state of a supplier and the manifest of its run."""
        return await self._get(f"/state/{_quote_segment(supplier)}")

    async def diff(self, supplier: str, before: str | None, after: str | None, limit: int) -> Json:
        """I10: compare two runs of a supplier."""
        return await self._get(f"/state/{_quote_segment(supplier)}/diff", {"from": before, "to": after, "limit": limit})

    def facts(self, supplier: str) -> AbstractAsyncContextManager[Download]:
        """Open the facts of the published state as a stream of NDJSON."""
        return self._download(f"/state/{_quote_segment(supplier)}/facts")


def _quote_segment(text: str) -> str:
    return quote(text, safe="")
