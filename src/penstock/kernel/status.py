"""The issues that each part reports to `penstock status`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class IssueSeverity(StrEnum):
    """BROKEN needs an operator; LATE may end without one and should be watched."""

    BROKEN = "BROKEN"
    LATE = "LATE"


@dataclass(frozen=True, slots=True)
class StatusIssue:
    """A problem of *subject*, the time since when it exists, and the next step."""

    severity: IssueSeverity
    subject: str
    problem: str
    hint: str | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class PartReport:
    """The state of a part in one line, and its issues."""

    summary: str
    issues: Sequence[StatusIssue] = ()


def make_broken_issue(
    subject: str, problem: str, hint: str | None = None, since: datetime | None = None
) -> StatusIssue:
    """Return an issue that needs an operator."""
    return StatusIssue(IssueSeverity.BROKEN, subject, problem, hint, since)


def make_late_issue(subject: str, problem: str, hint: str | None = None, since: datetime | None = None) -> StatusIssue:
    """Return an issue that may end without an operator."""
    return StatusIssue(IssueSeverity.LATE, subject, problem, hint, since)


def pluralize(number: int, singular: str, plural: str | None = None) -> str:
    """Return *number* with its noun, e.g. `1 run` or `1,200 runs`; *plural* is *singular* with an s unless given."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"
