"""R19: when a dictionary is loaded: one load at a time, never too often, never too late."""

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
PATIENCE = 30.0
DOWN = Transient("DATABASE_DOWN", "down")
TURNS = 50  # of the loop: enough for whatever is about to happen without waiting


class Call:
    """One load under way, ended as the test says."""

    def __init__(self, state: DictionaryState, *, full: bool) -> None:
        self.state = state
        self.full = full
        self.began_at = asyncio.get_running_loop().time()
        self.end: asyncio.Future[VersionStamp] = asyncio.get_running_loop().create_future()

    def held(self, version: int) -> None:
        self.end.set_result(VersionStamp(version, version))

    def fail(self, error: PenstockError = DOWN) -> None:
        self.end.set_exception(error)


class Script:
    """A load function that waits for its test."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.begun: asyncio.Queue[Call] = asyncio.Queue()
        self.running = 0
        self.most_running = 0
        self.parts = False  # whether a load lets the pods part first, as a full one does

    async def __call__(self, state: DictionaryState, *, full: bool) -> VersionStamp:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.parts:
                await state.wait_jitter()
            call = Call(state, full=full)
            self.calls.append(call)
            self.begun.put_nowait(call)
            return await call.end
        finally:
            self.running -= 1

    async def next(self) -> Call:
        async with asyncio.timeout(PATIENCE):
            return await self.begun.get()

    async def nothing_begins(self) -> bool:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return self.begun.empty()


@pytest.fixture
def script() -> Script:
    return Script()


def made(script: Script, *, debounce: float = 0.0, jitter: float = 0.0) -> DictionaryState:
    return DictionaryState(DictionaryKey("acme", "LOOSE"), LoadLimits(debounce, jitter, asyncio.Semaphore(1)), script)


@pytest.fixture
async def held(script: Script) -> AsyncIterator[DictionaryState]:
    """Loaded at version 1, with nothing to wait for between loads."""
    state = made(script)
    await load_first(state, script)
    yield state
    await state.stop()


async def load_first(state: DictionaryState, script: Script) -> None:
    state.request_version(1)
    call = await script.next()
    assert call.full
    call.held(1)
    await idle(state)


async def idle(state: DictionaryState) -> None:
    """Return when nothing is wanted that is not held."""
    async with asyncio.timeout(PATIENCE):
        while state._task is not None:
            await asyncio.wait([state._task])


async def test_one_load_at_a_time(held: DictionaryState, script: Script) -> None:
    """R19: whatever is wanted meanwhile is one more load, not many."""
    held.request_version(2)
    first = await script.next()
    for version in range(3, 50):
        held.request_version(version, immediately=version % 2 == 0)
    assert await script.nothing_begins()
    first.held(2)
    second = await script.next()
    second.held(49)
    await idle(held)
    held.request_version(49, immediately=True)  # it is held
    assert await script.nothing_begins()
    assert (script.most_running, len(script.calls), held.version, held.lag) == (1, 3, 49, 0)


async def test_a_load_begun_before_a_version_is_not_taken_for_it(held: DictionaryState, script: Script) -> None:
    """R19: whoever waits for a version sees no load that began before it, even if nobody else wants another."""
    held.request_version(2)
    early = await script.next()
    held.request_version(3, immediately=True)
    waiting = asyncio.create_task(held.wait_for_version(3))
    early.held(2)
    late = await script.next()
    assert (waiting.done(), held.version) == (False, 2)
    late.held(3)
    async with asyncio.timeout(PATIENCE):
        await waiting


async def test_a_version_wanted_again_during_a_load_is_not_lost(held: DictionaryState, script: Script) -> None:
    """R19: a load begun before a version was committed does not settle the wish for it, though its number is known."""
    held.request_version(3)  # somebody told of it too early
    early = await script.next()
    held.request_version(3, immediately=True)  # now it is committed
    early.held(2)
    assert not await script.nothing_begins()
    (await script.next()).held(3)
    await held.wait_for_version(3)


async def test_a_version_the_primary_does_not_have_is_not_waited_for_for_ever(
    held: DictionaryState, script: Script
) -> None:
    """R19, R24: the primary has the last word, and the lag says so."""
    held.request_version(10**15)
    assert held.lag == 10**15 - 1
    (await script.next()).held(2)
    await idle(held)
    assert (held.version, held.requested, held.lag, len(script.calls)) == (2, 2, 0, 2)


async def test_the_first_load_is_at_once_and_the_next_waits(script: Script) -> None:
    """R19: the debounce comes after a load; a hurry cancels it, once."""
    state = made(script, debounce=FOREVER)
    await load_first(state, script)
    for version in range(2, 100):
        state.request_version(version)
    assert await script.nothing_begins()
    state.load_now()
    (await script.next()).held(99)
    await idle(state)
    state.load_now()  # there is nothing to hurry with: it is forgotten
    state.request_version(100)
    assert await script.nothing_begins()
    state.request_version(101, immediately=True)
    (await script.next()).held(101)
    await idle(state)
    state.request_version(102)
    await state.stop()  # an end does not wait for the debounce
    assert (await script.nothing_begins(), len(script.calls)) == (True, 3)


async def test_many_changes_are_few_loads(script: Script) -> None:
    """R19: one per window, however many there are, and the last of them is among them."""
    debounce = 0.1
    state = made(script, debounce=debounce)
    loop = asyncio.get_running_loop()
    version, until = 0, loop.time() + 5 * debounce
    while loop.time() < until:
        version += 1
        state.request_version(version)
        await asyncio.sleep(0)
        while not script.begun.empty():
            script.begun.get_nowait().held(version)
    while state.version < version:
        (await script.next()).held(version)
        await idle(state)
    began = [call.began_at for call in script.calls]
    assert all(after - before > debounce * 0.9 for before, after in pairwise(began))
    assert 2 <= len(began) <= 7
    assert version > 100


@pytest.mark.parametrize("is_before", [False, True])
async def test_a_hurry_cancels_the_jitter(script: Script, is_before: bool) -> None:
    """R19: whoever waits does not wait for the pods to part, whether it came before the load began or since."""
    state = made(script, jitter=10**9)
    script.parts = True
    await load_first(state, script)  # nothing is held: it does not part
    state.request_version(2, immediately=is_before)
    assert is_before or await script.nothing_begins()
    if not is_before:
        state.load_now()
    has_begun = not await script.nothing_begins()
    await state.stop()
    assert has_begun


async def test_a_failed_load_is_tried_again_after_a_while(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """R19, R23: what is held stays, the error is kept until it works again; a hurry cancels the back-off."""
    monkeypatch.setattr(states, "_FIRST_RETRY", timedelta(hours=1))
    monkeypatch.setattr(states, "_LAST_RETRY", timedelta(hours=2))
    state = made(script, debounce=FOREVER)
    await load_first(state, script)
    state.request_version(2, immediately=True)
    for number in range(5):
        (await script.next()).fail(Transient("DATABASE_DOWN", f"failure {number}"))
        assert await script.nothing_begins()
        assert state.error is not None
        assert (state.error.message, state.version) == (f"failure {number}", 1)
        state.load_now()
    (await script.next()).held(2)
    await idle(state)
    assert (state.version, state.error) == (2, None)


async def test_what_never_was_loaded_is_tried_until_it_is(script: Script) -> None:
    """R23: not ready until it is held or only a person can mend it; a load anew that failed is anew again."""
    state = made(script)
    settling = asyncio.create_task(state.wait_until_loaded())
    state.request_version(0)
    for error in (DOWN, DOWN, Corrupt("LOAD_SQL_NULL_KEY", "a key twice")):
        assert not settling.done()
        call = await script.next()
        assert call.full
        call.fail(error)
        await script.nothing_begins()
    assert (settling.done(), state.mark, state.version) == (True, None, -1)
    (await script.next()).held(0)
    await state.wait_for_version(0)


async def test_no_more_loads_at_once_than_there_are_slots(script: Script) -> None:
    """R19: over all dictionaries; those that wait after a failure take no slot."""
    pace = LoadLimits(0.0, 0.0, asyncio.Semaphore(3))
    many = [DictionaryState(DictionaryKey("acme", str(number)), pace, script) for number in range(40)]
    for state in many:
        state.request_version(1, immediately=True)
    failed: set[DictionaryState] = set()
    while not all(state.version == 1 for state in many):
        call = await script.next()
        assert script.running <= 3
        if call.state in failed or len(failed) >= 10:
            call.held(1)
        else:
            failed.add(call.state)
            call.fail()
        await asyncio.wait([call.end])
        await script.nothing_begins()
    assert (script.most_running, len(script.calls)) == (3, 50)


async def test_anew_during_a_load_is_one_more_load(held: DictionaryState, script: Script) -> None:
    """R24: what is under way builds on what cannot be built upon; the next does not."""
    held.request_version(2)
    first = await script.next()
    held.request_version(0, full=True)
    held.request_version(0, full=True, immediately=True)
    first.held(2)
    second = await script.next()
    assert (first.full, second.full) == (False, True)
    second.held(1)
    await idle(held)
    assert (held.version, held.requested, len(script.calls)) == (1, 1, 3)


async def test_the_end_of_a_load_under_way(script: Script) -> None:
    """R19: it is cancelled, gives its slot back, and nothing begins again."""
    pace = LoadLimits(0.0, 0.0, asyncio.Semaphore(1))
    first, second = (DictionaryState(DictionaryKey("acme", code), pace, script) for code in "AB")
    first.request_version(1)
    second.request_version(1)
    call = await script.next()
    async with asyncio.timeout(PATIENCE):
        await first.stop()
    assert (call.end.cancelled(), first.mark) == (True, None)
    (await script.next()).held(1)
    await second.wait_for_version(1)
    await idle(second)
    await second.stop()
    assert script.running == 0
    second.request_version(2)
    (await script.next()).fail()
    await script.nothing_begins()
    await second.stop()  # in its back-off
    assert await script.nothing_begins()
