"""R19: the schedule of loads: one at a time, not too often, not too late."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from itertools import pairwise

import pytest

from penstock.kernel.errors import Corrupt, PenstockError, Transient
from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.load import dictionary_state as states
from penstock.refdata.pod.load.dictionary_state import DictionaryState, LoadLimits

FOREVER = 3600.0
TIMEOUT = 30.0
DOWN = Transient("DATABASE_DOWN", "down")
TURNS = 50  # of the event loop: enough for everything that happens without waiting


class Call:
    """A running load; the test decides its result."""

    def __init__(self, state: DictionaryState, *, full: bool) -> None:
        self.state = state
        self.full = full
        self.began_at = asyncio.get_running_loop().time()
        self.end: asyncio.Future[VersionStamp] = asyncio.get_running_loop().create_future()

    def succeed(self, version: int) -> None:
        self.end.set_result(VersionStamp(version, version))

    def fail(self, error: PenstockError = DOWN) -> None:
        self.end.set_exception(error)


class ControlledLoad:
    """A load function controlled by its test."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.started: asyncio.Queue[Call] = asyncio.Queue()
        self.running = 0
        self.most_running = 0
        self.has_jitter = False  # whether a load waits for the jitter first, like a full load

    async def __call__(self, state: DictionaryState, *, full: bool) -> VersionStamp:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.has_jitter:
                await state.wait_jitter()
            call = Call(state, full=full)
            self.calls.append(call)
            self.started.put_nowait(call)
            return await call.end
        finally:
            self.running -= 1

    async def next(self) -> Call:
        async with asyncio.timeout(TIMEOUT):
            return await self.started.get()

    async def starts_nothing(self) -> bool:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return self.started.empty()


@pytest.fixture
def script() -> ControlledLoad:
    return ControlledLoad()


def make_state(script: ControlledLoad, *, debounce: float = 0.0, jitter: float = 0.0) -> DictionaryState:
    return DictionaryState(DictionaryKey("acme", "LOOSE"), LoadLimits(debounce, jitter, asyncio.Semaphore(1)), script)


@pytest.fixture
async def loaded(script: ControlledLoad) -> AsyncIterator[DictionaryState]:
    """Yield a dictionary at version 1, without delays between loads."""
    state = make_state(script)
    await load_first(state, script)
    yield state
    await state.stop()


async def load_first(state: DictionaryState, script: ControlledLoad) -> None:
    state.request_version(1)
    call = await script.next()
    assert call.full
    call.succeed(1)
    await idle(state)


async def idle(state: DictionaryState) -> None:
    """Return when the requested version is loaded."""
    async with asyncio.timeout(TIMEOUT):
        while state._task is not None:
            await asyncio.wait([state._task])


async def test_one_load_at_a_time(loaded: DictionaryState, script: ControlledLoad) -> None:
    """R19: all requests during a load cause one more load."""
    loaded.request_version(2)
    first = await script.next()
    for version in range(3, 50):
        loaded.request_version(version, immediately=version % 2 == 0)
    assert await script.starts_nothing()
    first.succeed(2)
    second = await script.next()
    second.succeed(49)
    await idle(loaded)
    loaded.request_version(49, immediately=True)  # already loaded
    assert await script.starts_nothing()
    assert (script.most_running, len(script.calls), loaded.version, loaded.lag) == (1, 3, 49, 0)


async def test_a_load_that_started_before_a_request_does_not_satisfy_it(
    loaded: DictionaryState, script: ControlledLoad
) -> None:
    """R19: a reader waits for a load that started after its request."""
    loaded.request_version(2)
    early = await script.next()
    loaded.request_version(3, immediately=True)
    waiting = asyncio.create_task(loaded.wait_for_version(3))
    early.succeed(2)
    late = await script.next()
    assert (waiting.done(), loaded.version) == (False, 2)
    late.succeed(3)
    async with asyncio.timeout(TIMEOUT):
        await waiting


async def test_a_repeated_request_during_a_load_is_not_lost(loaded: DictionaryState, script: ControlledLoad) -> None:
    """R19: a load that started before a commit does not satisfy a request for it, even with the same number."""
    loaded.request_version(3)  # announced before its commit
    early = await script.next()
    loaded.request_version(3, immediately=True)  # committed now
    early.succeed(2)
    assert not await script.starts_nothing()
    (await script.next()).succeed(3)
    await loaded.wait_for_version(3)


async def test_a_missing_version_is_not_waited_for(loaded: DictionaryState, script: ControlledLoad) -> None:
    """R19, R24: a requested version that the primary does not have is dropped, and the lag returns to 0."""
    loaded.request_version(10**15)
    assert loaded.lag == 10**15 - 1
    (await script.next()).succeed(2)
    await idle(loaded)
    assert (loaded.version, loaded.requested, loaded.lag, len(script.calls)) == (2, 2, 0, 2)


async def test_the_debounce_delays_all_loads_but_the_first(script: ControlledLoad) -> None:
    """R19: the debounce follows a load; an immediate request skips it once."""
    state = make_state(script, debounce=FOREVER)
    await load_first(state, script)
    for version in range(2, 100):
        state.request_version(version)
    assert await script.starts_nothing()
    state.load_now()
    (await script.next()).succeed(99)
    await idle(state)
    state.load_now()  # without effect, because nothing is to be loaded
    state.request_version(100)
    assert await script.starts_nothing()
    state.request_version(101, immediately=True)
    (await script.next()).succeed(101)
    await idle(state)
    state.request_version(102)
    await state.stop()  # a stop does not wait for the debounce
    assert (await script.starts_nothing(), len(script.calls)) == (True, 3)


