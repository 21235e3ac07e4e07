"""State machines: one declaration for code, SQL and diagrams."""

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
    """T8: `can` and `check` allow exactly the declared moves."""
    assert DOOR.can(current, target) is ((current, target) in ALLOWED)
    if (current, target) in ALLOWED:
        DOOR.check(current, target)
    else:
        with pytest.raises(Conflict):
            DOOR.check(current, target)


@pytest.mark.parametrize(
    ("current", "hint"), [(Door.SHUT, "from shut it can become gone"), (Door.GONE, "gone is final")]
)
def test_a_refused_move_names_the_state_and_the_possible_moves(current: Door, hint: str) -> None:
    """T8: the error contains the current state and the states that are possible from it."""
    with pytest.raises(Conflict) as refused:
        DOOR.check(current, Door.OPEN)
    assert refused.value.as_dict() == {
        "code": "BAD_MOVE",
        "detail": f"door is {current} and cannot become open",
        "hint": hint,
        "current": current.value,
    }


def test_moves_are_found_by_name() -> None:
    """T9: an unknown name is NotFound, and the hint lists the existing moves."""
    assert DOOR.move("twist") == MOVES[1]
    with pytest.raises(NotFound) as unknown:
        DOOR.move("slam")
    assert (unknown.value.code, unknown.value.hint) == ("UNKNOWN_MOVE", "moves: close, twist, break")


def test_sources_and_finals_follow_from_the_moves() -> None:
    """Sources and final states are in the order of the declaration."""
    assert DOOR.find_sources(Door.GONE) == (Door.OPEN, Door.SHUT)
    assert DOOR.find_sources(Door.OPEN) == ()
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
    assert DOOR.format_sql(word) == literal


@pytest.mark.parametrize("word", ["shut", "to_NOWHERE", "to_", "slam", "", "to_OPEN"])
def test_an_undeclared_word_is_an_error(word: str) -> None:
    """An unknown word or an empty set of states fails when the SQL is loaded, not when it runs."""
    with pytest.raises(LookupError):
        DOOR.format_sql(word)


async def test_the_check_constraint_allows_only_the_states(db: Database) -> None:
    """The CHECK condition of a machine allows each of its states, also with quotes in it, and nothing else."""
    await db.execute(f"CREATE TABLE door (state text CHECK ({DOOR.format_sql_check('state')}))")
    await db.execute("INSERT INTO door SELECT unnest($1::text[])", list(Door))
    assert await db.fetchval(f"SELECT count(*) FROM door WHERE state IN {DOOR.format_sql('to_SHUT')}") == 2
    assert await db.fetchval(f"SELECT state FROM door WHERE state = {DOOR.format_sql('ODD')}") == Door.ODD
    with pytest.raises(asyncpg.CheckViolationError):
        await db.execute("INSERT INTO door VALUES ('ajar')")


@pytest.mark.parametrize(
    ("moves", "reason"),
    [
        ([*MOVES, Transition("close", (Door.GONE,), Door.SHUT)], "two moves have one name"),
        (MOVES[:2], "no move leads to GONE"),
        ([Transition("stay", (Door.GONE,), Door.GONE), *MOVES[:1]], "no move leads to ODD, GONE"),
        ([], "no move leads to SHUT, ODD, GONE"),
    ],
)
def test_an_invalid_declaration_is_refused(moves: list[Transition[Door]], reason: str) -> None:
    """Two moves with one name, or an unreachable state, fail at import."""
    with pytest.raises(ValueError, match=reason):
        StateMachine("door", Door, initial=Door.OPEN, moves=moves)
