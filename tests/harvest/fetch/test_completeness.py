"""H16: the verdict on a pass over a partition."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from penstock.harvest.contract import HarvestRunState, HarvestRunType
from penstock.harvest.fetch.completeness import CompletenessVerdict, PassCounts, PassEnding, judge_pass
from penstock.harvest.fetch.partitions import PartitionTask
from penstock.harvest.fetch.raw_store import StoreResult
from penstock.harvest.model import EVERYTHING, PagePosition

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PASSES = 4


def task(**changes: Any) -> PartitionTask:
    values: dict[str, Any] = {
        "run_id": UUID(int=1),
        "partition_id": "partition-0",
        "feed": "stones",
        "run_type": HarvestRunType.FULL,
        "run_state": HarvestRunState.WORKERS_RUNNING,
        "range": EVERYTHING,
        "position": PagePosition(),
        "scan": 1,
        "scan_started_at": NOW,
        "last_scan_at": None,
        "counted": 100,
        "received": 0,
        "seen": 0,
        "missed": 0,
        "was_clean": False,
        "completed": False,
        "rescues": 0,
        "status": None,
        "watermark_before": None,
        "upper_bound": NOW,
        "trace_id": "t",
    }
    return PartitionTask(**{**values, **changes})


def verdict(
    task: PartitionTask, received: int, seen: int, ending: PassEnding | None, missed: int = 0, rejected: int = 0
) -> CompletenessVerdict:
    counts = PassCounts.from_turn(task, received, rejected, StoreResult(seen, missed))
    return judge_pass(task, counts, ending, PASSES)[0]


@pytest.mark.parametrize(
    ("received", "seen", "rejected", "ending", "expected"),
    [
        (100, 100, 0, PassEnding(100, 0), CompletenessVerdict.COMPLETE),
        (100, 98, 2, PassEnding(100, 0), CompletenessVerdict.COMPLETE),  # two were rejected
        # A record was inserted and another deleted: the numbers agree nevertheless.
        (100, 100, 0, PassEnding(100, 1), CompletenessVerdict.AGAIN),
        (100, 99, 0, PassEnding(100, 0), CompletenessVerdict.AGAIN),  # a record was received twice
        (99, 99, 0, PassEnding(99, 0), CompletenessVerdict.AGAIN),  # a read record was deleted, another one moved
        (90, 90, 0, PassEnding(100, 0), CompletenessVerdict.AGAIN),
        (60, 60, 0, None, CompletenessVerdict.CONTINUE),
    ],
)
def test_first_pass(
    received: int, seen: int, rejected: int, ending: PassEnding | None, expected: CompletenessVerdict
) -> None:
    """H16: a first pass is complete only if every number agrees and no record changed."""
    assert verdict(task(), received, seen, ending, rejected=rejected) is expected


@pytest.mark.parametrize(
    ("was_clean", "received", "ending", "missed", "expected"),
    [
        (False, 100, PassEnding(100, 3), 0, CompletenessVerdict.COMPLETE),
        (False, 100, PassEnding(100, 3), 1, CompletenessVerdict.AGAIN),
        # Rows moved between pages again, perhaps the same rows as in the first pass.
        (False, 99, PassEnding(99, 0), 0, CompletenessVerdict.AGAIN),
        (True, 99, PassEnding(99, 0), 0, CompletenessVerdict.COMPLETE),
        (True, 99, PassEnding(99, 0), 1, CompletenessVerdict.AGAIN),
        (True, 90, PassEnding(100, 3), 0, CompletenessVerdict.AGAIN),  # fewer records than the source counts
        (True, 97, PassEnding(100, 3), 0, CompletenessVerdict.COMPLETE),
    ],
)
def test_later_pass(
    was_clean: bool, received: int, ending: PassEnding, missed: int, expected: CompletenessVerdict
) -> None:
    """H16: after changes, a later pass is complete if it, or two in a row, find no record that was missed."""
    assert verdict(task(scan=2, was_clean=was_clean), received, received, ending, missed) is expected


def test_last_pass_fails_the_partition() -> None:
    """H16: after the maximum number of passes the partition fails, with a code for the behaviour of the source."""
    last = task(scan=PASSES)
    for received, ending, code in (
        (90, PassEnding(100, 0), "SOURCE_SHORT"),
        (100, PassEnding(99, 0), "SOURCE_MOVING"),
    ):
        counts = PassCounts.from_turn(last, received, 0, StoreResult(received, 5))
        result, error = judge_pass(last, counts, ending, PASSES)
        assert (result, (error or "").split(":")[0]) == (CompletenessVerdict.FAILED, code)


def test_endless_pages_fail_the_partition() -> None:
    """H4: the partition fails when it has received more than twice its count."""
    part = task(received=1_150)
    counts = PassCounts.from_turn(part, 60, 0, StoreResult(0, 0))
    result, error = judge_pass(part, counts, None, PASSES)
    assert result is CompletenessVerdict.FAILED
    assert error == (
        "SOURCE_PAGING_ENDLESS: 100 records counted, 1210 received, and the pages do not end; "
        "the source seems to ignore the offset"
    )
