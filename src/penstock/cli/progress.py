"""How far long work is, on a terminal; elsewhere nothing is said."""

import sys
from time import monotonic

_EVERY = 0.2
_WIDTH = 24


class Bar:
    """One line on standard error that is written over, and gone at the end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_shown = sys.stderr.isatty()
        self._began = monotonic()
        self._last = 0.0

    def __call__(self, rows: int, part: float | None) -> None:
        now = monotonic()
        if not self._is_shown or now - self._last < _EVERY:
            return
        self._last = now
        rate = rows / max(now - self._began, 0.001)
        done = "" if part is None else f" {'█' * int(part * _WIDTH):░<{_WIDTH}} {part:4.0%} "
        left = "" if not part else f", {(now - self._began) * (1 - part) / part:,.0f} s left"
        sys.stderr.write(f"\r\x1b[K{self._what}{done} {rows:,} rows, {rate:,.0f} rows/s{left}")
        sys.stderr.flush()

    def close(self) -> None:
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
