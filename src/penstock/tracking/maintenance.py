"""Periodic tasks of tracking."""

from collections.abc import Sequence
from datetime import timedelta

from penstock.kernel.tasks.periodic import PeriodicTask
from penstock.tracking.service import Tracking

SECOND = timedelta(seconds=1)


def list_periodic_tasks(tracking: Tracking) -> Sequence[tuple[str, PeriodicTask, timedelta]]:
    """Return name, task and interval of each periodic task; several processes may run them concurrently."""
    return [
        ("tracking reaper", tracking.reap, SECOND),
        ("tracking counts", tracking.fold_counts, SECOND),
        ("tracking metrics", tracking.update_metrics, 5 * SECOND),
    ]
