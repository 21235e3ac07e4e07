"""The gate: what two processes of one feed agree on, each with a pool of its own."""

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
NOT_AT_ALL = timedelta(0)
FEED = "diamonds"


@pytest.fixture
async def pools(database_url: str, clock: ManualClock) -> AsyncIterator[Sequence[Database]]:
    async with Database.open(database_url, clock=clock) as first, Database.open(database_url, clock=clock) as second:
        await migrate.migrate(first, migrate.load("penstock.harvest"))
        yield first, second


def gates(pools: Sequence[Database], patience: timedelta = NOT_AT_ALL, **call: Any) -> list[RateLimiter]:
    """One per process; by default they never wait, so what they let pass does not depend on how fast we are."""
    return [RateLimiter(FEED, CallSection(**call), db, max_wait=patience) for db in pools]


async def passes(gate: RateLimiter, failing: SourceFailed | None = None) -> bool:
    """Whether a request may go now; it ends as told."""
    is_in = False
    try:
        async with gate.request():
            is_in = True
            if failing:
                raise failing
    except SourceFailed:
        pass
    return is_in


async def admitted(gate: RateLimiter, most: int) -> int:
    """How many of *most* requests may go now, asked for at once."""
    return sum(await asyncio.gather(*(passes(gate) for _ in range(most))))


async def closed(gate: RateLimiter) -> SourceFailed:
    """Why nobody may go, and for how long."""
    with pytest.raises(SourceFailed) as caught:
        async with gate.request():
            pytest.fail("the gate was open")
    return caught.value


async def row(db: Database) -> dict[str, Any]:
    return dict(await db.fetchrow("SELECT * FROM harvest_feed WHERE feed = $1", FEED) or {})


def failure() -> SourceFailed:
    return SourceFailed("SOURCE_ERROR", "it answered 500")


def pause(after: timedelta | None) -> SourcePaused:
    return SourcePaused("SOURCE_THROTTLED", "it answered 429", after=after)


