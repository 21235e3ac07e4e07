"""What somebody should look at: each part tells its own, one command shows them all."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class IssueSeverity(StrEnum):
    """BROKEN will not mend itself; LATE may, and should be watched."""

    BROKEN = "BROKEN"
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class StatusIssue:
    """What is wrong with *subject*, since when, and what to do about it."""

    severity: IssueSeverity
    subject: str
    what: str
    hint: str | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class PartReport:
    """How a part stands, in a line, and what is wrong with it."""

    summary: str
    findings: Sequence[StatusIssue] = ()


def broken(subject: str, what: str, hint: str | None = None, since: datetime | None = None) -> StatusIssue:
    return StatusIssue(IssueSeverity.BROKEN, subject, what, hint, since)


def late(subject: str, what: str, hint: str | None = None, since: datetime | None = None) -> StatusIssue:
    return StatusIssue(IssueSeverity.LATE, subject, what, hint, since)


def several(number: int, one: str, more: str | None = None) -> str:
    """So many of them, as a person says it."""
    return f"{number:,} {one if number == 1 else more or f'{one}s'}"
