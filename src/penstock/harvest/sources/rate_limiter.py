"""H15: the rate limiter and the circuit breaker of a feed. All processes share them in one row of the database.

A healthy source without a rate costs two reads of that row per second. Under a rate, waiting requests take their slots
together, so that a busy process needs one statement for many requests.
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
from penstock.kernel.tasks.outcome import sanitize_reason

MAX_WAIT = timedelta(seconds=5)  # a request that would wait longer fails, so that its worker can do other work
REFRESH = timedelta(seconds=0.5)  # delay until a pause of another process is noticed
PAUSED, CIRCUIT_OPEN = "SOURCE_PAUSED", "SOURCE_CIRCUIT_OPEN"
CLOSED = (PAUSED, CIRCUIT_OPEN)  # raised by the rate limiter itself: an immediate retry is useless
_FIRST_PAUSE = timedelta(seconds=1)  # after a 429 without Retry-After
_GRACE = timedelta(seconds=1)  # for a probe to report its result
_ZERO = timedelta(0)
_NEVER = datetime.min.replace(tzinfo=UTC)
_SQL = load("penstock.harvest.sources", file="rate_limiter.sql")


@dataclass(frozen=True, slots=True)
class _LimiterState:
    """The state of the feed at the time *at*."""

    at: datetime = _NEVER
    paused_until: datetime = _NEVER
    pause_reason: str = ""
    failures: int = 0
    breaks: int = 0  # above 0: the circuit is open until a probe succeeds
    probed_at: datetime = _NEVER


@dataclass(eq=False, slots=True)
class _RequestSlot:
    """A request that waits for a slot, and the time of the slot."""

    at: datetime = _NEVER
    is_taken: bool = False


class RateLimiter:
    """Limits the requests of one process together with those of all other processes of the feed."""

    def __init__(self, feed: str, call: CallSection, db: Database, *, max_wait: timedelta = MAX_WAIT) -> None:
        self.clock = db.clock
        self._feed = feed
        self._call = call
        self._db = db
        self._max_wait = max_wait
        self._running = asyncio.Semaphore(call.concurrency)
        self._query_lock = asyncio.Lock()
        self._waiting: list[_RequestSlot] = []
        self._state = _LimiterState()
        self._throttled = 0  # consecutive pauses without Retry-After

    @asynccontextmanager
    async def limit_request(self) -> AsyncIterator[None]:
        """Wait until a request may be sent, run the block, and record its result.

        Raise SourcePaused, or SourceFailed SOURCE_CIRCUIT_OPEN, if the wait would be too long. A SourcePaused of the
        block is a pause that the source requests, for the time *after*, which is set if it is missing. A SourceRefused
        counts as a response, and any other SourceFailed as a failure.
        """
        async with self._running:
            claim = await self._wait_for_admission()
            try:
                yield
            except SourcePaused as paused:
                paused.after = await self._pause(paused, claim)
                raise
            except SourceRefused:
                await self._record_success(claim)
                raise
            except SourceFailed as failed:
                await self._record_failure(failed, claim)
                raise
            except BaseException:
                await self._release_probe(claim)
                raise
            else:
                await self._record_success(claim)

    async def _wait_for_admission(self) -> datetime | None:
        """Return when a request may be sent, with its claim if it is the probe."""
        deadline = self.clock.now() + self._max_wait
        while True:
            await self._refresh()
            now, state = self.clock.now(), self._state
            if state.paused_until > now:
                await self._wait_until(state.paused_until, deadline)
            elif state.breaks:
                if await self._update("claim_probe", now, self._probe_timeout):
                    return now
                await self._wait_for_probe(now, deadline)
            elif self._call.rate is None:
                return None
            else:
                await self._wait_for_slot(self._call.rate)
                if not self._state.breaks and self._state.paused_until <= self.clock.now():
                    return None

    async def _wait_until(self, until: datetime, deadline: datetime) -> None:
        """Sleep until the time, or raise if it is after the deadline."""
        now = self.clock.now()
        if until > deadline:
            raise self._make_closed_error(until - now)
        await asyncio.sleep((until - now).total_seconds())

    async def _wait_for_probe(self, now: datetime, deadline: datetime) -> None:
        """Sleep before the next check of the state, or raise if that is after the deadline."""
        if now + REFRESH > deadline:
            raise self._make_closed_error(max(REFRESH, self._state.probed_at + self._probe_timeout - now))
        await asyncio.sleep(REFRESH.total_seconds())

    def _make_closed_error(self, after: timedelta) -> SourceFailed:
        reason = self._state.pause_reason
        if self._state.breaks:
            return SourceFailed(
                CIRCUIT_OPEN, f"the circuit breaker is open after consecutive failures, the last: {reason}", after=after
            )
        is_paused = self._state.paused_until > self.clock.now()
        return SourcePaused(
            PAUSED, reason if is_paused else "all requests of the configured rate are in use", after=after
        )

    async def _wait_for_slot(self, rate: float) -> None:
        """Sleep until the slot of this request. Requests that arrive during a statement share the next statement."""
        slot = _RequestSlot()
        self._waiting.append(slot)
        try:
            async with self._query_lock:
                if slot.at is _NEVER:
                    await self._take_slots(timedelta(seconds=1 / rate))
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(slot)
        wait = slot.at - self.clock.now()
        if not slot.is_taken:
            raise self._make_closed_error(wait)
        if wait > _ZERO:
            await asyncio.sleep(wait.total_seconds())

    async def _take_slots(self, interval: timedelta) -> None:
        """Set the time of every waiting slot. A slot after the maximum wait is not taken, because its request fails."""
        slots, self._waiting = self._waiting, []
        now, burst = self.clock.now(), interval * (self._call.burst - 1)
        try:
            row = await self._query("take_slots", now, len(slots), interval, now + self._max_wait + burst)
        except BaseException:
            self._waiting = slots + self._waiting
            raise
        for number, slot in enumerate(slots):
            slot.at, slot.is_taken = max(now, row["first"] + number * interval - burst), number < row["slots"]

    async def _refresh(self) -> None:
        """Read the state if it is older than half a second; concurrent callers share one read."""
        if self.clock.now() < self._state.at + REFRESH:
            return
        async with self._query_lock:
            if self.clock.now() >= self._state.at + REFRESH:
                await self._query("read_state")

    async def _pause(self, paused: SourcePaused, claim: datetime | None) -> timedelta:
        """Stop all requests for the time that the source requests, and return that time."""
        now, state = self.clock.now(), self._state
        until = now + min(self._choose_pause(paused.after), self._call.max_pause)
        if claim or until > state.paused_until:
            self._state = replace(state, paused_until=until)  # of many concurrent 429s, one writes
            await self._update("record_pause", until, sanitize_reason(paused.message), claim)
        return self._state.paused_until - now

    def _choose_pause(self, requested: timedelta | None) -> timedelta:
        if requested is not None:
            return requested
        remaining = self._state.paused_until - self.clock.now()
        if remaining > _ZERO:
            return remaining
        self._throttled += 1
        return compute_delay(self._throttled, first=_FIRST_PAUSE)

    async def _record_failure(self, failed: SourceFailed, claim: datetime | None) -> None:
        limits = (self._call.break_after, sanitize_reason(str(failed)), self._call.break_for)
        await self._update("record_failure", self.clock.now(), *limits, claim)

    async def _record_success(self, claim: datetime | None) -> None:
        self._throttled = 0
        if claim or (self._state.failures and not self._state.breaks):
            self._state = replace(self._state, failures=0)  # of many concurrent successes, one writes
            await self._update("record_success", claim)

    async def _release_probe(self, claim: datetime | None) -> None:
        if claim:
            # Without the database the claim expires. Its error must not replace the cancellation.
            with contextlib.suppress(Transient):
                await asyncio.shield(self._db.execute(_SQL["release_probe"], self._feed, claim))

    @property
    def _probe_timeout(self) -> timedelta:
        return self._call.timeout + _GRACE

    async def _query(self, name: str, *args: Any) -> asyncpg.Record:
        """Execute a statement on the row of the feed, which is inserted if it is missing."""
        while (row := await self._update(name, *args)) is None:
            await self._db.execute(_SQL["insert_feed"], self._feed)
        return row

    async def _update(self, name: str, *args: Any) -> asyncpg.Record | None:
        """Execute a statement on the row of the feed, and store the returned state; return None if no row matched."""
        row = await self._db.fetchrow(_SQL[name], self._feed, *args)
        if row is not None:
            self._state = _LimiterState(
                self.clock.now(),
                row["paused_until"] or _NEVER,
                row["pause_reason"] or "",
                row["failures"],
                row["breaks"],
                row["probed_at"] or _NEVER,
            )
        return row
