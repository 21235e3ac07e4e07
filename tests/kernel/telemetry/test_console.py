"""Log entries for people: one short line, without the ids that machines need."""

from typing import Any

import pytest

from penstock.kernel.telemetry.console import ConsoleRenderer

ENTRY = {"timestamp": "2026-01-31T06:21:40.123456Z", "level": "info", "event": "dictionary_loaded"}


def render(*, colors: bool = False, **more: Any) -> str:
    return ConsoleRenderer(colors=colors)(None, "info", {**ENTRY, **more})


def test_entry_is_one_line_of_time_level_event_and_pairs() -> None:
    """Log of `penstock up`: time, level, event and key=value pairs, without request id and trace id."""
    line = render(code="RATES", items=3, seconds=0.123456789, request_id="f" * 32, trace_id="0" * 32)
    assert line == "06:21:40Z INFO    dictionary_loaded  code=RATES items=3 seconds=0.1235"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("two words", '"two words"'),
        ("", '""'),
        ("a\nb", '"a\\nb"'),
        (True, "true"),
        (["a"], '["a"]'),
        ("a/b.c", "a/b.c"),
    ],
)
def test_values_that_need_quotes_have_them(value: Any, text: str) -> None:
    """A value cannot forge another pair or another line."""
    assert render(value=value).endswith(f"  value={text}")


def test_fields_without_a_value_are_not_shown() -> None:
    """Fields that are None are only in JSON logs."""
    assert render(flow=None, run="r1").endswith("dictionary_loaded  run=r1")


def test_message_replaces_the_event() -> None:
    """An entry with a message shows the sentence; the name of the event is for machines."""
    assert render(message="starting PostgreSQL…") == "06:21:40Z INFO    starting PostgreSQL…"


def test_traceback_follows_on_its_own_lines() -> None:
    """The traceback of an exception is complete."""
    assert render(exception="Traceback\n  x").splitlines()[1:] == ["Traceback", "  x"]


def test_colors_are_for_terminals_only() -> None:
    """Without colours there is no escape sequence."""
    assert "\x1b[" in render(colors=True)
    assert "\x1b[" not in render()
