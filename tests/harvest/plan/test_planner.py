"""Plans: failures, pauses of the source, and warnings about the source."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.harvest.contract import PLANS
from penstock.harvest.model import PartitionRange, TimeWindow
from penstock.harvest.sources.port import SourceFailed, SourcePaused
from penstock.kernel.tasks.outcome import Failed, Retry
from tests.harvest.scripted_source import ONE_PART, ScriptedSource, deliver_all, list_alerts, scripted_harvest, stones
from tests.harvest.stepper import FEED
from tests.support.types import Json


@pytest.mark.full
async def test_unexpected_error_fails_the_plan(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H6: a count that no column can store fails the plan after four deliveries, with an alert."""

    async def count_too_many(_self: ScriptedSource, _range: PartitionRange, _window: TimeWindow) -> int:
        return 2**40

    monkeypatch.setattr(ScriptedSource, "count", count_too_many)
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(60)), partitions={"count": 1}) as stepper:
        await stepper.harvest.start(FEED, "test")
        outcomes = await deliver_all(stepper, PLANS, limit=10)
        assert [type(outcome) for outcome in outcomes] == [Retry, Retry, Retry, Failed]
        row = await stepper.db.fetchrow("SELECT state, error FROM harvest_plan")
        assert row is not None
        assert (row["state"], row["error"].split(":")[0]) == ("failed", "INTERNAL")
        assert await list_alerts(stepper) == ["PLAN_FAILED"]


@pytest.mark.parametrize(("kind", "counts"), [(SourceFailed, True), (SourcePaused, False)])
@pytest.mark.parametrize(("seconds", "waits"), [(30, 30), (3_600, 60)])
async def test_plan_waits_for_the_source(
    database_url: str, tmp_path: Path, kind: type[SourceFailed], counts: bool, seconds: int, waits: int
) -> None:
    """H15: a plan waits for the time that the source requests, but at most a minute: other plans may wait behind it."""
    source = ScriptedSource(stones(60))

    async def fail(range_: PartitionRange, window: TimeWindow) -> None:
        raise kind("SOURCE_CIRCUIT_OPEN", "not now", after=timedelta(seconds=seconds))

    source.before_count = fail
    async with scripted_harvest(database_url, tmp_path, source) as stepper:
        await stepper.harvest.start(FEED, "test")
        expected = Retry("SOURCE_CIRCUIT_OPEN: not now", after=timedelta(seconds=waits), counts=counts)
        assert await stepper.deliver(PLANS) == [expected]


async def test_start_of_a_run_is_logged_once(database_url: str, tmp_path: Path) -> None:
    """H2: the log has the feed, the run, its kind, and the numbers of records and partitions."""
    async with scripted_harvest(database_url, tmp_path, ScriptedSource(stones(60)), partitions=ONE_PART) as stepper:
        with capture_logs() as logs:
            run_id = await stepper.plan_run()
            await stepper.finish()
    assert of_event(logs, "harvest_run_started") == [
        {"feed": FEED, "run": str(run_id), "kind": "full", "records": 60, "partitions": 1, "actor": "test"}
    ]


@pytest.mark.parametrize("ignores_window", [True, False])
async def test_source_that_ignores_the_window_is_logged(
    database_url: str, tmp_path: Path, ignores_window: bool
) -> None:
    """H9: an incremental run that reads as many records as the source has logs a warning with the setting."""
    source = ScriptedSource(stones(60))
    async with scripted_harvest(database_url, tmp_path, source) as stepper:
        with capture_logs() as logs:
            first = await stepper.plan_run()
            await stepper.finish()
            assert of_event(logs, "incremental_window_ignored") == []
            source.rows["k00007"]["updatedAt"] = stepper.db.clock.now().isoformat()
            source.ignores_window = ignores_window
            second = await stepper.plan_run()
            await stepper.finish()
    assert [entry["kind"] for entry in of_event(logs, "harvest_run_started")] == ["full", "incremental"]
    assert first != second
    warnings = of_event(logs, "incremental_window_ignored")
    assert len(warnings) == (1 if ignores_window else 0)
    for warning in warnings:
        assert warning["run"] == str(second)
        assert warning["problem"] == (
            "the incremental run reads all 60 records: the source seems to ignore after_param (updated_after)"
        )
        assert f"harvest.feeds.{FEED}.source.after_param" in warning["hint"]
        assert "set after_param: null and upto_param: null" in warning["hint"]


async def test_source_that_ignores_bounds_fails_the_plan_with_a_hint(database_url: str, tmp_path: Path) -> None:
    """H3, H13: the error of the run names the parameters, and the setting for a source without them."""
    source = ScriptedSource(stones(60), ignores_bounds=True)
    async with scripted_harvest(database_url, tmp_path, source, partitions={"min_records": 10, "count": 4}) as stepper:
        await stepper.harvest.start(FEED, "test")
        with capture_logs() as logs:
            await deliver_all(stepper, PLANS, limit=10)
        error = await stepper.db.fetchval("SELECT error FROM harvest_plan")
    assert error.startswith("HEATMAP_UNSTABLE: the partitions contain ")
    assert "the source seems to ignore lower_param and upper_param" in error
    assert "partitions: {count: 1}" in error
    [failed] = of_event(logs, "harvest_run_failed")
    assert (failed["feed"], failed["code"], failed["error"]) == (FEED, "PLAN_FAILED", error)


def of_event(logs: Sequence[Mapping[str, Any]], name: str) -> list[Json]:
    """Return the fields of the log entries of an event, without its name and level."""
    return [
        {key: value for key, value in entry.items() if key not in ("event", "log_level")}
        for entry in logs
        if entry["event"] == name
    ]
