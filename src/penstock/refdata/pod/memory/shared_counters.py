"""What the processes of a pod tell each other by looking: a few numbers in shared memory."""

import mmap
from enum import IntEnum
from pathlib import Path
from time import monotonic

from penstock.refdata.pod.memory.layout import STATE_FILE

_CELL = 8
_COMMON = 16
_MOST_PROCESSES = 256
_WIDTH = 16


class _CounterCell(IntEnum):
    SEQUENCE = 0
    LOOKED_AT = 1
    IS_CUT_OFF = 2
    IS_LOADED = 3
    IS_DRAINING = 4
    LOG_LEVEL = 5


class PodCounter(IntEnum):
    """What a serving process counts."""

    OK = 0
    NOT_MODIFIED = 1
    CLIENT_ERROR = 2
    NOT_FOUND = 3
    CONFLICT = 4
    SERVER_ERROR = 5
    BARRIER_WAITS = 6
    CONNECTIONS = 7  # open now
    BEATS = 8  # signs of life


class PodCounters:
    """The numbers of one pod. The loader writes the common ones, each serving process its own."""

    def __init__(self, folder: Path, *, makes: bool = False) -> None:
        size = _CELL * (_COMMON + _MOST_PROCESSES * _WIDTH)
        path = folder / STATE_FILE
        if makes:
            path.touch(mode=0o600)
            with path.open("r+b") as file:
                file.truncate(size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self.cells = memoryview(self._map).cast("Q")

    @property
    def sequence(self) -> int:
        """Grows with everything that is written."""
        return self.cells[_CounterCell.SEQUENCE]

    def touch(self) -> None:
        self.cells[_CounterCell.SEQUENCE] += 1

    @property
    def is_loaded(self) -> bool:
        """Whether every dictionary was loaded at least once."""
        return bool(self.cells[_CounterCell.IS_LOADED])

    def loaded(self) -> None:
        self.cells[_CounterCell.IS_LOADED] = 1

    @property
    def is_draining(self) -> bool:
        """Whether the pod is about to stop."""
        return bool(self.cells[_CounterCell.IS_DRAINING])

    def drain(self) -> None:
        self.cells[_CounterCell.IS_DRAINING] = 1

    @property
    def log_level(self) -> int:
        """How important a log line has to be, as a number of Python's; 0 before anybody said."""
        return self.cells[_CounterCell.LOG_LEVEL]

    @log_level.setter
    def log_level(self, level: int) -> None:
        self.cells[_CounterCell.LOG_LEVEL] = level

    def looked(self) -> None:
        """The primary's versions were seen just now."""
        self.cells[_CounterCell.LOOKED_AT] = int(monotonic() * 1000)
        self.cells[_CounterCell.IS_CUT_OFF] = 0

    def cut_off(self) -> None:
        """The primary cannot be seen."""
        self.cells[_CounterCell.IS_CUT_OFF] = 1

    def unseen_for(self, patience: float) -> float:
        """How long nobody has seen the primary, in seconds; 0 while it is seen, if not later than *patience* ago."""
        looked_at = self.cells[_CounterCell.LOOKED_AT] / 1000
        age = max(monotonic() - looked_at, 0.0)
        return age if looked_at and (self.cells[_CounterCell.IS_CUT_OFF] or age > patience) else 0.0

    def counters(self, process: int) -> memoryview:
        """The counts of one serving process; they outlive it, so that they only grow."""
        start = _COMMON + process * _WIDTH
        return self.cells[start : start + _WIDTH]

    def close(self) -> None:
        self.cells.release()
        self._map.close()
