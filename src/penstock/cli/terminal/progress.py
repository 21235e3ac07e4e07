"""The progress of long operations, on a terminal only."""

import sys
from time import monotonic

_INTERVAL = 0.2  # seconds between two updates of the line
_WIDTH = 24


class ProgressBar:
    """A line on standard error, overwritten with each update and removed at the end."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._is_shown = sys.stderr.isatty()
        self._started = monotonic()
        self._last = 0.0
        self._stage = ""
        self._first = 0

    def __call__(self, rows: int, part: float | None) -> None:
        self._write(self._title, rows, part)

    def show(self, stage: str, rows: int | None = None, part: float | None = None) -> None:
        """Show the progress of one stage of the operation; the rate is that of the stage."""
        if stage.partition(",")[0] != self._stage:
            self._stage, self._started, self._first = stage.partition(",")[0], monotonic(), rows or 0
        self._write(f"{self._title}: {stage}", rows, part)

    def close(self) -> None:
        """Remove the line."""
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _write(self, text: str, rows: int | None, part: float | None) -> None:
        now = monotonic()
        if not self._is_shown or now - self._last < _INTERVAL:
            return
        self._last = now
        part = None if part is None else min(part, 1.0)
        bar = "" if part is None else f" {'█' * int(part * _WIDTH):░<{_WIDTH}} {part:4.0%} "
        rate = ((rows or 0) - self._first) / max(now - self._started, 0.001)
        pace = "" if rows is None else f" {rows:,} rows, {rate:,.0f} rows/s"
        left = "" if not part else f", {(now - self._started) * (1 - part) / part:,.0f} s left"
        sys.stderr.write(f"\r\x1b[K{text}{bar}{pace}{left}")
        sys.stderr.flush()
