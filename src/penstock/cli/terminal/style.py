"""Colours of the command line: on a terminal only, and not with NO_COLOR or `--no-color`."""

import os
import sys
from typing import Any, TextIO

import typer

_GOOD = ("OK", "SUCCEEDED", "COMMITTED", "PASS", "done", "completed", "ok")
_LATE = ("LATE", "PENDING", "RUNNING", "READY", "QUARANTINED", "WARN", "WARNING", "started", "paused", "stale")
_BAD = ("BROKEN", "FAILED", "FAIL", "ERROR", "CRITICAL", "DISAGREES", "CANCELLED", "failed", "bad")
_COLOURS = {**dict.fromkeys(_GOOD, "green"), **dict.fromkeys(_LATE, "yellow"), **dict.fromkeys(_BAD, "red")}


def supports_colour(stream: TextIO) -> bool:
    """Return true if *stream* is a terminal whose user did not turn colours off (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def turn_colour_off(is_off: bool) -> None:
    """Turn colours off for the rest of the process; the callback of `--no-color`."""
    if is_off:
        os.environ["NO_COLOR"] = "1"


def style_text(text: str, *, stream: TextIO | None = None, **looks: Any) -> str:
    """Return *text* with *looks*, such as `fg="red"` or `bold=True`, if *stream* (standard output) has colours."""
    return typer.style(text, **looks) if text and supports_colour(stream or sys.stdout) else text


def colour_status(word: str, *, padded: str | None = None) -> str:
    """Return a status in its colour: OK green, LATE yellow, FAILED red; *padded* is the text to return instead."""
    colour = _COLOURS.get(word)
    text = word if padded is None else padded
    return style_text(text, fg=colour) if colour else text
