"""What tracking does by itself, now and then."""

from collections.abc import Sequence
from datetime import timedelta

from penstock.kernel.tasks.periodic import PeriodicTask
from penstock.tracking.service import Tracking

SECOND = timedelta(seconds=1)


def chores(tracking: Tracking) -> Sequence[tuple[str, PeriodicTask, timedelta]]:
    """Each with its name and how often it is done; any number of processes may do them at once."""
    return [
        ("tracking reaper", tracking.reap, SECOND),
        ("tracking counts", tracking.fold_counts, SECOND),
        ("tracking metrics", tracking.show_metrics, 5 * SECOND),
    ]
