"""Prometheus read_metrics of tracking."""

from datetime import timedelta

from penstock.kernel.clock import ManualClock
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.tracking.service import Tracking
from tests.tracking.harness import WORKER, TrackingHarness, expire, make_report


def read_metrics(telemetry: Telemetry) -> dict[str, float]:
    """Return the read_metrics of tracking by name, without their common prefix."""
    lines = telemetry.format_metrics().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith("penstock_tracking"))
    return {name.removeprefix("penstock_tracking_"): float(value) for name, _, value in pairs}


async def test_metrics_show_the_pipeline(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock, telemetry: Telemetry
) -> None:
    """T17: there are gauges per stage and status, the oldest age per queue, and a counter of expired leases."""
    await api.queue_up(WORKER, "old")
    clock.advance(timedelta(seconds=100))
    await api.queue_up(WORKER, "young", 0, 1)
    await api.queue_up(WORKER, "failed")
    await api.move(WORKER, "fail", "failed")
    await tracking.update_metrics()
    shown = read_metrics(telemetry)
    assert shown['rows{stage="shard-worker",status="new"}'] == 3
    assert shown['rows{stage="shard-worker",status="failed"}'] == 1
    assert shown['rows{stage="event-ingest",status="done"}'] == 4
    assert shown['rows{stage="mysql-sender",status="new"}'] == 4
    assert shown['queue_rows{stage="shard-worker"}'] == 3
    assert shown['queue_rows{stage="mysql-sender"}'] == 0
    assert shown['queue_oldest_seconds{stage="shard-worker"}'] == 100
    assert shown['queue_oldest_seconds{stage="shard-splitter"}'] == 0
    assert shown['lease_expiries_total{stage="shard-worker"}'] == 0
    assert shown['paused{stage="shard-worker"}'] == 0
    await api.claim(WORKER, limit=2)
    await expire(tracking, clock)
    await api.post("/queues/shard-worker/pause")
    await tracking.update_metrics()
    shown = read_metrics(telemetry)
    assert shown['lease_expiries_total{stage="shard-worker"}'] == 2
    assert shown['paused{stage="shard-worker"}'] == 1


async def test_oldest_row_is_the_one_registered_first(
    api: TrackingHarness, tracking: Tracking, clock: ManualClock, telemetry: Telemetry
) -> None:
    """T17: the age of a queue is that of its oldest row, even if this row is retried after younger ones."""
    await api.queue_up(WORKER, "old")
    (item,) = await api.claim(WORKER)
    clock.advance(timedelta(seconds=100))
    await api.queue_up(WORKER, "young")
    await api.report(WORKER, make_report(item, "retry", error="busy", retry_after_seconds=10))
    clock.advance(timedelta(seconds=20))
    await tracking.update_metrics()
    assert read_metrics(telemetry)['queue_oldest_seconds{stage="shard-worker"}'] == 120
