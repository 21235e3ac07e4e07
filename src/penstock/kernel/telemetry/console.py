"""Log entries for people: one short line per entry, with the time, the level, the event and key=value pairs."""

import json
import os
import sys
from collections.abc import MutableMapping
from typing import Any

_FIRST = ("timestamp", "level", "event", "message", "exception")  # fields with a place of their own in the line
_HIDDEN = frozenset({*_FIRST, "trace_id", "request_id"})  # the two ids are for machines: JSON logs have them
_COLORS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "31;1"}
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./:@+%,*#~")


class ConsoleRenderer:
    """Renders `06:21:40Z INFO  dictionary_loaded  code=RATES version=3`, in colour if *colors* is set.

    An entry with a `message` shows that sentence in place of the name of its event.
    """

    def __init__(self, *, colors: bool) -> None:
        self._colors = colors

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
        level = str(event.get("level", "info"))
        text = event.get("message") or event.get("event", "")
        shown = {name: value for name, value in event.items() if name not in _HIDDEN and value is not None}
        pairs = " ".join(f"{name}={_format(value)}" for name, value in shown.items())
        time = _shorten_time(str(event.get("timestamp", "")))
        line = f"{self._paint(time, '2')} {self._paint(f'{level.upper():<7}', _COLORS.get(level, '0'))} {text}"
        return "\n".join(filter(None, (f"{line}  {pairs}" if pairs else line, event.get("exception"))))

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colors else text


def supports_color() -> bool:
    """Return whether standard error is a terminal and NO_COLOR is not set."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


def _shorten_time(timestamp: str) -> str:
    """Return the time of day of an ISO timestamp in UTC, e.g. 06:21:40Z."""
    return f"{timestamp[11:19]}Z"


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value if value and _PLAIN.issuperset(value) else json.dumps(value, ensure_ascii=False)
