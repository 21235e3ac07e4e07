"""Harness of tracking: short methods for requests to the pipeline API."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import httpx

from penstock.kernel.clock import ManualClock
from penstock.tracking.contract import Stage
from penstock.tracking.service import Tracking
from tests.support.http import answered, problem
from tests.support.types import Json

BASE = "/api/v1/pipeline"
FILE = "20250101000000"
INGEST, SPLITTER, WORKER, SENDER = Stage
SECOND = timedelta(seconds=1)
LEASE = timedelta(seconds=60)


class TrackingHarness:
    """Requests that must succeed, or fail with an expected problem."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def post(self, path: str, **body: Any) -> Json:
        """Send a POST that must succeed."""
        return answered(await self.http.post(path, json=body))

    async def get(self, path: str, **params: Any) -> Json:
        """Send a GET that must succeed."""
        return answered(await self.http.get(path, params=params))

    async def refused(self, status: int, code: str, path: str, **body: Any) -> Json:
        """Send a POST that must be refused, and return the problem."""
        return problem(await self.http.post(path, json=body), status, code)

    async def move(self, stage: str, transition: str, filename: str, shard: int = 0, **more: Any) -> Json:
        """Move one row, or a whole file in event-ingest."""
        row = {} if stage == INGEST else {"shard": shard}
        return await self.post(f"/stages/{stage}/{transition}", filename=filename, **row, **more)

    async def queue_up(self, stage: str, filename: str, *shards: int) -> None:
        """Register a file whose rows wait for *stage*."""
        shards = shards or (0,)
        await self.post("/files/register", filename=filename, shards=list(shards))
        await self.move(INGEST, "done", filename)
        for before in list(Stage)[1 : list(Stage).index(Stage(stage))]:
            for shard in shards:
                await self.move(before, "start", filename, shard)
                await self.move(before, "done", filename, shard)

    async def claim(self, stage: str, worker: str = "w1", limit: int = 100, **more: Any) -> list[Json]:
        """Claim rows of *stage* and return them."""
        answer = await self.post(f"/queues/{stage}/claim", worker=worker, limit=limit, **more)
        items: list[Json] = answer["items"]
        return items

    async def report(self, stage: str, *reports: Json) -> list[tuple[str, str | None]]:
        """Report the outcome of claimed rows; return result and status of each."""
        answer = answered(await self.http.post(f"/stages/{stage}/report", json=list(reports)))
        return [(result["result"], result["status"]) for result in answer["results"]]

    async def status(self, filename: str, stage: str, shard: int = 0) -> str:
        """Return the status of a row in *stage*."""
        row = await self.row(filename, shard)
        return str(row[f"{Stage(stage).field}_status"])

    async def row(self, filename: str, shard: int = 0) -> Json:
        """Return one shard of a file."""
        rows: list[Json] = (await self.get(f"/files/{filename}"))["shards"]
        return next(row for row in rows if row["shard"] == shard)

    async def steps(self, filename: str, stage: str | None = None, shard: int | None = None) -> list[tuple[str, str]]:
        """Return the moves in the history of a file, as pairs of statuses."""
        moves = (await self.get(f"/files/{filename}/history"))["moves"]
        matching = (m for m in moves if stage in (None, m["stage"]) and shard in (None, m["shard"]))
        return [(move["from"], move["to"]) for move in matching]


def make_report(item: Json, outcome: str, **more: Any) -> Json:
    """Return a report on a claimed item."""
    return {"filename": item["filename"], "shard": item["shard"], "fence": item["fence"], "outcome": outcome, **more}


def make_lease(item: Json) -> Json:
    """Return a claimed item in the form that a heartbeat needs."""
    return {name: item[name] for name in ("filename", "shard", "fence")}


def names(items: Sequence[Json]) -> list[tuple[str, int]]:
    """Return file and shard of each item."""
    return [(item["filename"], item["shard"]) for item in items]


async def expire(tracking: Tracking, clock: ManualClock, after: timedelta = LEASE) -> int:
    """Let every lease expire; return the number of reaped rows."""
    clock.advance(after + SECOND)
    return await tracking.reap()


async def explain(api: TrackingHarness, filename: str = FILE) -> tuple[str | None, str, str, str]:
    """Return the stage, status, explanation and hint of `GET /why`."""
    answer = await api.get(f"/files/{filename}/0/why")
    return answer["stage"], answer["status"], answer["why"], answer["hint"] or ""
