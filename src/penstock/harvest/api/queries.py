"""What can be seen of harvest: feeds, runs, partitions, watermarks, records."""

import json
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import asyncpg
from pydantic import ValidationError

from penstock.harvest.api import schemas
from penstock.harvest.config import FeedSection, HarvestSection
from penstock.harvest.consolidate import watermark
from penstock.harvest.contract import HarvestRunState, PlanState
from penstock.harvest.feed.feeds import known_feed
from penstock.harvest.model import no_run
from penstock.harvest.store import SQL as SHARED
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
_DIGITS = 15  # as many as a reader that knows only floats keeps


class HarvestViews:
    """Harvest as it is seen through the API."""

    def __init__(self, db: Database, storage: Storage, section: HarvestSection) -> None:
        self._db = db
        self._storage = storage
        self._section = section

    def now(self) -> datetime:
        """The time that all of this is told by."""
        return self._db.clock.now()

    async def feeds(self) -> schemas.FeedList:
        """Every feed that is configured."""
        return schemas.FeedList(feeds=[await self.feed(name) for name in sorted(self._section.feeds)])

    async def feed(self, name: str) -> schemas.FeedView:
        section = known_feed(self._section, name)
        row = await self._db.fetchrow(SQL["feeds"], [name], self._db.clock.now())
        runs = await self.runs(name, START, 1)
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
            last_ended_run=last if last is None or last.state in ENDED else await self._last_ended_run(name),
            next_run_at=self._next_run_at(section, last),
        )

    async def _last_ended_run(self, feed: str) -> schemas.HarvestRun | None:
        row = await self._db.fetchrow(SQL["last_ended_run"], feed, list(ENDED))
        return schemas.HarvestRun.model_validate(dict(row)) if row else None

    def _next_run_at(self, section: FeedSection, last: schemas.HarvestRun | None) -> datetime | None:
        """Return the earliest time at which the schedule starts a run; an active run is awaited first."""
        if section.every is None:
            return None
        now = self._db.clock.now()
        return now if last is None else max(now, last.requested_at + section.every)

    async def runs(self, feed: str | None, after: Position, limit: int) -> Page[schemas.HarvestRun]:
        """Runs, the latest first."""
        asked = (*after, limit + 1)
        rows = await (
            self._db.fetch(SQL["runs"], *asked) if feed is None else self._db.fetch(SQL["runs_of_feed"], *asked, feed)
        )
        found = make_page(rows, limit, lambda row: (row["requested_at"], str(row["run_id"])))
        return Page([schemas.HarvestRun.model_validate(dict(row)) for row in found.items], found.next)

    async def run(self, run_id: UUID) -> schemas.HarvestRunDetails:
        """A run with its proof and its history."""
        row = await self._run(run_id)
        heatmap = await self._db.fetchval(SQL["heatmap"], run_id)
        return schemas.HarvestRunDetails(
            **dict(row), heatmap=heatmap, history=await self._history(run_id, row["moves"])
        )

    async def partitions(self, run_id: UUID) -> schemas.PartitionList:
        await self._run(run_id)
        rows = await self._db.fetch(SQL["partitions"], run_id)
        return schemas.PartitionList(run_id=run_id, partitions=[schemas.PartitionView(**dict(row)) for row in rows])

    async def watermarks(self, feed: str, limit: int) -> schemas.WatermarkList:
        """H13: the watermark, its copy, and what it was."""
        known_feed(self._section, feed)
        row = await self._db.fetchrow(SQL["feeds"], [feed], self._db.clock.now())
        current = None
        if row and row["watermark"]:
            current = _watermark(row["watermark"], row["watermark_run"], row["watermark_at"])
        history = await self._db.fetch(SQL["watermarks"], feed, limit)
        return schemas.WatermarkList(
            feed=feed,
            current=current,
            blob=await self._blob(feed),
            blob_url=self._storage.uri(watermark.path(feed)),
            history=[
                _watermark(*(row[name] for name in ("last_updated_at", "run_id", "run_completed_at")))
                for row in history
            ],
        )

    async def rejects(self, run_id: UUID, after: int, limit: int) -> schemas.RejectList:
        await self._run(run_id)
        rows = await self._db.fetch(SQL["rejects"], run_id, after, limit + 1)
        found = make_page(rows, limit, lambda row: [row["id"]])
        return schemas.RejectList(
            run_id=run_id, rejects=[schemas.RejectedRecord(**dict(row)) for row in found.items], next=found.next
        )

    async def alerts(self, feed: str, limit: int) -> schemas.HarvestAlertList:
        known_feed(self._section, feed)
        rows = await self._db.fetch(SHARED["latest_alerts"], feed, limit)
        return schemas.HarvestAlertList(
            feed=feed, alerts=[schemas.HarvestAlert.model_validate(dict(row)) for row in rows]
        )

    async def record(self, feed: str, key: str) -> schemas.RecordView:
        """Where one record is."""
        known_feed(self._section, feed)
        row = await self._db.fetchrow(SQL["record"], feed, key)
        if row is None:
            hint = "it was in no page of the source yet"
            raise NotFound("RECORD_NOT_FOUND", f"{feed} has no record {key!r}", hint=hint)
        told = {**row, "feed": feed, "payload": _exact(row["payload"])}
        if row["fields"] is not None:
            told["canonical"] = schemas.CanonicalRecord.model_validate({**row, "fields": _exact(row["fields"])})
        return schemas.RecordView.model_validate(told)

    async def pricing(self, feed: str, limit: int) -> schemas.PricingResult:
        """H7: the rules there were, the latest first."""
        known_feed(self._section, feed)
        rows = await self._db.fetch(SQL["pricing"], feed, limit)
        return schemas.PricingResult(
            feed=feed, versions=[schemas.PricingRules.model_validate(dict(row)) for row in rows]
        )

    async def _run(self, run_id: UUID) -> asyncpg.Record:
        row = await seen_run(self._db, run_id)
        if row is None:
            raise no_run(run_id)
        return row

    async def _history(self, run_id: UUID, numbers: list[int]) -> list[schemas.HarvestMove]:
        async with self._db.connection() as connection:
            partitions = await connection.fetch(SQL["partitions"], run_id)
            subjects = [str(run_id), *(f"{run_id}/{row['partition_id']}" for row in partitions)]
            found = await journal.read_history(connection, numbers, subjects)
        return [schemas.HarvestMove.model_validate(one.entry) for one in found]

    async def _blob(self, feed: str) -> schemas.WatermarkView | None:
        try:
            stored = await self._storage.get(watermark.path(feed))
            return schemas.WatermarkView.model_validate_json(stored.data)
        except (NotFound, ValidationError):  # somebody else may have written there
            return None


async def seen_run(db: Database, run_id: UUID) -> asyncpg.Record | None:
    """A run as it is told of, planned or not; None when there is none."""
    return await db.fetchrow(SQL["run"], run_id)


def _watermark(moment: datetime, run_id: UUID, completed_at: datetime) -> schemas.WatermarkView:
    return schemas.WatermarkView(last_updated_at=moment, last_run_id=run_id, last_run_completed_at=completed_at)


def _exact(text: str) -> Any:
    """A document whose numbers are told as text where a reader of JSON would lose digits."""
    return json.loads(text, parse_int=_number, parse_float=_number)


def _number(text: str) -> int | float | str:
    if text.lstrip("-").isdigit():
        return int(text) if len(text) <= _DIGITS else text
    return float(text) if Decimal(text) == Decimal(repr(float(text))) else text
