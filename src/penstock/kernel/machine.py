"""State machines: declared once, and used by the code, the SQL, the API and the diagrams."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from penstock.kernel.errors import Conflict, NotFound

S = TypeVar("S", bound=StrEnum)


@dataclass(frozen=True)
class Transition(Generic[S]):
    """A named step from any of *sources* to *target*."""

    name: str
    sources: tuple[S, ...]
    target: S


class StateMachine(Generic[S]):
    """States, the moves between them, and named groups of states."""

    def __init__(
        self,
        name: str,
        states: type[S],
        *,
        initial: S,
        moves: Iterable[Transition[S]],
        groups: Mapping[str, Iterable[S]] | None = None,
    ) -> None:
        self.name = name
        self.states = states
        self.initial = initial
        declared = list(moves)
        self.moves: Mapping[str, Transition[S]] = {move.name: move for move in declared}
        self.groups: Mapping[str, tuple[S, ...]] = {group: tuple(members) for group, members in (groups or {}).items()}
        self._validate(declared)

    @property
    def finals(self) -> tuple[S, ...]:
        """Return the states that no move leads out of."""
        left = {source for move in self.moves.values() for source in move.sources}
        return tuple(state for state in self.states if state not in left)

    def find_sources(self, target: S) -> tuple[S, ...]:
        """Return the states from which a move leads to *target*, in the order of declaration."""
        reached = {source for move in self.moves.values() if move.target == target for source in move.sources}
        return tuple(state for state in self.states if state in reached)

    def can(self, current: S, target: S) -> bool:
        return current in self.find_sources(target)

    def check(self, current: S, target: S) -> None:
        """Raise Conflict BAD_MOVE, which lists the possible states, unless a move leads from *current* to *target*."""
        if self.can(current, target):
            return
        possible = sorted({move.target.value for move in self.moves.values() if current in move.sources})
        raise Conflict(
            "BAD_MOVE",
            f"{self.name} is {current.value} and cannot become {target.value}",
            hint=f"from {current.value} it can become {', '.join(possible)}"
            if possible
            else f"{current.value} is final",
            current=current.value,
        )

    def move(self, name: str) -> Transition[S]:
        """Return the move *name*, or raise NotFound."""
        if name not in self.moves:
            raise NotFound("UNKNOWN_MOVE", f"{self.name} has no move {name!r}", hint=f"moves: {', '.join(self.moves)}")
        return self.moves[name]

    def format_sql(self, word: str) -> str:
        """Return the SQL literal for *word*: a state, `to_<STATE>` (its sources), a move (its sources) or a group.

        PostgreSQL uses a partial index only with literals, not with parameters.
        """
        if word in self.states.__members__:
            return _format_literal(self.states[word])
        if word.startswith("to_") and word[3:] in self.states.__members__:
            return _format_tuple(self.find_sources(self.states[word[3:]]))
        if word in self.moves:
            return _format_tuple(self.moves[word].sources)
        if word in self.groups:
            return _format_tuple(self.groups[word])
        raise LookupError(f"machine {self.name} has no state, move or group {word!r}")

    def format_sql_check(self, column: str) -> str:
        """Return the CHECK condition for a column with a state of this machine."""
        return f"{column} IN {_format_tuple(self.states)}"

    def _validate(self, moves: list[Transition[S]]) -> None:
        if len(moves) != len(self.moves):
            raise ValueError(f"machine {self.name}: two moves have one name")
        reachable, has_grown = {self.initial}, True
        while has_grown:
            targets = {move.target for move in moves if reachable & set(move.sources)}
            has_grown = not targets <= reachable
            reachable |= targets
        if unreachable := [state.name for state in self.states if state not in reachable]:
            raise ValueError(f"machine {self.name}: no move leads to {', '.join(unreachable)}")


def _format_literal(state: StrEnum) -> str:
    return "'" + state.value.replace("'", "''") + "'"


def _format_tuple(states: Iterable[StrEnum]) -> str:
    literals = [_format_literal(state) for state in states]
    if not literals:
        raise LookupError("an empty set of states: the SQL condition would never be true")
    return f"({', '.join(literals)})"
