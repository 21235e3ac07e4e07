"""Build Markdown."""

import re
from collections.abc import Iterable, Sequence

NOTE = "<!-- Written by `make reference` from the code: do not edit. -->"
# Clause ids and section numbers at the start of descriptions in the code.
_CLAUSES = re.compile(r"^(?:(?:[TRIFH]\d+|§[\d.]+)(?:[–, ]+(?=[TRIFH]\d|§))?)+[:,]? ")


def page(title: str, *parts: str) -> str:
    """Return a page of the reference."""
    return "\n\n".join([f"# {title}", NOTE, *(part for part in parts if part)]) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, or an empty text without rows."""
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    ruler = "|" + "---|" * len(heads)
    return "\n".join([f"| {' | '.join(heads)} |", ruler, *lines]) if lines else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def describe(text: str | None) -> str:
    """Return a description in one line, without its clause ids."""
    line = " ".join((text or "").split())
    plain, removed = _CLAUSES.subn("", line)
    return plain[:1].upper() + plain[1:] if removed else plain


def code(text: str) -> str:
    return f"`{text}`"
