"""The signals port: short hints that reach every listener at once, or a word that some were missed.

For every signal announced and every listener open at that time: the listener receives the signal, or it receives
`Resync` after the signal was announced. A signal may arrive twice; signals of one announcer arrive in order.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from penstock.kernel.errors import Invalid
from penstock.kernel.text import is_storable

BODY_LIMIT = 7_900  # what PostgreSQL's NOTIFY carries, less its own needs


@dataclass(frozen=True, slots=True)
class Signal:
    """One hint, as its announcer wrote it."""

    body: str


@dataclass(frozen=True, slots=True)
class Resync:
    """Signals may have been missed: look at the source of truth once. The first thing every listener receives."""

    reason: str


class Signals(Protocol):
    """One channel: who announces on it reaches everyone who listens to it."""

    async def announce(self, bodies: Sequence[str]) -> None:
        """Tell all listeners; when this returns, the signals are on their way or will be caught up with."""

    def listen(self, listener: str) -> AbstractAsyncContextManager[AsyncIterator[Signal | Resync]]:
        """Hear everything from now on. *listener* is the name of one process, unique among those alive."""

    async def lag(self) -> int:
        """How many signals the slowest listener has yet to be handed."""

    async def check(self) -> None:
        """Raise Transient SIGNALS_DOWN with a hint unless the channel can be used."""

    async def close(self) -> None: ...


def checked_body(body: str) -> str:
    """*body* itself when every implementation can carry it; else Invalid SIGNAL_TOO_LARGE."""
    size = len(body.encode(errors="replace"))
    if not 0 < size <= BODY_LIMIT or not is_storable(body):
        raise Invalid(
            "SIGNAL_TOO_LARGE",
            f"a signal carries 1 to {BODY_LIMIT} bytes of text without NUL, this one has {size}",
            hint="send the name of what changed, not its content",
        )
    return body
