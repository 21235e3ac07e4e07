"""The journal stores every move, and a reader of its tail misses none."""

from datetime import UTC, datetime

import pytest

from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.states import journal
from penstock.kernel.states.journal import JournalEntry
from tests.services.postgres import fresh_database

AT = datetime(2026, 1, 1, tzinfo=UTC)


def entry(subject: str, source: str | None = None, target: str = "new", **more: object) -> JournalEntry:
    return JournalEntry("file", subject, source, target, "tester", AT, **more)  # type: ignore[arg-type]


async def test_history_has_actor_time_and_reason(db: Database) -> None:
    """T15: the history has every move of a subject in order, with its actor, time and reason."""
    moves = [entry("a"), entry("b"), entry("a", "new", "failed", reason="disk full", fence=3)]
    async with db.transaction() as tx:
        numbers = await journal.append(tx, moves)
        history = await journal.read_history(tx, numbers, ["a"])
    assert [stored.entry for stored in history] == [moves[0], moves[2]]


async def test_a_rolled_back_move_is_not_in_the_journal(db: Database) -> None:
    """T15: a move and its entry commit together or not at all."""
    with pytest.raises(LookupError):
        async with db.transaction() as tx:
            numbers = await journal.append(tx, [entry("a")])
            raise LookupError
    async with db.connection() as connection:
        assert await journal.read_history(connection, numbers, ["a"]) == []


async def test_the_tail_misses_nothing_that_commits_late(db: Database) -> None:
    """T17: a slow transaction with lower numbers comes before a quick one, and is never skipped."""
    async with db.connection() as reader:
        position = await journal.read_end_position(reader)
        async with db.transaction() as slow:
            await journal.append(slow, [entry("slow")])
            async with db.transaction() as quick:
                await journal.append(quick, [entry("quick")])
            entries, position = await journal.read_after(reader, position, limit=9)
        while len(entries) < 2:  # transactions of other databases delay it too: nothing may appear too early
            more, position = await journal.read_after(reader, position, limit=9)
            entries += more
    assert [stored.entry.subject for stored in entries] == ["slow", "quick"]


async def test_the_tail_is_in_numeric_order(db: Database) -> None:
    """T17: small pages across 99 to 100, where text and number sort differently, have every entry once."""
    async with db.connection() as connection:
        position = journal.BEGINNING
        for number in range(95, 106):
            await connection.execute(
                "INSERT INTO journal (tx, machine, subjects, sources, targets, actors, reasons, fences, at)"
                " VALUES ($1::text::xid8, 'm', ARRAY[$1], '{NULL}', '{new}', '{a}', '{NULL}', '{NULL}', $2)",
                str(number),  # below every real transaction of this server: all settled
                AT,
            )
        subjects: list[str] = []
        page, position = await journal.read_after(connection, position, limit=2)
        while page:
            subjects += [stored.entry.subject for stored in page]
            page, position = await journal.read_after(connection, position, limit=2)
    assert subjects == [str(number) for number in range(95, 106)]


@pytest.mark.parametrize(
    ("machines", "count", "subjects"),
    [
        ("a", 1, ["a6"]),
        (
            "a",
            3,
            ["a3", "b2", "b3", "b4", "a5", "b5", "a6"],
        ),  # three moves of a, and those of b since
        ("ab", 3, ["a5", "b5", "a6"]),
        ("b", 2, ["b4", "a5", "b5", "a6"]),
        ("ab", 1000, ["a1", "b1", "a2", "a3", "b2", "b3", "b4", "a5", "b5", "a6"]),
        ("c", 5, []),
        ("ab", 0, []),
    ],
)
async def test_a_tail_can_start_with_past_moves(db: Database, machines: str, count: int, subjects: list[str]) -> None:
    """T17: with a number of moves of some machines, in whole batches or parts of a batch."""
    batches = [["a1"], ["b1"], ["a2", "a3"], ["b2", "b3", "b4"], ["a5"], ["b5"], ["a6"]]
    async with db.connection() as connection:
        for number, batch in enumerate(batches, start=10):
            await connection.execute(
                "INSERT INTO journal (tx, machine, subjects, sources, targets, actors, reasons, fences, at)"
                " VALUES ($1::text::xid8, $2, $3, '{NULL}', '{new}', '{a}', '{NULL}', '{NULL}', $4)",
                str(number),  # below every real transaction of this server: all settled
                batch[0][0],
                batch,
                AT,
            )
        position = await journal.read_position_before_last(connection, list(machines), count)
        entries, _ = await journal.read_after(connection, position, limit=1000)
    assert [stored.entry.subject for stored in entries] == subjects


async def test_a_tail_can_start_with_past_moves_of_a_subject(db: Database) -> None:
    """T17: moves of other subjects do not count, not even those of the same entry."""
    batches = [["x/1"], ["x/1", "y/1"], ["y/2"], ["y/3", "x/10", "y/4"]]
    async with db.connection() as connection:
        for number, batch in enumerate(batches, start=10):
            await connection.execute(
                "INSERT INTO journal (tx, machine, subjects, sources, targets, actors, reasons, fences, at)"
                " VALUES ($1::text::xid8, 'm', $2, '{NULL}', '{new}', '{a}', '{NULL}', '{NULL}', $3)",
                str(number),
                batch,
                AT,
            )
        position = await journal.read_position_before_last(connection, ["m"], 2, "x/1")
        entries, _ = await journal.read_after(connection, position, limit=1000)
    assert [stored.entry.subject for stored in entries] == ["x/1", "y/1", "y/2", "y/3", "x/10", "y/4"]


async def test_entries_of_the_first_schema_are_migrated(postgres_url: str) -> None:
    """T15: a journal with one row per move is migrated completely and in order."""
    kernel = migrate.load("penstock.kernel")
    async with fresh_database(postgres_url, empty=True) as url, Database.open(url) as db:
        await migrate.migrate(db, kernel[:2])
        await db.execute(
            "INSERT INTO journal (machine, subject, source, target, actor, at, reason, fence)"
            " VALUES ('m', 'a', NULL, 'new', 'x', $1, NULL, NULL), ('m', 'a', 'new', 'failed', 'y', $1, 'full', 7)",
            AT,
        )
        await migrate.migrate(db, kernel)
        rows = await db.fetch("SELECT subject, source, target, actor, reason, fence FROM journal_move ORDER BY id, n")
    assert [tuple(row) for row in rows] == [
        ("a", None, "new", "x", None, None),
        ("a", "new", "failed", "y", "full", 7),
    ]


async def test_pruning_deletes_only_old_entries(db: Database) -> None:
    """Retention deletes entries before the given time, in batches of limited size."""
    async with db.transaction() as tx:
        await journal.append(tx, [entry(str(n)) for n in range(5)])
        assert await journal.prune(tx, AT) == 0
        assert await journal.prune(tx, AT.replace(year=2027), limit=3) == 3
        assert await journal.prune(tx, AT.replace(year=2027)) == 2
