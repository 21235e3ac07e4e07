"""The signals port: short messages that reach every listener at once, or a marker that some were missed.

Every listener that is open when a signal is announced receives the signal, or a `Resync` after the announcement. A
signal may arrive twice. Signals of one announcer arrive in order.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from penstock.kernel.errors import Invalid
from penstock.kernel.text import is_storable

BODY_LIMIT = 7_900  # the limit of a payload of PostgreSQL's NOTIFY, less its overhead


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal with the text of its announcer."""

    body: str


@dataclass(frozen=True, slots=True)
class Resync:
    """A marker that signals may have been missed: read the source of truth. Every listener receives it first."""

    reason: str


class Signals(Protocol):
    """A channel, from any announcer to all listeners."""

    async def announce(self, bodies: Sequence[str]) -> None:
        """Send signals to all listeners; after the return they are delivered, or replaced by a Resync."""

    def listen(self, listener: str) -> AbstractAsyncContextManager[AsyncIterator[Signal | Resync]]:
        """Receive all signals from now on. *listener* is the name of a process, unique among the running ones."""

    async def measure_lag(self) -> int:
        """Return the number of signals that the slowest listener has not received yet."""

    async def check(self) -> None:
        """Raise Transient SIGNALS_DOWN with a hint unless the channel can be used."""

    async def close(self) -> None: ...


def validate_body(body: str) -> str:
    """Return *body* if every implementation can carry it; else raise Invalid SIGNAL_TOO_LARGE."""
    size = len(body.encode(errors="replace"))
    if not 0 < size <= BODY_LIMIT or not is_storable(body):
        raise Invalid(
            "SIGNAL_TOO_LARGE",
            f"the signal has {size} bytes; it must have 1 to {BODY_LIMIT} bytes of text without NUL",
            hint="send the name of the changed object, not its content",
        )
    return body
