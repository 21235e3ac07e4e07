"""Event streams follow the tails of journals."""

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


async def append_moves(db: Database, *subjects: str, machine: str = "m") -> None:
    async with db.transaction() as tx:
        await journal.append(tx, [JournalEntry(machine, subject, None, "new", "tester", AT) for subject in subjects])


async def wait_until_visible(db: Database) -> None:
    """Wait until all moves are visible: transactions of other databases delay them too."""
    query = "SELECT max(tx) < pg_snapshot_xmin(pg_current_snapshot()) FROM journal"

    async def is_settled() -> bool:
        return bool(await db.fetchval(query))

    await becomes(is_settled, "no older transaction writes any more")


async def test_a_notification_wakes_a_stream(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """T17: a move is sent at once, not when the next poll is due."""
    monkeypatch.setattr(event_stream, "POLL_INTERVAL", 3600.0)
    notifiers = [Notifier(db, "one"), Notifier(db, "two")]
    tails = LiveEvents([JournalTail(db, ["m"])], [ChangeNotifications(notifier, "moves") for notifier in notifiers])
    async with aclosing(tails.iterate_moves(await tails.find_start_positions(None))) as moves, asyncio.timeout(20):
        for notifier in notifiers:
            waiting = asyncio.ensure_future(anext(moves))
            while not (await asyncio.wait([waiting], timeout=0.01))[0] or not waiting.result()[1]:
                if waiting.done():  # it polled before the move
                    waiting = asyncio.ensure_future(anext(moves))
                    await append_moves(db, "a")
                notifier.notify("moves")
            assert waiting.result()[1][0].entry.subject == "a"


async def test_a_stream_that_does_not_follow_ends(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """T17: it ends with the moves made before it started, however many are made meanwhile."""
    monkeypatch.setattr(event_stream, "_PAGE_SIZE", 2)
    for number in range(5):
        await append_moves(db, f"a{number}")
    await wait_until_visible(db)
    tails = LiveEvents([JournalTail(db, ["m"])], [ChangeNotifications(Notifier(db, "one"), "moves")])
    subjects: list[str] = []
    async with asyncio.timeout(20):
        async for _, entries in tails.iterate_moves(await tails.find_start_positions(None, last=100), follow=False):
            subjects += [stored.entry.subject for stored in entries]
            await append_moves(db, "later", "later still")
    assert subjects[:5] == [f"a{number}" for number in range(5)]
    assert len(subjects) < 12


async def test_moves_of_other_machines_are_skipped_once(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """T17: a stream of one machine on a busy journal reads only its moves, and never reads the others twice."""
    monkeypatch.setattr(event_stream, "_PAGE_SIZE", 2)
    await append_moves(db, "first")
    for _ in range(3):
        await append_moves(db, *map(str, range(100)), machine="other")
    await append_moves(db, "second")
    await wait_until_visible(db)
    tails = LiveEvents([JournalTail(db, ["m", "other"])], [])
    start = await tails.find_start_positions(None, last=2, of=["m"])
    batches = [entries async for _, entries in tails.iterate_moves(start, of=["m"], follow=False)]
    assert [stored.entry.subject for entries in batches for stored in entries] == ["first", "second"]
    assert len(batches) <= 2
    async with db.connection() as connection:
        entries, position = await journal.read_after(connection, start[0], limit=100, machines=["none"])
        assert entries == []
        assert position > start[0]
