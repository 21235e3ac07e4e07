"""Machines: one declaration that code, SQL and diagrams agree on."""

from enum import StrEnum

import asyncpg
import pytest

from penstock.kernel.db.database import Database
from penstock.kernel.errors import Conflict, NotFound
from penstock.kernel.machine import StateMachine, Transition


class Door(StrEnum):
    OPEN = "open"
    SHUT = "shut"
    ODD = "it's\\odd"
    GONE = "gone"


MOVES = [
    Transition("close", (Door.OPEN, Door.ODD), Door.SHUT),
    Transition("twist", (Door.OPEN,), Door.ODD),
    Transition("break", (Door.SHUT, Door.OPEN), Door.GONE),
]
DOOR = StateMachine("door", Door, initial=Door.OPEN, moves=iter(MOVES), groups={"whole": iter((Door.OPEN, Door.SHUT))})
ALLOWED = {(source, move.target) for move in MOVES for source in move.sources}


@pytest.mark.parametrize("current", Door)
@pytest.mark.parametrize("target", Door)
def test_only_declared_moves_are_possible(current: Door, target: Door) -> None:
    """T8: `can` and `check` allow exactly what was declared, and nothing else."""
    assert DOOR.can(current, target) is ((current, target) in ALLOWED)
    if (current, target) in ALLOWED:
        DOOR.check(current, target)
    else:
        with pytest.raises(Conflict):
            DOOR.check(current, target)


@pytest.mark.parametrize(
    ("current", "hint"), [(Door.SHUT, "from shut it can become gone"), (Door.GONE, "gone is final")]
)
def test_a_refused_move_tells_the_state_and_the_way_out(current: Door, hint: str) -> None:
    """T8: a refusal carries the current state and what is possible from it."""
    with pytest.raises(Conflict) as refused:
        DOOR.check(current, Door.OPEN)
    assert refused.value.as_dict() == {
        "code": "BAD_MOVE",
        "detail": f"door is {current}, it cannot become open",
        "hint": hint,
        "current": current.value,
    }


def test_moves_are_found_by_name() -> None:
    """T9: a move is known by its name; an unknown one is NotFound and the known ones are named."""
    assert DOOR.move("twist") == MOVES[1]
    with pytest.raises(NotFound) as unknown:
        DOOR.move("slam")
    assert (unknown.value.code, unknown.value.hint) == ("UNKNOWN_MOVE", "moves: close, twist, break")


def test_sources_and_finals_follow_from_the_moves() -> None:
    """What leads to a state, and what nothing leads out of, come in the order the states are declared."""
    assert DOOR.sources(Door.GONE) == (Door.OPEN, Door.SHUT)
    assert DOOR.sources(Door.OPEN) == ()
    assert DOOR.finals == (Door.GONE,)


@pytest.mark.parametrize(
    ("word", "literal"),
    [
        ("SHUT", "'shut'"),
        ("ODD", "'it''s\\odd'"),
        ("to_SHUT", "('open', 'it''s\\odd')"),
        ("to_GONE", "('open', 'shut')"),
        ("break", "('shut', 'open')"),
        ("whole", "('open', 'shut')"),
    ],
)
def test_words_become_sql_literals(word: str, literal: str) -> None:
    """A state, its sources, a move or a group is a quoted literal in SQL."""
    assert DOOR.sql(word) == literal


@pytest.mark.parametrize("word", ["shut", "to_NOWHERE", "to_", "slam", "", "to_OPEN"])
def test_a_word_nobody_declared_is_a_mistake(word: str) -> None:
    """A misspelt word, or a set of states that is empty, fails when the SQL is loaded, not when it runs."""
    with pytest.raises(LookupError):
        DOOR.sql(word)


async def test_postgresql_holds_the_column_to_the_states(db: Database) -> None:
    """The CHECK a machine gives takes every state it has, however odd its text, and nothing else."""
    await db.execute(f"CREATE TABLE door (state text CHECK ({DOOR.sql_check('state')}))")
    await db.execute("INSERT INTO door SELECT unnest($1::text[])", list(Door))
    assert await db.fetchval(f"SELECT count(*) FROM door WHERE state IN {DOOR.sql('to_SHUT')}") == 2
    assert await db.fetchval(f"SELECT state FROM door WHERE state = {DOOR.sql('ODD')}") == Door.ODD
    with pytest.raises(asyncpg.CheckViolationError):
        await db.execute("INSERT INTO door VALUES ('ajar')")


@pytest.mark.parametrize(
    ("moves", "why"),
    [
        ([*MOVES, Transition("close", (Door.GONE,), Door.SHUT)], "two moves have one name"),
        (MOVES[:2], "no move leads to GONE"),
        ([Transition("stay", (Door.GONE,), Door.GONE), *MOVES[:1]], "no move leads to ODD, GONE"),
        ([], "no move leads to SHUT, ODD, GONE"),
    ],
)
def test_nonsense_is_refused_when_it_is_declared(moves: list[Transition[Door]], why: str) -> None:
    """Two moves of one name, or a state nothing leads to, fail at import."""
    with pytest.raises(ValueError, match=why):
        StateMachine("door", Door, initial=Door.OPEN, moves=moves)
