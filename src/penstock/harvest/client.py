"""Python client of the harvest API."""

from typing import Any
from urllib.parse import quote

from penstock.harvest.contract import PREFIX
from penstock.kernel.http.client import ApiClient, Json


class HarvestClient(ApiClient):
    """Client with one method per route."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def feeds(self) -> Json:
        return await self._get("/feeds")

    async def feed(self, feed: str) -> Json:
        return await self._get(f"/feeds/{_quote(feed)}")

    async def start(self, feed: str, *, full: bool = False) -> Json:
        return await self._post(f"/feeds/{_quote(feed)}/runs", full=full)

    async def watermarks(self, feed: str, **params: Any) -> Json:
        return await self._get(f"/feeds/{_quote(feed)}/watermarks", params)

    async def alerts(self, feed: str, **params: Any) -> Json:
        return await self._get(f"/feeds/{_quote(feed)}/alerts", params)

    async def record(self, feed: str, key: str) -> Json:
        return await self._get(f"/feeds/{_quote(feed)}/record", {"key": key})

    async def runs(self, **params: Any) -> Json:
        return await self._get("/runs", params)

    async def run(self, run_id: str) -> Json:
        return await self._get(f"/runs/{_quote(run_id)}")

    async def partitions(self, run_id: str) -> Json:
        return await self._get(f"/runs/{_quote(run_id)}/partitions")

    async def rejects(self, run_id: str, **params: Any) -> Json:
        return await self._get(f"/runs/{_quote(run_id)}/rejects", params)

    async def retry(self, run_id: str, partition: str | None = None) -> Json:
        path = f"/partitions/{_quote(partition)}" if partition else ""
        return await self._post(f"/runs/{_quote(run_id)}{path}/retry")

    async def force(self, run_id: str, reason: str) -> Json:
        return await self._post(f"/runs/{_quote(run_id)}/force", reason=reason)

    async def cancel(self, run_id: str, reason: str) -> Json:
        return await self._post(f"/runs/{_quote(run_id)}/cancel", reason=reason)


def _quote(text: str) -> str:
    return quote(text, safe="")
