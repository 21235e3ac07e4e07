"""HTTP load on a server, and its figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.servers import CLIENT_CORE


@dataclass(frozen=True)
class Load:
    """The rate and latency of a server under load, and the load of its processes and of the client; 1.0 is a core."""

    rate: float
    p50: float
    p99: float
    busy: float
    client_busy: float

    def __str__(self) -> str:
        text = f"{self.rate:,.0f}/s, p50 {self.p50:.2f} ms, p99 {self.p99:.2f} ms, server busy {self.busy:.0%}"
        return f"{text}, load {self.client_busy:.0%}"

    @property
    def per_processor_second(self) -> float:
        """Return the requests per second of processor time of the server, independent of other processes."""
        return self.rate / self.busy if self.busy else 0.0


@dataclass(frozen=True)
class Target:
    """Where to ask, with which headers; over *keys* of them at random, when the URL ends where a key begins."""

    url: str
    headers: Mapping[str, str]
    pids: Sequence[int]  # those who answer
    keys: int = 0


class LoadGenerator(Protocol):
    """A client that asks as fast as it can over kept connections."""

    async def press(self, target: Target, *, core: int | None = CLIENT_CORE) -> Load:
        """Put load on *target* from one core, or from any; SystemExit when a single answer is not a good one."""
