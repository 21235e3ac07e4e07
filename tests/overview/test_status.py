"""What each part finds late or broken: what it takes, and what it does not take."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import pytest

from penstock.kernel.errors import Transient
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.status import PartReport, StatusIssue, late_issue
from penstock.overview import status
from penstock.overview.status import StatusBoard

NOW = datetime(2026, 11, 17, 3, 0, tzinfo=UTC)


def board(**looks: Callable[[], Awaitable[PartReport]]) -> StatusBoard:
    return StatusBoard(LivenessPulse({}, needs=[]), looks, lambda: NOW)


async def test_a_part_that_cannot_answer_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """T16: it is broken itself, and what the others tell is told; the worst of it is the whole's."""
    monkeypatch.setattr(status, "_PATIENCE", 0.05)

    async def fine() -> PartReport:
        return PartReport("fine", [late_issue("x", "slow")])

    async def down() -> PartReport:
        raise Transient("DATABASE_DOWN", "no PostgreSQL", hint="start it")

    async def crashes() -> PartReport:
        raise ZeroDivisionError

    async def hangs() -> PartReport:
        await asyncio.Event().wait()
        raise AssertionError

    assert (await board().status()).status == "OK"
    assert (await board(fine=fine).status()).status == "LATE"
    told = await board(fine=fine, down=down, crashes=crashes, hangs=hangs).status()
    assert told.status == "BROKEN"
    assert {part.part: [finding.problem for finding in part.issues] for part in told.parts} == {
        "platform": [],
        "fine": ["slow"],
        "down": ["DATABASE_DOWN: no PostgreSQL"],
        "crashes": ["the look at it failed: ZeroDivisionError"],
        "hangs": ["no answer within 0.05 s"],
    }


async def test_a_component_that_is_down_is_broken() -> None:
    """R23: told with its code and what to do."""

    async def down() -> None:
        raise Transient("REDIS_DOWN", "no Redis", hint="start it")

    told = await StatusBoard(LivenessPulse({"signals": down}, needs=[]), {}, lambda: NOW).status()
    (platform,) = told.parts
    assert platform.summary == "0 of 1 component up"
    (one,) = platform.issues
    assert StatusIssue(one.severity, one.subject, one.problem, one.hint) == StatusIssue(
        one.severity.BROKEN, "signals", "does not work: REDIS_DOWN", "start it"
    )
