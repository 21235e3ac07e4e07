"""The rate limiter and the circuit breaker of two processes of one feed, each with its own pool."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from penstock.harvest.config import CallSection
from penstock.harvest.sources.port import SourceFailed, SourcePaused, SourceRefused
from penstock.harvest.sources.rate_limiter import REFRESH, RateLimiter
from penstock.kernel.clock import ManualClock
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Transient

SECOND = timedelta(seconds=1)
NO_WAIT = timedelta(0)
FEED = "diamonds"


@pytest.fixture
async def pools(database_url: str, clock: ManualClock) -> AsyncIterator[Sequence[Database]]:
    async with Database.open(database_url, clock=clock) as first, Database.open(database_url, clock=clock) as second:
        await migrate.migrate(first, migrate.load("penstock.harvest"))
        yield first, second


def make_limiters(pools: Sequence[Database], max_wait: timedelta = NO_WAIT, **call: Any) -> list[RateLimiter]:
    """Return one limiter per process. By default they never wait, so that the results do not depend on the speed."""
    return [RateLimiter(FEED, CallSection(**call), db, max_wait=max_wait) for db in pools]


async def passes(limiter: RateLimiter, failure: SourceFailed | None = None) -> bool:
    """Return whether a request may be sent now; it ends with *failure*."""
    is_admitted = False
    try:
        async with limiter.limit_request():
            is_admitted = True
            if failure:
                raise failure
    except SourceFailed:
        pass
    return is_admitted


async def count_admitted(limiter: RateLimiter, number: int) -> int:
    """Return how many of *number* concurrent requests may be sent now."""
    return sum(await asyncio.gather(*(passes(limiter) for _ in range(number))))


async def get_error(limiter: RateLimiter) -> SourceFailed:
    """Return the error of a request that may not be sent."""
    with pytest.raises(SourceFailed) as caught:
        async with limiter.limit_request():
            pytest.fail("the request was admitted")
    return caught.value


async def read_row(db: Database) -> dict[str, Any]:
    return dict(await db.fetchrow("SELECT * FROM harvest_feed WHERE feed = $1", FEED) or {})


def make_failure() -> SourceFailed:
    return SourceFailed("SOURCE_ERROR", "status 500")


def make_pause(after: timedelta | None) -> SourcePaused:
    return SourcePaused("SOURCE_THROTTLED", "status 429", after=after)


async def test_rate_is_shared_by_processes(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: two processes together send at most the burst at once, and the rate afterwards."""
    first, second = make_limiters(pools, rate=10, burst=6)
    assert await count_admitted(first, 4) + await count_admitted(second, 4) == 6
    clock.advance(SECOND / 2)
    assert await count_admitted(second, 20) + await count_admitted(first, 20) == 5
    clock.advance(60 * SECOND)
    assert await count_admitted(first, 20) + await count_admitted(second, 20) == 6  # an idle hour gives no credit


async def test_slot_without_a_waiting_request_is_not_taken(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: a request that would wait too long fails with the time of its slot, and does not take it."""
    first, second = make_limiters(pools, rate=1, burst=1)
    assert await count_admitted(first, 50) == 1
    error = await get_error(second)
    assert isinstance(error, SourcePaused)
    assert error.after == SECOND
    clock.advance(SECOND)
    assert await count_admitted(second, 1) == 1


async def test_rejected_requests_get_different_times(pools: Sequence[Database]) -> None:
    """H15: concurrent requests that are rejected are not retried at the same time."""
    limiter, _ = make_limiters(pools, rate=1, burst=1)
    assert await count_admitted(limiter, 1) == 1
    _, *together = await asyncio.gather(*(get_error(limiter) for _ in range(4)))
    assert [error.after for error in together] == [SECOND, 2 * SECOND, 3 * SECOND]


async def test_requests_under_a_rate_share_statements(pools: Sequence[Database]) -> None:
    """H15: a busy process needs few statements for many requests."""
    limiter, _ = make_limiters(pools, rate=10_000, burst=1_000, concurrency=1_000)
    statements = 0
    update = limiter._update

    async def count(name: str, *args: Any) -> Any:
        nonlocal statements
        statements += 1
        return await update(name, *args)

    limiter._update = count  # type: ignore[method-assign]
    assert await count_admitted(limiter, 500) == 500
    assert statements < 10


async def test_failed_statement_is_repeated_by_the_other_requests(pools: Sequence[Database]) -> None:
    """H15: if the statement for the slots of several requests fails, only its own request fails."""
    limiter, _ = make_limiters(pools, rate=100, burst=100)
    update, slots = limiter._update, []

    async def fail_once(name: str, *args: Any) -> Any:
        if name == "take_slots":
            slots.append(args[1])
            if len(slots) == 1:
                raise Transient("DATABASE_DOWN", "not now")
        return await update(name, *args)

    limiter._update = fail_once  # type: ignore[method-assign]
    results = await asyncio.gather(*(passes(limiter) for _ in range(5)), return_exceptions=True)
    assert slots == [5, 4]  # without the failed request
    assert [type(result) for result in results].count(Transient) == 1
    assert results.count(True) == 4


async def test_healthy_source_without_a_rate_needs_no_statements(
    pools: Sequence[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H15: many requests within half a second read the row once, and never write it."""
    limiter, _ = make_limiters(pools)
    assert await count_admitted(limiter, 1) == 1  # inserts the row
    queries: list[str] = []
    fetchrow = pools[0].fetchrow

    async def record(query: str, *args: object) -> object:
        queries.append(query)
        return await fetchrow(query, *args)

    monkeypatch.setattr(pools[0], "fetchrow", record)
    assert await count_admitted(limiter, 400) == 400
    assert len(queries) <= 1
    assert all(query.startswith(("-- ", "SELECT")) and "UPDATE" not in query for query in queries)


async def test_concurrency_is_limited(pools: Sequence[Database]) -> None:
    """H15: `concurrency` limits the requests of one process."""
    limiter, _ = make_limiters(pools, concurrency=3)
    inside, most, is_full = 0, 0, asyncio.Event()

    async def request() -> None:
        nonlocal inside, most
        async with limiter.limit_request():
            inside += 1
            most = max(most, inside)
            if inside == 3:
                is_full.set()
            await is_full.wait()
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(request() for _ in range(9)))
    assert most == 3


