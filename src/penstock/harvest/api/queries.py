"""The views of the harvest API: feeds, runs, partitions, watermarks, records."""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import asyncpg
from pydantic import ValidationError

from penstock.harvest.api import schemas
from penstock.harvest.config import FeedSection, HarvestSection
from penstock.harvest.consolidate import watermark
from penstock.harvest.contract import HarvestRunState, PlanState
from penstock.harvest.feed.feeds import find_feed
from penstock.harvest.model import make_run_not_found_error
from penstock.harvest.store import SQL as HARVEST_SQL
from penstock.kernel.db import sql
from penstock.kernel.db.database import Database
from penstock.kernel.db.page import Page, make_page
from penstock.kernel.errors import NotFound
from penstock.kernel.states import journal
from penstock.kernel.storage import Storage

SQL = sql.load("penstock.harvest.api")
Position = tuple[datetime, UUID] | tuple[None, None]
START: Position = (None, None)
ENDED = (PlanState.FAILED, HarvestRunState.COMPLETED, HarvestRunState.FAILED, HarvestRunState.CONSOLIDATION_SKIPPED)
_GIVEN_UP_SHOWN = timedelta(days=7)
_DIGITS = 15  # that a float keeps


@dataclass(frozen=True, slots=True)
class DeliveryProblem:
    """Alerts of a feed that a channel has not accepted; *is_settled* if their delivery was given up."""

    feed: str
    is_settled: bool
    alerts: int
    since: datetime
    error: str