async def test_many_changes_cause_few_loads(script: ControlledLoad) -> None:
    """R19: there is one load per debounce interval, and the last change is loaded."""
    debounce = 0.1
    state = make_state(script, debounce=debounce)
    loop = asyncio.get_running_loop()
    version, until = 0, loop.time() + 5 * debounce
    while loop.time() < until:
        version += 1
        state.request_version(version)
        await asyncio.sleep(0)
        while not script.started.empty():
            script.started.get_nowait().succeed(version)
    while state.version < version:
        (await script.next()).succeed(version)
        await idle(state)
    began = [call.began_at for call in script.calls]
    assert all(after - before > debounce * 0.9 for before, after in pairwise(began))
    assert 2 <= len(began) <= 7
    assert version > 100


@pytest.mark.parametrize("is_before", [False, True])
async def test_a_waiting_reader_skips_the_jitter(script: ControlledLoad, is_before: bool) -> None:
    """R19: the jitter is skipped for a reader that waits before the load or joins during it."""
    state = make_state(script, jitter=10**9)
    script.has_jitter = True
    await load_first(state, script)  # the first load has no jitter
    state.request_version(2, immediately=is_before)
    assert is_before or await script.starts_nothing()
    if not is_before:
        state.load_now()
    has_started = not await script.starts_nothing()
    await state.stop()
    assert has_started


async def test_a_failed_load_is_retried_with_back_off(script: ControlledLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    """R19, R23: the loaded version stays, the error is kept until a success, and a reader skips the back-off."""
    monkeypatch.setattr(states, "_FIRST_RETRY", timedelta(hours=1))
    monkeypatch.setattr(states, "_LAST_RETRY", timedelta(hours=2))
    state = make_state(script, debounce=FOREVER)
    await load_first(state, script)
    state.request_version(2, immediately=True)
    for number in range(5):
        (await script.next()).fail(Transient("DATABASE_DOWN", f"failure {number}"))
        assert await script.starts_nothing()
        assert state.error is not None
        assert (state.error.message, state.version) == (f"failure {number}", 1)
        state.load_now()
    (await script.next()).succeed(2)
    await idle(state)
    assert (state.version, state.error) == (2, None)


async def test_the_first_load_is_retried_until_it_succeeds(script: ControlledLoad) -> None:
    """R23: a dictionary settles when it is loaded or fails permanently; a failed full load is repeated in full."""
    state = make_state(script)
    settling = asyncio.create_task(state.wait_until_loaded())
    state.request_version(0)
    for error in (DOWN, DOWN, Corrupt("LOAD_SQL_NULL_KEY", "a key twice")):
        assert not settling.done()
        call = await script.next()
        assert call.full
        call.fail(error)
        await script.starts_nothing()
    assert (settling.done(), state.mark, state.version) == (True, None, -1)
    (await script.next()).succeed(0)
    await state.wait_for_version(0)


async def test_simultaneous_loads_are_limited(script: ControlledLoad) -> None:
    """R19: the limit applies to all dictionaries; a back-off does not take a slot."""
    pace = LoadLimits(0.0, 0.0, asyncio.Semaphore(3))
    many = [DictionaryState(DictionaryKey("acme", str(number)), pace, script) for number in range(40)]
    for state in many:
        state.request_version(1, immediately=True)
    failed: set[DictionaryState] = set()
    while not all(state.version == 1 for state in many):
        call = await script.next()
        assert script.running <= 3
        if call.state in failed or len(failed) >= 10:
            call.succeed(1)
        else:
            failed.add(call.state)
            call.fail()
        await asyncio.wait([call.end])
        await script.starts_nothing()
    assert (script.most_running, len(script.calls)) == (3, 50)


async def test_a_full_load_requested_during_a_load_follows_it(loaded: DictionaryState, script: ControlledLoad) -> None:
    """R24: the running load is a delta; one full load follows."""
    loaded.request_version(2)
    first = await script.next()
    loaded.request_version(0, full=True)
    loaded.request_version(0, full=True, immediately=True)
    first.succeed(2)
    second = await script.next()
    assert (first.full, second.full) == (False, True)
    second.succeed(1)
    await idle(loaded)
    assert (loaded.version, loaded.requested, len(script.calls)) == (1, 1, 3)


async def test_stop_cancels_a_running_load(script: ControlledLoad) -> None:
    """R19: the load is cancelled, its slot is released, and no other load starts."""
    pace = LoadLimits(0.0, 0.0, asyncio.Semaphore(1))
    first, second = (DictionaryState(DictionaryKey("acme", code), pace, script) for code in "AB")
    first.request_version(1)
    second.request_version(1)
    call = await script.next()
    async with asyncio.timeout(TIMEOUT):
        await first.stop()
    assert (call.end.cancelled(), first.mark) == (True, None)
    (await script.next()).succeed(1)
    await second.wait_for_version(1)
    await idle(second)
    await second.stop()
    assert script.running == 0
    second.request_version(2)
    (await script.next()).fail()
    await script.starts_nothing()
    await second.stop()  # during its back-off
    assert await script.starts_nothing()