async def test_pause_applies_to_all_processes(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: a Retry-After of one process pauses the other one within half a second, and ends for both."""
    first, second = make_limiters(pools)
    assert await passes(second)
    assert await passes(first, make_pause(30 * SECOND))
    clock.advance(REFRESH)
    for limiter in (first, second):
        error = await get_error(limiter)
        assert isinstance(error, SourcePaused)
        assert (error.code, error.message) == ("SOURCE_PAUSED", "status 429")
        assert error.after == 30 * SECOND - REFRESH
    clock.advance(30 * SECOND)
    assert [await passes(first), await passes(second)] == [True, True]


async def test_pause_is_never_shortened_and_has_a_maximum(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: the longer one of two pauses applies, up to `max_pause`."""
    first, second = make_limiters(pools, max_pause=timedelta(minutes=2))
    assert await passes(second)
    assert await passes(first, make_pause(90 * SECOND))
    assert await passes(second, make_pause(10 * SECOND))  # which has not read the first pause
    assert (await read_row(pools[0]))["paused_until"] == clock.now() + 90 * SECOND
    clock.advance(90 * SECOND)
    requested = make_pause(timedelta(days=400))
    assert await passes(first, requested)
    assert requested.after == timedelta(minutes=2)
    assert (await read_row(pools[0]))["paused_until"] == clock.now() + timedelta(minutes=2)


async def test_pause_without_retry_after_grows(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: after a 429 without Retry-After the pause grows each time, until a success."""
    limiter, _ = make_limiters(pools)
    lengths = []
    for _ in range(5):
        requested = make_pause(None)
        assert await passes(limiter, requested)
        assert requested.after is not None
        lengths.append(requested.after)
        clock.advance(requested.after)
    assert lengths[0] <= SECOND
    assert lengths[4] >= 8 * SECOND
    assert await passes(limiter)
    requested = make_pause(None)
    assert await passes(limiter, requested)
    assert requested.after is not None
    assert requested.after <= SECOND


async def test_concurrent_429s_are_one_pause(pools: Sequence[Database]) -> None:
    """H15: concurrent 429s do not increase the pause."""
    limiter, _ = make_limiters(pools)
    all_sent = asyncio.Barrier(30)

    async def throttled() -> timedelta | None:
        with pytest.raises(SourcePaused) as caught:
            async with limiter.limit_request():
                await all_sent.wait()
                raise make_pause(None)
        return caught.value.after

    lengths = await asyncio.gather(*(throttled() for _ in range(30)))
    assert max(length or 60 * SECOND for length in lengths) <= SECOND


async def test_short_pause_is_awaited(database_url: str) -> None:
    """H15: a request during a short pause is sent after it."""
    async with Database.open(database_url) as db:
        await migrate.migrate(db, migrate.load("penstock.harvest"))
        limiter = RateLimiter(FEED, CallSection(), db)
        until = db.clock.now() + SECOND / 5
        assert await passes(limiter, make_pause(SECOND / 5))
        async with limiter.limit_request():
            assert db.clock.now() >= until


async def test_consecutive_failures_stop_all_processes(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: the circuit breaker counts failures of all processes and opens for all; its error has the last failure."""
    first, second = make_limiters(pools, break_after=4, break_for=30 * SECOND)
    for limiter in (first, second, first):
        assert await passes(limiter, make_failure())
    assert await passes(second)  # a success ends the row of failures
    for limiter in (first, second, second, first):
        assert await passes(limiter, make_failure())
    clock.advance(REFRESH)
    for limiter in (first, second):
        error = await get_error(limiter)
        assert not isinstance(error, SourcePaused)
        assert error.code == "SOURCE_CIRCUIT_OPEN"
        assert "SOURCE_ERROR: status 500" in error.message
        assert error.after == 30 * SECOND - REFRESH


async def test_success_ends_failures_of_another_process(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: a success resets the failures that another process counted."""
    first, second = make_limiters(pools, break_after=3)
    assert await passes(second)
    assert await passes(first, make_failure())
    assert await passes(first, make_failure())
    clock.advance(REFRESH)
    assert await passes(second)
    assert (await read_row(pools[0]))["failures"] == 0


async def test_one_request_probes(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: after the pause one request of all processes probes; its success admits all requests."""
    first, second = make_limiters(pools, break_after=1, break_for=10 * SECOND)
    assert await passes(first, make_failure())
    clock.advance(10 * SECOND)
    async with first.limit_request():
        assert (await get_error(first)).code == "SOURCE_CIRCUIT_OPEN"
        assert (await get_error(second)).code == "SOURCE_CIRCUIT_OPEN"
    clock.advance(REFRESH)
    assert await count_admitted(first, 5) + await count_admitted(second, 5) == 10
    assert (await read_row(pools[0]))["breaks"] == 0


async def test_failed_probe_doubles_the_pause(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: each failed probe doubles the pause, up to four times `break_for`."""
    first, second = make_limiters(pools, break_after=1, break_for=10 * SECOND)
    lengths = []
    for limiter in (first, second, first, second, first, second, first):
        assert await passes(limiter, make_failure())
        length = (await read_row(pools[0]))["paused_until"] - clock.now()
        lengths.append(length / SECOND)
        clock.advance(length)
    assert lengths == [10, 20, 40, 40, 40, 40, 40]


async def test_probe_without_a_result_is_replaced(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: after the timeout of a request another process may probe."""
    first, second = make_limiters(pools, break_after=1, break_for=10 * SECOND, timeout=5 * SECOND)
    assert await passes(first, make_failure())
    clock.advance(10 * SECOND)
    async with first.limit_request():
        clock.advance(4 * SECOND)
        assert (await get_error(second)).after == 2 * SECOND
        clock.advance(2 * SECOND)
        assert await passes(second, make_failure())
    assert (await get_error(second)).code == "SOURCE_CIRCUIT_OPEN"  # the late success of the first probe does not count


async def test_cancelled_probe_releases_its_claim(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: after the cancellation of a probe another process may probe."""
    first, second = make_limiters(pools, break_after=1, break_for=10 * SECOND)
    assert await passes(first, make_failure())
    clock.advance(10 * SECOND)
    with pytest.raises(KeyboardInterrupt):
        async with first.limit_request():
            raise KeyboardInterrupt
    assert await passes(second)


async def test_running_requests_do_not_change_an_open_breaker(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: concurrent failures open the circuit breaker once, and a late success among them does not close it."""
    limiter, _ = make_limiters(pools, break_after=1, break_for=10 * SECOND)
    async with limiter.limit_request():
        await asyncio.gather(*(passes(limiter, make_failure()) for _ in range(10)))
    row = await read_row(pools[0])
    assert (row["breaks"], row["paused_until"]) == (1, clock.now() + 10 * SECOND)


@pytest.mark.parametrize("response", [make_pause(30 * SECOND), SourceRefused("SOURCE_REFUSED", "status 400")])
async def test_any_response_to_a_probe_closes_the_breaker(
    pools: Sequence[Database], clock: ManualClock, response: SourceFailed
) -> None:
    """H15: a source that throttles or refuses is available."""
    first, second = make_limiters(pools, break_after=1, break_for=10 * SECOND)
    assert await passes(first, make_failure())
    clock.advance(10 * SECOND)
    assert await passes(second, response)
    row = await read_row(pools[0])
    assert (row["failures"], row["breaks"], row["probed_at"]) == (0, 0, None)
    clock.advance(30 * SECOND)
    assert await passes(first)


async def test_refusals_and_pauses_do_not_count_as_failures(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: a refusal or a pause does not open the circuit breaker."""
    limiter, _ = make_limiters(pools, break_after=1)
    assert await passes(limiter, SourceRefused("SOURCE_REFUSED", "no such field"))
    assert await passes(limiter, make_pause(SECOND))
    clock.advance(SECOND)
    assert await passes(limiter)
