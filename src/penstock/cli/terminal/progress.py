"""How far long work is, on a terminal; elsewhere nothing is said."""

import sys
from time import monotonic

_EVERY = 0.2
_WIDTH = 24


class ProgressBar:
    """One line on standard error that is written over, and gone at the end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_shown = sys.stderr.isatty()
        self._began = monotonic()
        self._last = 0.0
        self._stage = ""
        self._first = 0

    def __call__(self, rows: int, part: float | None) -> None:
        self._write(self._what, rows, part)

    def says(self, stage: str, rows: int | None = None, part: float | None = None) -> None:
        """The same for work in stages, each with a pace of its own."""
        if stage.partition(",")[0] != self._stage:
            self._stage, self._began, self._first = stage.partition(",")[0], monotonic(), rows or 0
        self._write(f"{self._what}: {stage}", rows, part)

    def _write(self, what: str, rows: int | None, part: float | None) -> None:
        now = monotonic()
        if not self._is_shown or now - self._last < _EVERY:
            return
        self._last = now
        part = None if part is None else min(part, 1.0)
        done = "" if part is None else f" {'█' * int(part * _WIDTH):░<{_WIDTH}} {part:4.0%} "
        rate = ((rows or 0) - self._first) / max(now - self._began, 0.001)
        pace = "" if rows is None else f" {rows:,} rows, {rate:,.0f} rows/s"
        left = "" if not part else f", {(now - self._began) * (1 - part) / part:,.0f} s left"
        sys.stderr.write(f"\r\x1b[K{what}{done}{pace}{left}")
        sys.stderr.flush()

    def close(self) -> None:
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
