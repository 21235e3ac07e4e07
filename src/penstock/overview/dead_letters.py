"""Dead letters of the bus: messages that failed in every allowed attempt and are not retried automatically."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from penstock.kernel.bus import Bus, DeadLetterCount
from penstock.kernel.status import IssueSeverity, PartReport, StatusIssue, pluralize
from penstock.kernel.text import format_duration

RUNBOOK = "docs/runbook/PenstockDeadLetters.md"
# Dead letters are stored until an operator deletes them. Older ones than this are not reported.
REPORTED_FOR = timedelta(days=7)
# Each rejected command is a dead letter too. Its update has the state FAILED, which is reported for a day.
COMMANDS_REPORTED_FOR = timedelta(days=1)


@dataclass(frozen=True)
class BusTopic:
    """A topic whose dead letters are reported, with the next step for the operator."""

    bus: Bus
    name: str
    hint: str
    severity: IssueSeverity = IssueSeverity.BROKEN
    reported_for: timedelta = REPORTED_FOR


async def report_dead_letters(topics: Sequence[BusTopic], now: datetime) -> PartReport:
    """Return the number of recent dead letters, and an issue for each topic that has some."""
    counts = await asyncio.gather(
        *(topic.bus.count_dead_letters(topic.name, now - topic.reported_for) for topic in topics)
    )
    issues = [_make_issue(topic, count, now) for topic, count in zip(topics, counts, strict=True) if count.number]
    number = pluralize(sum(count.number for count in counts), "dead letter")
    return PartReport(f"{number} in {pluralize(len(topics), 'topic')}", issues)


def _make_issue(topic: BusTopic, count: DeadLetterCount, now: datetime) -> StatusIssue:
    dead_letters = pluralize(count.number, "dead letter")
    age = format_duration(now - (count.oldest or now))
    problem = f"{dead_letters} within {format_duration(topic.reported_for)}, the oldest {age} ago"
    return StatusIssue(topic.severity, topic.name, problem, f"{topic.hint}; {RUNBOOK}", count.oldest)
