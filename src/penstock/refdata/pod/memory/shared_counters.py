"""Numbers in shared memory through which the processes of a pod exchange their state and their counts."""

import mmap
from enum import IntEnum
from pathlib import Path
from time import monotonic

from penstock.refdata.pod.memory.layout import STATE_FILE

_CELL = 8
_COMMON = 16
_PROCESS_LIMIT = 256
_WIDTH = 16


class _CounterCell(IntEnum):
    SEQUENCE = 0
    PRIMARY_SEEN_AT = 1
    IS_PRIMARY_LOST = 2
    IS_LOADED = 3
    IS_DRAINING = 4
    LOG_LEVEL = 5


class PodCounter(IntEnum):
    """The counters of a serving process."""

    OK = 0
    NOT_MODIFIED = 1
    CLIENT_ERROR = 2
    NOT_FOUND = 3
    CONFLICT = 4
    SERVER_ERROR = 5
    BARRIER_WAITS = 6
    CONNECTIONS = 7  # open now
    HEARTBEATS = 8


class PodCounters:
    """The shared numbers of one pod. The loader writes the common ones, each serving process its own."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        size = _CELL * (_COMMON + _PROCESS_LIMIT * _WIDTH)
        path = folder / STATE_FILE
        if create:
            path.touch(mode=0o600)
            with path.open("r+b") as file:
                file.truncate(size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self.cells = memoryview(self._map).cast("Q")

    @property
    def sequence(self) -> int:
        """Return a number that grows with every change of the memory."""
        return self.cells[_CounterCell.SEQUENCE]

    def touch(self) -> None:
        """Tell the readers that the memory has changed."""
        self.cells[_CounterCell.SEQUENCE] += 1

    @property
    def is_loaded(self) -> bool:
        """Return whether every dictionary was loaded at least once."""
        return bool(self.cells[_CounterCell.IS_LOADED])

    def set_loaded(self) -> None:
        self.cells[_CounterCell.IS_LOADED] = 1

    @property
    def is_draining(self) -> bool:
        """Return whether the pod is stopping."""
        return bool(self.cells[_CounterCell.IS_DRAINING])

    def set_draining(self) -> None:
        self.cells[_CounterCell.IS_DRAINING] = 1

    @property
    def log_level(self) -> int:
        """Return the log level as a number of Python's logging; 0 before it is set."""
        return self.cells[_CounterCell.LOG_LEVEL]

    @log_level.setter
    def log_level(self, level: int) -> None:
        self.cells[_CounterCell.LOG_LEVEL] = level

    def set_primary_seen(self) -> None:
        """Record that the versions of the primary were read now."""
        self.cells[_CounterCell.PRIMARY_SEEN_AT] = int(monotonic() * 1000)
        self.cells[_CounterCell.IS_PRIMARY_LOST] = 0

    def set_primary_lost(self) -> None:
        """Record that the primary cannot be reached."""
        self.cells[_CounterCell.IS_PRIMARY_LOST] = 1

    def measure_primary_unseen(self, stale_after: float) -> float:
        """Return the seconds since the primary was reached; 0 if it is reachable and at most *stale_after* ago."""
        seen_at = self.cells[_CounterCell.PRIMARY_SEEN_AT] / 1000
        age = max(monotonic() - seen_at, 0.0)
        return age if seen_at and (self.cells[_CounterCell.IS_PRIMARY_LOST] or age > stale_after) else 0.0

    def get_process_counters(self, process: int) -> memoryview:
        """Return the counters of a serving process; they outlive it, so that they only grow."""
        start = _COMMON + process * _WIDTH
        return self.cells[start : start + _WIDTH]

    def close(self) -> None:
        self.cells.release()
        self._map.close()
