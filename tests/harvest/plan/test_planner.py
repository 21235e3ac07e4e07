"""A plan that fails, or waits as its source says."""

from datetime import timedelta
from pathlib import Path

import pytest

from penstock.harvest.contract import PLANS
from penstock.harvest.model import PartitionRange, TimeWindow
from penstock.harvest.sources.port import SourceFailed, SourcePaused
from penstock.kernel.tasks.outcome import Failed, Retry
from tests.harvest.scripted_source import ScriptedSource, alerts, drained, scripted_harvest, stones
from tests.harvest.stepper import FEED


@pytest.mark.full
async def test_a_plan_fails_for_what_nobody_thought_of(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H6: a count no column holds is no reason to plan for ever: four deliveries, then somebody is told."""

    async def absurd(_self: ScriptedSource, _range: PartitionRange, _window: TimeWindow) -> int:
        return 2**40

    monkeypatch.setattr(ScriptedSource, "count", absurd)
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(60)), partitions={"count": 1}) as one:
        await one.harvest.start(FEED, "test")
        outcomes = await drained(one, PLANS, within=10)
        assert [type(outcome) for outcome in outcomes] == [Retry, Retry, Retry, Failed]
        row = await one.db.fetchrow("SELECT state, error FROM harvest_plan")
        assert row is not None
        assert (row["state"], row["error"].split(":")[0]) == ("failed", "INTERNAL")
        assert await alerts(one) == ["PLAN_FAILED"]


@pytest.mark.parametrize(("kind", "counts"), [(SourceFailed, True), (SourcePaused, False)])
@pytest.mark.parametrize(("seconds", "waits"), [(30, 30), (3_600, 60)])
async def test_a_plan_waits_as_its_source_says(
    database_url: str, tmp_path: Path, kind: type[SourceFailed], counts: bool, seconds: int, waits: int
) -> None:
    """H15: but at most for a minute, as plans of other feeds may be behind it."""
    source = ScriptedSource(stones(60))

    async def fail(range_: PartitionRange, window: TimeWindow) -> None:
        raise kind("SOURCE_CIRCUIT_OPEN", "not now", after=timedelta(seconds=seconds))

    source.before_count = fail
    async with scripted_harvest(database_url, tmp_path, source) as one:
        await one.harvest.start(FEED, "test")
        expected = Retry("SOURCE_CIRCUIT_OPEN: not now", after=timedelta(seconds=waits), counts=counts)
        assert await one.deliver(PLANS) == [expected]
