"""Markdown, made."""

import re
from collections.abc import Iterable, Sequence

NOTE = "<!-- Written by `make reference` from the code: do not edit. -->"
# What descriptions in the code begin with: the clauses they keep, or places in documents.
_CLAUSES = re.compile(r"^(?:(?:[TRIFH]\d+|§[\d.]+)(?:[–, ]+(?=[TRIFH]\d|§))?)+[:,]? ")


def page(title: str, *parts: str) -> str:
    """A page of the reference."""
    return "\n\n".join([f"# {title}", NOTE, *(part for part in parts if part)]) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, or nothing when there are no rows."""
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    ruler = "|" + "---|" * len(heads)
    return "\n".join([f"| {' | '.join(heads)} |", ruler, *lines]) if lines else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def said(text: str | None) -> str:
    """A description in one line, without the clauses it keeps."""
    line = " ".join((text or "").split())
    plain, removed = _CLAUSES.subn("", line)
    return plain[:1].upper() + plain[1:] if removed else plain


def code(text: str) -> str:
    return f"`{text}`"
