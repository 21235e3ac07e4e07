"""What somebody should look at: each part tells its own, one command shows them all."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class Severity(StrEnum):
    """BROKEN will not mend itself; LATE may, and should be watched."""

    BROKEN = "BROKEN"
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with *subject*, since when, and what to do about it."""

    severity: Severity
    subject: str
    what: str
    hint: str | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """How a part stands, in a line, and what is wrong with it."""

    summary: str
    findings: Sequence[Finding] = ()


def broken(subject: str, what: str, hint: str | None = None, since: datetime | None = None) -> Finding:
    return Finding(Severity.BROKEN, subject, what, hint, since)


def late(subject: str, what: str, hint: str | None = None, since: datetime | None = None) -> Finding:
    return Finding(Severity.LATE, subject, what, hint, since)


def several(number: int, one: str, more: str | None = None) -> str:
    """So many of them, as a person says it."""
    return f"{number:,} {one if number == 1 else more or f'{one}s'}"