async def test_a_rate_is_shared_by_processes(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: two processes together send no more than the burst at once, and the rate afterwards."""
    first, second = gates(pools, rate=10, burst=6)
    assert await admitted(first, 4) + await admitted(second, 4) == 6
    clock.advance(SECOND / 2)
    assert await admitted(second, 20) + await admitted(first, 20) == 5
    clock.advance(60 * SECOND)
    assert await admitted(first, 20) + await admitted(second, 20) == 6  # an idle hour gives no credit


async def test_a_slot_nobody_waits_for_is_not_taken(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: those who would wait too long are told how long, and leave the slots to others."""
    first, second = gates(pools, rate=1, burst=1)
    assert await admitted(first, 50) == 1
    refused = await closed(second)
    assert isinstance(refused, SourcePaused)
    assert refused.after == SECOND
    clock.advance(SECOND)
    assert await admitted(second, 1) == 1


async def test_those_told_to_come_later_are_told_different_times(pools: Sequence[Database]) -> None:
    """H15: those who ask together do not come back together."""
    gate, _ = gates(pools, rate=1, burst=1)
    assert await admitted(gate, 1) == 1
    _, *together = await asyncio.gather(*(closed(gate) for _ in range(4)))  # the first one asks for itself
    assert [error.after for error in together] == [SECOND, 2 * SECOND, 3 * SECOND]


async def test_requests_under_a_rate_share_their_questions(pools: Sequence[Database]) -> None:
    """H15: a busy process does not ask the database for every request."""
    gate, _ = gates(pools, rate=10_000, burst=1_000, concurrency=1_000)
    asked = 0
    ask = gate._update

    async def counted(name: str, *args: Any) -> Any:
        nonlocal asked
        asked += 1
        return await ask(name, *args)

    gate._update = counted  # type: ignore[method-assign]
    assert await admitted(gate, 500) == 500
    assert asked < 10


async def test_a_question_that_fails_is_asked_again_by_the_others(pools: Sequence[Database]) -> None:
    """H15: whoever asked for the slots of all may fail or be cancelled; the others are not forgotten."""
    gate, _ = gates(pools, rate=100, burst=100)
    ask, wanted = gate._update, []

    async def failing_once(name: str, *args: Any) -> Any:
        if name == "take_slots":
            wanted.append(args[1])
            if len(wanted) == 1:
                raise Transient("DATABASE_DOWN", "not now")
        return await ask(name, *args)

    gate._update = failing_once  # type: ignore[method-assign]
    ends = await asyncio.gather(*(passes(gate) for _ in range(5)), return_exceptions=True)
    assert wanted == [5, 4]  # the one that failed does not ask again
    assert [type(end) for end in ends].count(Transient) == 1
    assert ends.count(True) == 4


async def test_a_healthy_source_without_a_rate_costs_no_questions(
    pools: Sequence[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H15: many requests within half a second look at the row once, and never write it."""
    gate, _ = gates(pools)
    assert await admitted(gate, 1) == 1  # the row is made
    asked: list[str] = []
    fetchrow = pools[0].fetchrow

    async def counted(query: str, *args: object) -> object:
        asked.append(query)
        return await fetchrow(query, *args)

    monkeypatch.setattr(pools[0], "fetchrow", counted)
    assert await admitted(gate, 400) == 400
    assert len(asked) <= 1
    assert all(query.startswith(("-- ", "SELECT")) and "UPDATE" not in query for query in asked)


async def test_no_more_than_so_many_requests_are_under_way(pools: Sequence[Database]) -> None:
    """H15: at_once bounds one process."""
    gate, _ = gates(pools, concurrency=3)
    inside, most, is_full = 0, 0, asyncio.Event()

    async def held() -> None:
        nonlocal inside, most
        async with gate.request():
            inside += 1
            most = max(most, inside)
            if inside == 3:
                is_full.set()
            await is_full.wait()
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(held() for _ in range(9)))
    assert most == 3


async def test_a_pause_holds_for_all_processes(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: a Retry-After that one process got is heeded by the other within half a second, and ends for both."""
    first, second = gates(pools)
    assert await passes(second)
    assert await passes(first, pause(30 * SECOND))
    clock.advance(REFRESH)
    for gate in (first, second):
        refused = await closed(gate)
        assert isinstance(refused, SourcePaused)
        assert (refused.code, refused.message) == ("SOURCE_PAUSED", "it answered 429")
        assert refused.after == 30 * SECOND - REFRESH
    clock.advance(30 * SECOND)
    assert [await passes(first), await passes(second)] == [True, True]


async def test_a_pause_is_never_shortened_nor_too_long(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: of two pauses the longer holds, whoever knew of it; and no source stops us for a year."""
    first, second = gates(pools, max_pause=timedelta(minutes=2))
    assert await passes(second)
    assert await passes(first, pause(90 * SECOND))
    assert await passes(second, pause(10 * SECOND))  # which has not looked since
    assert (await row(pools[0]))["paused_until"] == clock.now() + 90 * SECOND
    clock.advance(90 * SECOND)
    asked = pause(timedelta(days=400))
    assert await passes(first, asked)
    assert asked.after == timedelta(minutes=2)
    assert (await row(pools[0]))["paused_until"] == clock.now() + timedelta(minutes=2)


async def test_a_pause_of_no_length_grows(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: a 429 that does not say how long is backed off from, longer each time; an answer ends that."""
    gate, _ = gates(pools)
    lengths = []
    for _ in range(5):
        asked = pause(None)
        assert await passes(gate, asked)
        assert asked.after is not None
        lengths.append(asked.after)
        clock.advance(asked.after)
    assert lengths[0] <= SECOND
    assert lengths[4] >= 8 * SECOND
    assert await passes(gate)
    asked = pause(None)
    assert await passes(gate, asked)
    assert asked.after is not None
    assert asked.after <= SECOND


async def test_many_refused_at_once_are_one_pause(pools: Sequence[Database]) -> None:
    """H15: thirty requests that get a 429 together do not back off thirty times."""
    gate, _ = gates(pools)
    all_in = asyncio.Barrier(30)

    async def throttled() -> timedelta | None:
        with pytest.raises(SourcePaused) as caught:
            async with gate.request():
                await all_in.wait()
                raise pause(None)
        return caught.value.after

    lengths = await asyncio.gather(*(throttled() for _ in range(30)))
    assert max(length or 60 * SECOND for length in lengths) <= SECOND


async def test_a_short_pause_is_waited_for(database_url: str) -> None:
    """H15: whoever comes during a pause of a moment goes when it is over."""
    async with Database.open(database_url) as db:
        await migrate.migrate(db, migrate.load("penstock.harvest"))
        gate = RateLimiter(FEED, CallSection(), db)
        until = db.clock.now() + SECOND / 5
        assert await passes(gate, pause(SECOND / 5))
        async with gate.request():
            assert db.clock.now() >= until


async def test_failures_in_a_row_stop_all_processes(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: the breaker counts the failures of both, opens for both, and says what went wrong; that is a failure."""
    first, second = gates(pools, break_after=4, break_for=30 * SECOND)
    for gate in (first, second, first):
        assert await passes(gate, failure())
    assert await passes(second)  # one answer, and they are not in a row any more
    for gate in (first, second, second, first):
        assert await passes(gate, failure())
    clock.advance(REFRESH)
    for gate in (first, second):
        refused = await closed(gate)
        assert not isinstance(refused, SourcePaused)
        assert refused.code == "SOURCE_CIRCUIT_OPEN"
        assert "SOURCE_ERROR: it answered 500" in refused.message
        assert refused.after == 30 * SECOND - REFRESH


async def test_a_success_that_another_process_must_notice(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: failures another process counted are ended by our answer."""
    first, second = gates(pools, break_after=3)
    assert await passes(second)
    assert await passes(first, failure())
    assert await passes(first, failure())
    clock.advance(REFRESH)
    assert await passes(second)
    assert (await row(pools[0]))["failures"] == 0


async def test_one_request_probes(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: when the time is over one request of all tries, the others wait; its answer lets everybody through."""
    first, second = gates(pools, break_after=1, break_for=10 * SECOND)
    assert await passes(first, failure())
    clock.advance(10 * SECOND)
    async with first.request():
        assert (await closed(first)).code == "SOURCE_CIRCUIT_OPEN"
        assert (await closed(second)).code == "SOURCE_CIRCUIT_OPEN"
    clock.advance(REFRESH)
    assert await admitted(first, 5) + await admitted(second, 5) == 10
    assert (await row(pools[0]))["breaks"] == 0


async def test_a_failed_probe_opens_for_longer(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: each time the source is still away it is left alone twice as long, up to sixteen times."""
    first, second = gates(pools, break_after=1, break_for=10 * SECOND)
    lengths = []
    for gate in (first, second, first, second, first, second, first):
        assert await passes(gate, failure())
        length = (await row(pools[0]))["paused_until"] - clock.now()
        lengths.append(length / SECOND)
        clock.advance(length)
    assert lengths == [10, 20, 40, 40, 40, 40, 40]


async def test_a_probe_that_never_tells_is_replaced(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: a process that dies while it probes holds the others up no longer than a request may take."""
    first, second = gates(pools, break_after=1, break_for=10 * SECOND, timeout=5 * SECOND)
    assert await passes(first, failure())
    clock.advance(10 * SECOND)
    async with first.request():
        clock.advance(4 * SECOND)
        assert (await closed(second)).after == 2 * SECOND
        clock.advance(2 * SECOND)
        assert await passes(second, failure())
    assert (await closed(second)).code == "SOURCE_CIRCUIT_OPEN"  # the first one's late answer is not believed


async def test_a_probe_called_off_leaves_it_to_another(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: a worker that stops while it probes gives its claim back."""
    first, second = gates(pools, break_after=1, break_for=10 * SECOND)
    assert await passes(first, failure())
    clock.advance(10 * SECOND)
    with pytest.raises(KeyboardInterrupt):
        async with first.request():
            raise KeyboardInterrupt
    assert await passes(second)


async def test_those_under_way_when_the_breaker_opens_change_nothing(
    pools: Sequence[Database], clock: ManualClock
) -> None:
    """H15: the failures of thirty requests under way break off once, and a late answer among them does not close."""
    gate, _ = gates(pools, break_after=1, break_for=10 * SECOND)
    async with gate.request():
        await asyncio.gather(*(passes(gate, failure()) for _ in range(10)))
    found = await row(pools[0])
    assert (found["breaks"], found["paused_until"]) == (1, clock.now() + 10 * SECOND)


@pytest.mark.parametrize("answer", [pause(30 * SECOND), SourceRefused("SOURCE_REFUSED", "it answered 400")])
async def test_any_answer_to_a_probe_closes_the_breaker(
    pools: Sequence[Database], clock: ManualClock, answer: SourceFailed
) -> None:
    """H15: a source that throttles or refuses is there."""
    first, second = gates(pools, break_after=1, break_for=10 * SECOND)
    assert await passes(first, failure())
    clock.advance(10 * SECOND)
    assert await passes(second, answer)
    found = await row(pools[0])
    assert (found["failures"], found["breaks"], found["probed_at"]) == (0, 0, None)
    clock.advance(30 * SECOND)
    assert await passes(first)


async def test_refusals_and_pauses_are_no_failures(pools: Sequence[Database], clock: ManualClock) -> None:
    """H15: only what the source fails to do counts against it."""
    gate, _ = gates(pools, break_after=1)
    assert await passes(gate, SourceRefused("SOURCE_REFUSED", "no such field"))
    assert await passes(gate, pause(SECOND))
    clock.advance(SECOND)
    assert await passes(gate)
