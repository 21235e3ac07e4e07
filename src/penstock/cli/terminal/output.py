"""Print data to standard output and messages to standard error, as text for people or JSON for programs."""

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from penstock.cli.terminal.style import colour_status, style_text
from penstock.kernel.errors import PenstockError


class RawJson(str):
    """JSON text that `emit` prints as it is: a number keeps every digit."""

    __slots__ = ()


def emit(data: Any, *, as_json: bool, text: str | None = None) -> None:
    """Print *data* as JSON, or *text* for people."""
    sys.stdout.write(format_json(data) if as_json or text is None else text)
    sys.stdout.write("\n")
    sys.stdout.flush()


def format_json(data: Any) -> str:
    """Return *data* as indented JSON, with times in UTC and the text of every RawJson unchanged."""
    if not _has_raw(data):
        return json.dumps(data, indent=2, default=_convert_value)
    import msgspec

    return msgspec.json.format(msgspec.json.encode(_convert_raw(data), enc_hook=_convert_value), indent=2).decode()


def print_message(message: str) -> None:
    """Print a message that is not data to standard error."""
    sys.stderr.write(f"{message}\n")


def make_printable(text: str) -> str:
    """Return *text* with control characters escaped: file names come from outside and could move the cursor."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def format_time(time: str | datetime) -> str:
    """Return a server's time for people, in UTC: 2026-11-17T06:26:47Z."""
    parsed = datetime.fromisoformat(time) if isinstance(time, str) else time
    return f"{parsed.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def format_table(rows: Sequence[Sequence[str]], head: Sequence[str] | None = None) -> str:
    """Return *rows* as aligned columns, with *head* above them; a status such as FAILED has its colour."""
    cells = [[make_printable(cell) for cell in row] for row in ([head, *rows] if head else rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))] if cells else []
    lines = [
        _format_table_line(row, widths, is_head=head is not None and not number) for number, row in enumerate(cells)
    ]
    return "\n".join(lines)


def append_more_note(text: str, *, has_more: bool) -> str:
    """Return *text*, with a note if the server has more rows than --limit."""
    return f"{text}\nthere are more; --limit shows them" if has_more else text


def fail(error: PenstockError) -> NoReturn:
    """Print the error and its hint to standard error, and end with its exit code."""
    if "--json" in sys.argv:
        hint = {} if error.hint is None else {"hint": error.hint}
        data = {**error.details, "code": error.code, "message": error.message, **hint}
        print_message(json.dumps({"error": data}, default=_convert_value))
    else:
        print_message(f"{style_text('error:', stream=sys.stderr, fg='red', bold=True)} {error.message}")
        if error.hint:
            print_message(f"{style_text('hint:', stream=sys.stderr, dim=True)} {error.hint}")
    sys.exit(error.exit_code)


def _format_table_line(row: Sequence[str], widths: Sequence[int], *, is_head: bool) -> str:
    last = len(row) - 1
    padded = [cell if place == last else cell.ljust(widths[place]) for place, cell in enumerate(row)]
    if is_head:
        return style_text("  ".join(padded).rstrip(), bold=True)
    while padded and not padded[-1].strip():
        padded.pop()
    if padded:
        padded[-1] = padded[-1].rstrip()
    return "  ".join(colour_status(row[place], padded=cell) for place, cell in enumerate(padded))


def _has_raw(data: Any) -> bool:
    values = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return isinstance(data, RawJson) or any(map(_has_raw, values))


def _convert_raw(data: Any) -> Any:
    """Return *data* with each RawJson as what msgspec encodes unchanged."""
    from msgspec import Raw

    if isinstance(data, RawJson):
        return Raw(data.encode())
    if isinstance(data, dict):
        return {name: _convert_raw(value) for name, value in data.items()}
    return [_convert_raw(value) for value in data] if isinstance(data, list) else data


def _convert_value(value: Any) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return str(value)
