"""What happened, moment by moment: every read, every write, what each pod was seen to hold, and every trouble."""

import time
from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """What a writer was told in the end."""

    ACKNOWLEDGED = "acknowledged"  # 200: committed
    ACCEPTED = "accepted"  # 202: durable, commit not seen
    UNKNOWN = "unknown"  # no answer that promises anything


@dataclass(slots=True)
class Read:
    """One item read; *first_error* is what the first pod asked did, *error* what is left after one retry."""

    due: float
    sent: float
    pod: int
    key: int
    least: int | None
    ended: float = 0.0
    status: int = 0
    version: int | None = None
    is_from_memory: bool = True
    sequence: int | None = None
    first_error: str = ""
    error: str = ""


@dataclass(slots=True)
class Write:
    """One item written, under one id however often it was sent."""

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
class Trouble:
    """Something that was not as on a good day; an error is what a request failed with."""

    at: float
    what: str
    kind: str
    is_error: bool = True


@dataclass(slots=True)
class Struck:
    """A fault: when it began, when it was over on its own side, and when everything was well again."""

    name: str
    what: str
    began: float
    over: float | None = None
    well: float | None = None
    failure: str = ""
    is_judged: bool = False  # not while it lasts, nor when the drill was stopped meanwhile

    @property
    def seconds(self) -> float | None:
        """How long it was felt; 0.0 when nothing failed and no pod fell behind."""
        return None if self.well is None else self.well - self.began

    @property
    def end(self) -> float | None:
        """When it was over and all was well; None when it never was."""
        return None if self.well is None else max(self.well, self.over or self.well)


@dataclass
class Recorder:
    """Everything one drill saw; times are seconds since it began."""

    pods: list[str]
    reads: list[Read] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    faults: list[Struck] = field(default_factory=list)
    sights: list[list[tuple[float, int]]] = field(init=False)
    away: list[list[tuple[float, float]]] = field(init=False)
    unsent: list[float] = field(default_factory=list)  # when they were due
    last_trouble: float = 0.0
    _zero: float = field(default_factory=time.monotonic)
    _known_at: list[float] = field(default_factory=list)
    _known: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sights = [[] for _ in self.pods]
        self.away = [[] for _ in self.pods]

    def now(self) -> float:
        return time.monotonic() - self._zero

    def trouble(self, what: str, kind: str, *, is_error: bool = True) -> None:
        self.last_trouble = self.now()
        self.troubles.append(Trouble(self.last_trouble, what, kind, is_error))

    def saw(self, pod: int, version: int) -> None:
        """A pod answered from memory with *version*."""
        self.sights[pod].append((self.now(), version))

    def is_away(self, pod: int, since: float) -> None:
        """A pod that was asked then has not answered."""
        self.away[pod].append((since, self.now()))

    def acknowledged(self, version: int) -> None:
        """Somebody was told that *version* is committed."""
        if version > self.known:
            self._known_at.append(self.now())
            self._known.append(version)

    def is_any_behind(self) -> bool:
        """Whether some pod was not yet seen with the last acknowledged version."""
        return any(not sights or sights[-1][1] < self.known for sights in self.sights)

    @property
    def known(self) -> int:
        """The highest version whose commit was acknowledged."""
        return self._known[-1] if self._known else 0

    @property
    def last_acknowledged(self) -> float:
        return self._known_at[-1] if self._known_at else 0.0

    def known_before(self, moment: float) -> int:
        """The highest version whose commit was acknowledged by then."""
        place = bisect_right(self._known_at, moment)
        return self._known[place - 1] if place else 0
