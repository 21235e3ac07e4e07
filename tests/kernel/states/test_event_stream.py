"""Tails of journals for those who watch."""

import asyncio
from contextlib import aclosing
from datetime import UTC, datetime

import pytest

from penstock.kernel.db.database import Database
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.states import event_stream, journal
from penstock.kernel.states.event_stream import ChangeNotifications, JournalTail, LiveEvents
from penstock.kernel.states.journal import JournalEntry
from tests.support.wait import becomes

AT = datetime(2026, 1, 1, tzinfo=UTC)


async def moved(db: Database, *subjects: str, machine: str = "m") -> None:
    async with db.transaction() as tx:
        await journal.append(tx, [JournalEntry(machine, subject, None, "new", "tester", AT) for subject in subjects])


async def settled(db: Database) -> None:
    """What was noted until now is told: transactions of other databases hold it up too."""
    query = "SELECT max(tx) < pg_snapshot_xmin(pg_current_snapshot()) FROM journal"

    async def is_settled() -> bool:
        return bool(await db.fetchval(query))

    await becomes(is_settled, "no older transaction writes any more")


async def test_a_bell_wakes_who_watches(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """T17: at once, not when the next look is due."""
    monkeypatch.setattr(event_stream, "POLL", 3600.0)
    notifiers = [Notifier(db, "one"), Notifier(db, "two")]
    tails = LiveEvents([JournalTail(db, ["m"])], [ChangeNotifications(notifier, "moves") for notifier in notifiers])
    async with aclosing(tails.moves(await tails.start_positions(None))) as moves, asyncio.timeout(20):
        for notifier in notifiers:
            waiting = asyncio.ensure_future(anext(moves))
            while not (await asyncio.wait([waiting], timeout=0.01))[0] or not waiting.result()[1]:
                if waiting.done():  # it looked, and there was nothing yet
                    waiting = asyncio.ensure_future(anext(moves))
                    await moved(db, "a")
                notifier.notify("moves")
            assert waiting.result()[1][0].entry.subject == "a"


async def test_not_to_follow_is_to_end_with_what_was_there(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """T17: however much is moved meanwhile, by others or by the same machine."""
    monkeypatch.setattr(event_stream, "_TAIL", 2)
    for number in range(5):
        await moved(db, f"a{number}")
    await settled(db)
    tails = LiveEvents([JournalTail(db, ["m"])], [ChangeNotifications(Notifier(db, "one"), "moves")])
    told: list[str] = []
    async with asyncio.timeout(20):
        async for _, noted in tails.moves(await tails.start_positions(None, last=100), follow=False):
            told += [one.entry.subject for one in noted]
            await moved(db, "later", "later still")
    assert told[:5] == [f"a{number}" for number in range(5)]
    assert len(told) < 12


async def test_moves_of_others_are_passed_over_once(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """T17: who asks for one machine on a busy journal reads its moves alone, and does not begin anew each time."""
    monkeypatch.setattr(event_stream, "_TAIL", 2)
    await moved(db, "mine")
    for _ in range(3):
        await moved(db, *map(str, range(100)), machine="other")
    await moved(db, "mine too")
    await settled(db)
    tails = LiveEvents([JournalTail(db, ["m", "other"])], [])
    start = await tails.start_positions(None, last=2, of=["m"])
    batches = [noted async for _, noted in tails.moves(start, of=["m"], follow=False)]
    assert [one.entry.subject for noted in batches for one in noted] == ["mine", "mine too"]
    assert len(batches) <= 2
    async with db.connection() as connection:
        found, reached = await journal.read_after(connection, start[0], limit=100, machines=["nobody"])
        assert found == []
        assert reached > start[0]
