"""H7: raw records become canonical ones, by PostgreSQL in sets or by Python in batches, in any number of processes."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import UUID

import asyncpg
import orjson

from penstock.harvest.config import ConsolidationMode, ConsolidationSection
from penstock.harvest.consolidate.sql_compiler import compile_fetch, compile_set
from penstock.harvest.feed.recipe import Mapped, Problem, Recipe
from penstock.harvest.store import AT_EASE
from penstock.kernel import canonical
from penstock.kernel.db.database import Connection, Database, plan_freely
from penstock.kernel.db.sql import load
from penstock.kernel.errors import Corrupt, Transient

_SQL = load("penstock.harvest.consolidate")
_FRUITLESS = 10  # walks in a row that met only rows whose raw record is not there: nobody is that unlucky
T = TypeVar("T")


class Consolidated(NamedTuple):
    """What became of raw records."""

    consolidated: int = 0
    rejected: int = 0
    is_complete: bool = True  # whether nothing was pending in the end; not so when it was stopped before

    def plus(self, other: "Consolidated") -> "Consolidated":
        is_complete = self.is_complete and other.is_complete
        return Consolidated(self.consolidated + other.consolidated, self.rejected + other.rejected, is_complete)


# Called in each transaction that consolidates, with what this one did: what it writes is as true as the records are.
Progress = Callable[[Connection, Consolidated], Awaitable[None]]


class _Step(NamedTuple):
    """What one transaction did: it took so many rows, up to *last*."""

    taken: int
    last: str | None
    done: Consolidated


@dataclass(frozen=True)
class _Job:
    db: Database
    feed: str
    recipe: Recipe
    section: ConsolidationSection
    run_id: UUID
    pricing_version: int
    progress: Progress | None
    stopping: asyncio.Event | None

    @property
    def is_stopping(self) -> bool:
        return self.stopping is not None and self.stopping.is_set()

    async def begin(self, tx: Connection) -> None:
        """What every transaction that consolidates begins with. Who works by an old recipe has to stop."""
        await tx.execute(_SQL["look_up"])
        if await tx.fetchval(_SQL["hold_recipe"], self.feed, self.recipe.digest) is None:
            hint = "processes with different configurations work on this feed"
            raise Transient("RECIPE_CHANGED", f"{self.feed} is made by another recipe meanwhile", hint=hint)

    async def tell(self, tx: Connection, done: Consolidated) -> None:
        if self.progress is not None and (done.consolidated or done.rejected):
            await self.progress(tx, done)


class _Way(Protocol):
    """How some pending rows are consolidated."""

    limit: int

    async def step(self, after: str) -> _Step:
        """Consolidate up to *limit* rows after a key, but none that somebody else has locked."""


async def use_recipe(tx: Connection, feed: str, recipe: Recipe, now: datetime) -> int:
    """The version of the rules, kept when they are new. If canonical records were made otherwise, all are due again.

    The caller has locked the row of the feed.
    """
    before = await tx.fetchval(_SQL["recipe"], feed)
    if before != recipe.digest:
        await tx.execute(_SQL["change_recipe"], feed, recipe.digest)
        if before is not None:  # else none was ever consolidated, and all are pending anyway
            await plan_freely(tx)
            await tx.execute(_SQL["make_all_pending"], feed, timeout=AT_EASE)
    latest = await tx.fetchrow(_SQL["latest_pricing"], feed)
    if latest is not None and latest["digest"] == recipe.pricing_digest:
        return int(latest["version"])
    version = 1 if latest is None else int(latest["version"]) + 1
    rules = canonical.dumps(recipe.pricing_document()).decode()
    await tx.execute(_SQL["add_pricing"], feed, version, rules, recipe.pricing_digest, now)
    return version


async def consolidate(
    db: Database,
    feed: str,
    recipe: Recipe,
    section: ConsolidationSection,
    *,
    run_id: UUID,
    pricing_version: int,
    progress: Progress | None = None,
    stopping: asyncio.Event | None = None,
) -> Consolidated:
    """Consolidate until nothing of *feed* is pending: what this call did of it, others may have done the rest."""
    job = _Job(db, feed, recipe, section, run_id, pricing_version, progress, stopping)
    if section.mode is ConsolidationMode.BATCHES:
        return await _drain(job, _Batches(job))
    way = _Sets(job)
    total = Consolidated()
    for done in await _all(_drain(job, way) for _ in range(section.sets_at_once)):
        total = total.plus(done)
    return total


async def _drain(job: _Job, way: _Way) -> Consolidated:
    total, fruitless = Consolidated(), 0
    while not job.is_stopping:
        taken, done = await _walk(job, way)
        total = total.plus(done)
        if done.consolidated or done.rejected:
            fruitless = 0
            continue
        fruitless += 1 if taken else 0
        if fruitless >= _FRUITLESS:
            raise Corrupt("RAW_PENDING", f"{taken} pending records of {job.feed} are not those that are kept")
        if not await _waits_for_others(job):
            return total
    return total._replace(is_complete=False)


async def _walk(job: _Job, way: _Way) -> tuple[int, Consolidated]:
    """Once through the keys. Going on after the last one spares looking again at what is dead or locked before it."""
    taken, total, after = 0, Consolidated(), ""
    while not job.is_stopping:
        step = await way.step(after)
        taken, total = taken + step.taken, total.plus(step.done)
        if step.last is None or step.taken < way.limit:
            break
        after = step.last
    return taken, total


async def _waits_for_others(job: _Job) -> bool:
    """Back when nobody holds the first pending row; whether there is one."""
    async with job.db.transaction() as tx:
        return await tx.fetchval(_SQL["wait"], job.feed) is not None


class _Sets:
    """One statement does it all."""

    def __init__(self, job: _Job) -> None:
        self.limit = job.section.set_size
        self._job = job
        self._statement = compile_set(job.recipe)

    async def step(self, after: str) -> _Step:
        job = self._job
        call = (job.feed, after, self.limit, job.run_id, job.pricing_version, job.db.clock.now())
        async with job.db.transaction() as tx:
            await job.begin(tx)
            [row] = await tx.fetch(self._statement.text, *call, *self._statement.arguments)
            done = Consolidated(row["consolidated"], row["rejected"])
            await job.tell(tx, done)
        return _Step(row["taken"], row["last"], done)


class _Made(NamedTuple):
    """A row of `upsert`."""

    key: str
    fields: str
    cost: Decimal | None
    price: Decimal | None
    rule: str | None
    version: int
    is_gone: bool


class _Batches:
    """The founding document's way: fetched and locked, mapped here, upserted by other connections, then marked."""

    def __init__(self, job: _Job) -> None:
        self.limit = job.section.batch_size
        self._job = job
        self._fetch = compile_fetch(job.recipe)

    async def step(self, after: str) -> _Step:
        job = self._job
        async with job.db.transaction() as tx:
            await job.begin(tx)
            rows = await tx.fetch(self._fetch.text, job.feed, after, self.limit, *self._fetch.arguments)
            current = [row for row in rows if row["texts"] is not None]
            made, problems = self._map(current)
            await self._upsert(made)
            await self._reject(tx, problems)
            await tx.execute(_SQL["mark"], [row["tid"] for row in current])
            done = Consolidated(len(made), len(problems))
            await job.tell(tx, done)
        return _Step(len(rows), rows[-1]["key"] if rows else None, done)

    def _map(self, rows: Iterable[asyncpg.Record]) -> tuple[list[_Made], list[tuple[str, str]]]:
        made, problems = [], []
        for row in rows:
            found = self._job.recipe.map(row["texts"])
            if isinstance(found, Problem):
                problems.append((row["key"], found.reason))
            else:
                made.append(_made(row, found))
        return made, problems

    async def _upsert(self, made: Sequence[_Made]) -> None:
        size, slots = self._job.section.upsert_size, asyncio.Semaphore(self._job.section.upserts_at_once)
        await _all(self._upsert_some(made[start : start + size], slots) for start in range(0, len(made), size))

    async def _upsert_some(self, made: Sequence[_Made], slots: asyncio.Semaphore) -> None:
        job = self._job
        call = (job.feed, job.run_id, job.pricing_version, job.db.clock.now())
        async with slots:
            await job.db.execute(_SQL["upsert"], *call, *map(list, zip(*made, strict=True)))

    async def _reject(self, tx: Connection, problems: Sequence[tuple[str, str]]) -> None:
        if problems:
            keys, reasons = map(list, zip(*problems, strict=True))
            job = self._job
            await tx.execute(_SQL["reject"], job.feed, job.run_id, job.db.clock.now(), keys, reasons)


def _made(row: asyncpg.Record, mapped: Mapped) -> _Made:
    # A decimal keeps all its digits: it is written as it is, not by way of a float.
    fields = {
        name: orjson.Fragment(format(value, "f")) if isinstance(value, Decimal) else value
        for name, value in mapped.fields.items()
    }
    text = orjson.dumps(fields).decode()
    return _Made(row["key"], text, mapped.cost, mapped.price, mapped.rule, row["version"], row["is_gone"])


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, at once; when one fails, none is left running."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
