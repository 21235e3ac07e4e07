"""The recording of a drill: every read and write, the versions of the pods over time, and every incident."""

import time
from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """The outcome of a write."""

    ACKNOWLEDGED = "acknowledged"  # 200: committed
    ACCEPTED = "accepted"  # 202: durable, commit not seen
    UNKNOWN = "unknown"  # no response with a guarantee


@dataclass(slots=True)
class Read:
    """A read of one item; *first_error* is the error of the first pod, *error* the error after one retry."""

    due: float
    sent: float
    pod: int
    key: int
    min_version: int | None
    ended: float = 0.0
    status: int = 0
    version: int | None = None
    is_from_memory: bool = True
    sequence: int | None = None
    first_error: str = ""
    error: str = ""


@dataclass(slots=True)
class Write:
    """A write of one item, with the same id in every attempt."""

    sequence: int
    key: int
    event_id: str
    due: float
    sent: float
    ended: float = 0.0
    attempts: int = 0
    outcome: Outcome = Outcome.UNKNOWN
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Incident:
    """A deviation from the healthy state; *is_error* if a request failed."""

    at: float
    what: str
    kind: str
    is_error: bool = True


@dataclass(slots=True)
class InjectedFault:
    """A fault: the times of its start, of its end, and of the recovery of the system."""

    name: str
    what: str
    started_at: float
    ended_at: float | None = None
    recovered_at: float | None = None
    failure: str = ""
    is_judged: bool = False  # False while it lasts, and if the drill was stopped before its recovery

    @property
    def seconds(self) -> float | None:
        """Return the duration of its effect; 0.0 if nothing failed and no pod fell behind."""
        return None if self.recovered_at is None else self.recovered_at - self.started_at

    @property
    def end(self) -> float | None:
        """Return the time after its end and its recovery; None if it did not recover."""
        return None if self.recovered_at is None else max(self.recovered_at, self.ended_at or self.recovered_at)


@dataclass
class Recorder:
    """The events of one drill; times are seconds since its start."""

    pods: list[str]
    reads: list[Read] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    faults: list[InjectedFault] = field(default_factory=list)
    observations: list[list[tuple[float, int]]] = field(init=False)
    outages: list[list[tuple[float, float]]] = field(init=False)
    unsent: list[float] = field(default_factory=list)  # due times of requests that were not sent
    last_incident_at: float = 0.0
    _zero: float = field(default_factory=time.monotonic)
    _known_at: list[float] = field(default_factory=list)
    _known: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.observations = [[] for _ in self.pods]
        self.outages = [[] for _ in self.pods]

    @property
    def requests(self) -> list[Read | Write]:
        """Return all reads and writes."""
        return [*self.reads, *self.writes]

    def now(self) -> float:
        return time.monotonic() - self._zero

    def record_incident(self, what: str, kind: str, *, is_error: bool = True) -> None:
        self.last_incident_at = self.now()
        self.incidents.append(Incident(self.last_incident_at, what, kind, is_error))

    def record_version(self, pod: int, version: int) -> None:
        """Record that a pod answered from memory with *version*."""
        self.observations[pod].append((self.now(), version))

    def record_outage(self, pod: int, since: float) -> None:
        """Record that a pod did not answer a request of the time *since*."""
        self.outages[pod].append((since, self.now()))

    def record_acknowledged(self, version: int) -> None:
        """Record that the commit of *version* was acknowledged."""
        if version > self.acknowledged_version:
            self._known_at.append(self.now())
            self._known.append(version)

    def is_any_behind(self) -> bool:
        """Return whether any pod has not returned the last acknowledged version yet."""
        return any(
            not observations or observations[-1][1] < self.acknowledged_version for observations in self.observations
        )

    @property
    def acknowledged_version(self) -> int:
        """Return the highest acknowledged version."""
        return self._known[-1] if self._known else 0

    @property
    def last_acknowledged(self) -> float:
        return self._known_at[-1] if self._known_at else 0.0

    def acknowledged_before(self, moment: float) -> int:
        """Return the highest version that was acknowledged before *moment*."""
        index = bisect_right(self._known_at, moment)
        return self._known[index - 1] if index else 0