class HarvestViews:
    """Read access to feeds, runs and records."""

    def __init__(self, db: Database, storage: Storage, section: HarvestSection) -> None:
        self._db = db
        self._storage = storage
        self._section = section

    def read_clock(self) -> datetime:
        """Return the time of the clock that the views use."""
        return self._db.clock.now()

    async def list_feeds(self) -> schemas.FeedList:
        """Return all configured feeds."""
        return schemas.FeedList(feeds=[await self.read_feed(name) for name in sorted(self._section.feeds)])

    async def read_feed(self, name: str) -> schemas.FeedView:
        section = find_feed(self._section, name)
        row = await self._db.fetchrow(SQL["read_feed"], name, self._db.clock.now())
        runs = await self.list_runs(name, START, 1)
        last = runs.items[0] if runs.items else None
        return schemas.FeedView(
            feed=name,
            source=section.source.kind,
            url=section.source.url,
            watermark=row["watermark"] if row else None,
            every_seconds=section.every.total_seconds() if section.every else None,
            overlap_seconds=section.overlap.total_seconds(),
            paused_until=row["paused_until"] if row else None,
            pause_reason=row["pause_reason"] if row else None,
            pending=row["pending"] if row else 0,
            last_run=last,
            last_ended_run=last if last is None or last.state in ENDED else await self._find_last_ended_run(name),
            next_run_at=self._compute_next_start(section, last),
        )

    async def _find_last_ended_run(self, feed: str) -> schemas.HarvestRun | None:
        row = await self._db.fetchrow(SQL["read_last_ended_run"], feed, list(ENDED))
        return schemas.HarvestRun.model_validate(dict(row)) if row else None

    def _compute_next_start(self, section: FeedSection, last: schemas.HarvestRun | None) -> datetime | None:
        """Return the earliest time at which the schedule starts a run; an active run is awaited first."""
        if section.every is None:
            return None
        now = self._db.clock.now()
        return now if last is None else max(now, last.requested_at + section.every)

    async def list_runs(self, feed: str | None, after: Position, limit: int) -> Page[schemas.HarvestRun]:
        """Return runs, newest first."""
        arguments = (*after, limit + 1)
        if feed is None:
            rows = await self._db.fetch(SQL["list_runs"], *arguments)
        else:
            rows = await self._db.fetch(SQL["list_runs_of_feed"], *arguments, feed)
        page = make_page(rows, limit, lambda row: (row["requested_at"], str(row["run_id"])))
        return Page([schemas.HarvestRun.model_validate(dict(row)) for row in page.items], page.next)

    async def read_run(self, run_id: UUID) -> schemas.HarvestRunDetails:
        """Return a run with its heatmap and its history."""
        row = await self._find_run(run_id)
        heatmap = await self._db.fetchval(SQL["read_heatmap"], run_id)
        return schemas.HarvestRunDetails(
            **dict(row), heatmap=heatmap, history=await self._read_history(run_id, row["moves"])
        )

    async def list_partitions(self, run_id: UUID) -> schemas.PartitionList:
        await self._find_run(run_id)
        rows = await self._db.fetch(SQL["list_partitions"], run_id)
        return schemas.PartitionList(run_id=run_id, partitions=[schemas.PartitionView(**dict(row)) for row in rows])

    async def list_watermarks(self, feed: str, limit: int) -> schemas.WatermarkList:
        """H13: return the watermark, its copy and its history."""
        find_feed(self._section, feed)
        row = await self._db.fetchrow(SQL["read_feed"], feed, self._db.clock.now())
        current = None
        if row and row["watermark"]:
            current = _make_watermark(row["watermark"], row["watermark_run"], row["watermark_at"])
        history = await self._db.fetch(SQL["list_watermarks"], feed, limit)
        return schemas.WatermarkList(
            feed=feed,
            current=current,
            blob=await self._read_blob(feed),
            blob_url=self._storage.make_uri(watermark.make_blob_path(feed)),
            history=[
                _make_watermark(*(row[name] for name in ("last_updated_at", "run_id", "run_completed_at")))
                for row in history
            ],
        )

    async def list_rejects(self, run_id: UUID, after: int, limit: int) -> schemas.RejectList:
        await self._find_run(run_id)
        rows = await self._db.fetch(SQL["list_rejects"], run_id, after, limit + 1)
        page = make_page(rows, limit, lambda row: [row["id"]])
        return schemas.RejectList(
            run_id=run_id, rejects=[schemas.RejectedRecord(**dict(row)) for row in page.items], next=page.next
        )

    async def list_alerts(self, feed: str, limit: int) -> schemas.HarvestAlertList:
        find_feed(self._section, feed)
        rows = await self._db.fetch(HARVEST_SQL["list_alerts"], feed, limit)
        return schemas.HarvestAlertList(
            feed=feed, alerts=[schemas.HarvestAlert.model_validate(dict(row)) for row in rows]
        )

    async def list_delivery_problems(self) -> list[DeliveryProblem]:
        """Return the alerts whose delivery fails, or was given up within the last week."""
        rows = await self._db.fetch(SQL["list_delivery_problems"], self._db.clock.now() - _GIVEN_UP_SHOWN)
        return [DeliveryProblem(**row) for row in rows]

    async def read_record(self, feed: str, key: str) -> schemas.RecordView:
        """Return a record, as the source sent it and as it is served."""
        find_feed(self._section, feed)
        row = await self._db.fetchrow(SQL["read_record"], feed, key)
        if row is None:
            hint = f"fetch all records of the source: penstock harvest run {feed} --full --wait"
            raise NotFound("RECORD_NOT_FOUND", f"no run of feed {feed} has stored a record {key!r}", hint=hint)
        view = {**row, "feed": feed, "payload": _load_exact(row["payload"])}
        if row["fields"] is not None:
            view["canonical"] = schemas.CanonicalRecord.model_validate({**row, "fields": _load_exact(row["fields"])})
        return schemas.RecordView.model_validate(view)

    async def list_pricing(self, feed: str, limit: int) -> schemas.PricingResult:
        """H7: return the versions of the pricing rules, newest first."""
        find_feed(self._section, feed)
        rows = await self._db.fetch(SQL["list_pricing"], feed, limit)
        return schemas.PricingResult(
            feed=feed, versions=[schemas.PricingRules.model_validate(dict(row)) for row in rows]
        )

    async def _find_run(self, run_id: UUID) -> asyncpg.Record:
        row = await find_run(self._db, run_id)
        if row is None:
            raise make_run_not_found_error(run_id)
        return row

    async def _read_history(self, run_id: UUID, numbers: list[int]) -> list[schemas.HarvestMove]:
        async with self._db.connection() as connection:
            partitions = await connection.fetch(SQL["list_partitions"], run_id)
            subjects = [str(run_id), *(f"{run_id}/{row['partition_id']}" for row in partitions)]
            history = await journal.read_history(connection, numbers, subjects)
        return [schemas.HarvestMove.model_validate(stored.entry) for stored in history]

    async def _read_blob(self, feed: str) -> schemas.WatermarkView | None:
        try:
            stored = await self._storage.get(watermark.make_blob_path(feed))
            return schemas.WatermarkView.model_validate_json(stored.data)
        except (NotFound, ValidationError):  # another system may have written the blob
            return None


async def find_run(db: Database, run_id: UUID) -> asyncpg.Record | None:
    """Return the row of a run, which may not be planned yet, or None."""
    return await db.fetchrow(SQL["read_run"], run_id)


def _make_watermark(time: datetime, run_id: UUID, completed_at: datetime) -> schemas.WatermarkView:
    return schemas.WatermarkView(last_updated_at=time, last_run_id=run_id, last_run_completed_at=completed_at)


def _load_exact(text: str) -> Any:
    """Return a document with numbers as text where a JSON parser would lose digits."""
    return json.loads(text, parse_int=_parse_number, parse_float=_parse_number)


def _parse_number(text: str) -> int | float | str:
    if text.lstrip("-").isdigit():
        return int(text) if len(text) <= _DIGITS else text
    return float(text) if Decimal(text) == Decimal(repr(float(text))) else text
