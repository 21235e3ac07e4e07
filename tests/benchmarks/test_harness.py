"""Rounds that are finished count, and those alone."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from benchmarks.harness import Bench, Results, report, run
from benchmarks.session import FULL, SMOKE, Session


class Endless:
    """A measurement that is immediate in its first rounds, and then never ends."""

    def __init__(self, rounds: int) -> None:
        self._left = rounds
        self.is_stuck = asyncio.Event()

    async def measure(self) -> float:
        self._left -= 1
        if self._left < 0:
            self.is_stuck.set()
            await asyncio.Event().wait()
        return 1.0


async def test_a_round_that_is_cut_short_does_not_count() -> None:
    """An interrupted run has figures of its finished rounds, the same number for every bench."""
    endless, results = Endless(rounds=2), Results(wanted=5)
    benches = [Bench("quick", "rows", _measure), Bench("endless", "rows", endless.measure)]
    task = asyncio.create_task(run(benches, results, warms_up=False))
    await endless.is_stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [(figure.bench.name, figure.rounds) for figure in results.figures] == [
        ("quick", [1.0, 1.0]),
        ("endless", [1.0, 1.0]),
    ]


async def test_a_swallowed_interruption_still_ends_the_run() -> None:
    """A run ends even when the code that is measured hides that it was cancelled."""
    endless, results = Endless(rounds=0), Results(wanted=5)

    async def swallow() -> float:
        with contextlib.suppress(asyncio.CancelledError):
            return await endless.measure()
        return 1.0

    task = asyncio.create_task(run([Bench("swallowing", "rows", swallow)], results, warms_up=False))
    await endless.is_stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert results.figures == []


async def test_the_warm_up_does_not_count(tmp_path: Path) -> None:
    """Round 0 warms up in the full form; the report has the rounds after it."""
    results = Results(wanted=2)
    await run([Bench("quick", "rows", _measure)], results, warms_up=FULL.warms_up)
    assert len(results.rounds) == 2
    assert "1 rows/s" in report(Session(FULL, tmp_path), results, as_json=False)


def test_a_run_without_a_round_has_an_empty_report(tmp_path: Path) -> None:
    """A run that is interrupted before its first round is finished says so, and what it left out."""
    session = Session(SMOKE, tmp_path)
    assert not session.has_peers("PgQueuer")
    shown = report(session, Results(wanted=5, interruption="SIGINT"), as_json=False)
    assert "interrupted by SIGINT after 0 of 5 rounds" in shown
    assert "left out: PgQueuer" in shown


async def _measure() -> float:
    return 1.0
