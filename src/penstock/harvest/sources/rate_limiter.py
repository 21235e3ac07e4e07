"""H15: when a source may be called. All processes of a feed agree on it in one row of the database.

A healthy source without a rate costs a look at that row twice a second; under a rate, requests that wait take their
slots together, so a busy process asks once for many.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from penstock.harvest.config import CallSection
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.kernel.db.database import Database
from penstock.kernel.db.sql import load
from penstock.kernel.errors import Transient
from penstock.kernel.tasks.backoff import compute_delay
from penstock.kernel.tasks.outcome import clean_reason

PATIENCE = timedelta(seconds=5)  # who would wait longer is told so, and does something else meanwhile
REFRESH = timedelta(seconds=0.5)  # how late another process's pause may be noticed
PAUSED, BROKEN_OFF = "SOURCE_PAUSED", "SOURCE_CIRCUIT_OPEN"
CLOSED = (PAUSED, BROKEN_OFF)  # what the gate itself raises: asking again at once is no use
_FIRST_PAUSE = timedelta(seconds=1)  # after a 429 that does not say how long
_GRACE = timedelta(seconds=1)  # for a request that probes, to tell how it went
_NOTHING = timedelta(0)
_NEVER = datetime.min.replace(tzinfo=UTC)
_SQL = load("penstock.harvest.sources", file="rate_limiter.sql")


@dataclass(frozen=True, slots=True)
class _QueueState:
    """How the feed stood at *at*."""

    at: datetime = _NEVER
    paused_until: datetime = _NEVER
    because: str = ""
    failures: int = 0
    breaks: int = 0  # more than none: broken off, until a request that probes is answered
    probed_at: datetime = _NEVER


@dataclass(eq=False, slots=True)
class _RequestSlot:
    """A request that wants a slot, and when it may go."""

    at: datetime = _NEVER
    is_taken: bool = False


class RateLimiter:
    """Lets the requests of one process pass, in step with all others of the feed."""

    def __init__(self, feed: str, call: CallSection, db: Database, *, patience: timedelta = PATIENCE) -> None:
        self.clock = db.clock
        self._feed = feed
        self._call = call
        self._db = db
        self._patience = patience
        self._room = asyncio.Semaphore(call.at_once)
        self._asking = asyncio.Lock()
        self._turns: list[_RequestSlot] = []
        self._standing = _QueueState()
        self._throttled = 0  # pauses without a length, in a row

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Around one request: waits until it may go, and learns from how it ends.

        SourcePaused or SourceFailed SOURCE_CIRCUIT_OPEN when that would take too long. Inside, SourcePaused means that
        the source asks for a pause (as long as its *after*, which is set when it is not), SourceRefused is an answer
        like any other, and any other SourceFailed is a failure.
        """
        async with self._room:
            claim = await self._admitted()
            try:
                yield
            except SourcePaused as paused:
                paused.after = await self._pause(paused, claim)
                raise
            except SourceRefused:
                await self._succeed(claim)
                raise
            except SourceFailed as failed:
                await self._fail(failed, claim)
                raise
            except BaseException:
                await self._leave(claim)
                raise
            else:
                await self._succeed(claim)

    async def _admitted(self) -> datetime | None:
        """Back when a request may go; with its claim, if it is the one that probes."""
        deadline = self.clock.now() + self._patience
        while True:
            await self._refresh()
            now, standing = self.clock.now(), self._standing
            if standing.paused_until > now:
                await self._wait(standing.paused_until, deadline)
            elif standing.breaks:
                if await self._change("claim_probe", now, self._probe_time):
                    return now
                await self._wait_for_probe(now, deadline)
            elif self._call.rate is None:
                return None
            else:
                await self._wait_for_slot(self._call.rate)
                if not self._standing.breaks and self._standing.paused_until <= self.clock.now():
                    return None

    async def _wait(self, until: datetime, deadline: datetime) -> None:
        """Sleep until then; not beyond the deadline."""
        now = self.clock.now()
        if until > deadline:
            raise self._closed(until - now)
        await asyncio.sleep((until - now).total_seconds())

    async def _wait_for_probe(self, now: datetime, deadline: datetime) -> None:
        """Look again a little later, as long as patience lasts."""
        if now + REFRESH > deadline:
            raise self._closed(max(REFRESH, self._standing.probed_at + self._probe_time - now))
        await asyncio.sleep(REFRESH.total_seconds())

    def _closed(self, after: timedelta) -> SourceFailed:
        because = self._standing.because
        if self._standing.breaks:
            return SourceFailed(BROKEN_OFF, f"no requests after failures in a row, the last: {because}", after=after)
        is_paused = self._standing.paused_until > self.clock.now()
        return SourcePaused(PAUSED, because if is_paused else "all requests of this rate are taken", after=after)

    async def _wait_for_slot(self, rate: float) -> None:
        """Sleep until this request may go. All that ask while one question is under way share the next."""
        turn = _RequestSlot()
        self._turns.append(turn)
        try:
            async with self._asking:
                if turn.at is _NEVER:
                    await self._take(timedelta(seconds=1 / rate))
        finally:
            with contextlib.suppress(ValueError):
                self._turns.remove(turn)
        wait = turn.at - self.clock.now()
        if not turn.is_taken:
            raise self._closed(wait)
        if wait > _NOTHING:
            await asyncio.sleep(wait.total_seconds())

    async def _take(self, apart: timedelta) -> None:
        """Give every turn its time. One beyond our patience is told, but not taken: nobody would wait for it."""
        turns, self._turns = self._turns, []
        now, burst = self.clock.now(), apart * (self._call.burst - 1)
        try:
            row = await self._ask("take", now, len(turns), apart, now + self._patience + burst)
        except BaseException:
            self._turns = turns + self._turns
            raise
        for n, turn in enumerate(turns):
            turn.at, turn.is_taken = max(now, row["first"] + n * apart - burst), n < row["slots"]

    async def _refresh(self) -> None:
        """Know of the last half second; all that ask share one look."""
        if self.clock.now() < self._standing.at + REFRESH:
            return
        async with self._asking:
            if self.clock.now() >= self._standing.at + REFRESH:
                await self._ask("look")

    async def _pause(self, paused: SourcePaused, claim: datetime | None) -> timedelta:
        """Stop all requests for as long as the source asks for; how long that is."""
        now, standing = self.clock.now(), self._standing
        until = now + min(self._pause_time(paused.after), self._call.longest_pause)
        if claim or until > standing.paused_until:
            self._standing = replace(standing, paused_until=until)  # of many that are refused at once, one tells
            await self._change("pause", until, clean_reason(paused.message), claim)
        return self._standing.paused_until - now

    def _pause_time(self, asked: timedelta | None) -> timedelta:
        if asked is not None:
            return asked
        left = self._standing.paused_until - self.clock.now()
        if left > _NOTHING:
            return left
        self._throttled += 1
        return compute_delay(self._throttled, first=_FIRST_PAUSE)

    async def _fail(self, failed: SourceFailed, claim: datetime | None) -> None:
        limits = (self._call.break_after, clean_reason(str(failed)), self._call.break_for)
        await self._change("fail", self.clock.now(), *limits, claim)

    async def _succeed(self, claim: datetime | None) -> None:
        self._throttled = 0
        if claim or (self._standing.failures and not self._standing.breaks):
            self._standing = replace(self._standing, failures=0)  # of many successes, one tells
            await self._change("succeed", claim)

    async def _leave(self, claim: datetime | None) -> None:
        if claim:
            # Should the database be away, the claim runs out by itself; what called us off must not be hidden.
            with contextlib.suppress(Transient):
                await asyncio.shield(self._db.execute(_SQL["leave_probe"], self._feed, claim))

    @property
    def _probe_time(self) -> timedelta:
        return self._call.timeout + _GRACE

    async def _ask(self, name: str, *args: Any) -> asyncpg.Record:
        """One statement over the feed's row, which is made when it is not there."""
        while (row := await self._change(name, *args)) is None:
            await self._db.execute(_SQL["make"], self._feed)
        return row

    async def _change(self, name: str, *args: Any) -> asyncpg.Record | None:
        """One statement over the feed's row, and how it stands after it; None when it did not apply."""
        row = await self._db.fetchrow(_SQL[name], self._feed, *args)
        if row is not None:
            self._standing = _QueueState(
                self.clock.now(),
                row["paused_until"] or _NEVER,
                row["paused_because"] or "",
                row["failures"],
                row["breaks"],
                row["probed_at"] or _NEVER,
            )
        return row
