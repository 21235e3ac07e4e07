"""A client of the pipeline API: one method per route; errors are those of the server."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import quote

from penstock.kernel.http.client import ApiClient, Json
from penstock.tracking.contract import PREFIX, Stage, StageReportKind
from penstock.tracking.model import ClaimedRow


class RowResult(NamedTuple):
    """The outcome of a claimed row."""

    filename: str
    shard: int
    fence: int
    outcome: StageReportKind
    error: str | None = None
    retry_after_seconds: float | None = None


class PipelineClient(ApiClient):
    """The pipeline API of one server."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, PREFIX, token=token, timeout=timeout)

    async def register(self, filename: str, shards: Sequence[int], *, worker: str | None = None) -> Json:
        return await self._post("/files/register", filename=filename, shards=list(shards), worker=worker)

    async def move(
        self,
        stage: Stage,
        transition: str,
        filename: str,
        shard: int | None = None,
        *,
        worker: str | None = None,
        error: str | None = None,
    ) -> Json:
        """Make the move *transition* with a row, or with a whole file in event-ingest."""
        path = f"/stages/{stage}/{quote(transition, safe='')}"
        return await self._post(path, filename=filename, shard=shard, worker=worker, error=error)

    async def claim(
        self, stage: Stage, worker: str, *, limit: int, lease: float | None = None, wait: float = 0
    ) -> list[ClaimedRow]:
        """Claim rows for *worker*; wait up to *wait* seconds for the first one."""
        options = {"worker": worker, "limit": limit, "lease_seconds": lease, "wait_seconds": wait}
        request = {name: value for name, value in options.items() if value is not None}
        body = await self._call("POST", f"/queues/{stage}/claim", request, wait=wait)
        return [_make_claimed_row(item) for item in body["items"]]

    async def report(self, stage: Stage, outcomes: Iterable[RowResult]) -> list[Json]:
        """Report the outcomes of claimed rows, and return one result each, in order."""
        reports = [_make_report(outcome) for outcome in outcomes]
        results: list[Json] = (await self._call("POST", f"/stages/{stage}/report", reports))["results"]
        return results

    async def heartbeat(
        self, stage: Stage, worker: str, claims: Iterable[tuple[str, int, int]], *, lease: float | None = None
    ) -> set[tuple[str, int, int]]:
        """Extend the leases of *claims* (filename, shard and fence), and return the lost ones."""
        items = [{"filename": filename, "shard": shard, "fence": fence} for filename, shard, fence in claims]
        body = await self._post(f"/queues/{stage}/heartbeat", worker=worker, items=items, lease_seconds=lease)
        return {(item["filename"], item["shard"], item["fence"]) for item in body["lost"]}

    async def queue(self, stage: Stage, **params: Any) -> Json:
        return await self._get(f"/queues/{stage}", params)

    async def queues(self) -> Json:
        return await self._get("/queues")

    async def file(self, filename: str) -> Json:
        return await self._get(f"/files/{quote(filename, safe='')}")

    async def files(self, **params: Any) -> Json:
        return await self._get("/files", params)

    async def history(self, filename: str, **params: Any) -> Json:
        return await self._get(f"/files/{quote(filename, safe='')}/history", params)

    async def why(self, filename: str, shard: int) -> Json:
        return await self._get(f"/files/{quote(filename, safe='')}/{shard}/why")

    async def summary(self) -> Json:
        return await self._get("/metrics/summary")

    async def retry_failed(self, stage: Stage, **filters: Any) -> Json:
        return await self._post(f"/stages/{stage}/retry-failed", **filters)

    async def pause(self, stage: Stage, *, worker: str | None = None, reason: str | None = None) -> Json:
        return await self._post(f"/queues/{stage}/pause", worker=worker, reason=reason)

    async def resume(self, stage: Stage) -> Json:
        return await self._post(f"/queues/{stage}/resume")


def _make_report(result: RowResult) -> Json:
    filename, shard, fence, outcome, error, after = result
    report: Json = {"filename": filename, "shard": shard, "fence": fence, "outcome": outcome}
    if error is not None:
        report["error"] = error
    if after is not None:
        report["retry_after_seconds"] = after
    return report


def _make_claimed_row(item: Json) -> ClaimedRow:
    created_at, until = (datetime.fromisoformat(item[name]) for name in ("created_at", "lease_until"))
    return ClaimedRow(item["filename"], item["shard"], item["fence"], item["attempt"], created_at, until)
