"""H16: when a pass over a partition is proof enough, and when it is not."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from penstock.harvest.contract import HarvestRunState, HarvestRunType
from penstock.harvest.fetch.completeness import CompletenessVerdict, PassCounts, PassEnding, judge
from penstock.harvest.fetch.partitions import PartitionTask
from penstock.harvest.fetch.raw_store import StoreResult
from penstock.harvest.model import EVERYTHING, PagePosition

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PASSES = 4


def task(**changes: Any) -> PartitionTask:
    known: dict[str, Any] = {
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
        "told": 0,
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
    return PartitionTask(**{**known, **changes})


def verdict(
    here: PartitionTask, told: int, seen: int, ending: PassEnding | None, missed: int = 0, aside: int = 0
) -> CompletenessVerdict:
    return judge(here, PassCounts.after(here, told, aside, StoreResult(seen, missed)), ending, PASSES)[0]


@pytest.mark.parametrize(
    ("told", "seen", "aside", "ending", "expected"),
    [
        (100, 100, 0, PassEnding(100, 0), CompletenessVerdict.COMPLETE),
        (100, 98, 2, PassEnding(100, 0), CompletenessVerdict.COMPLETE),  # two were set aside
        (
            100,
            100,
            0,
            PassEnding(100, 1),
            CompletenessVerdict.AGAIN,
        ),  # one came and one went: the numbers agree all the same
        (100, 99, 0, PassEnding(100, 0), CompletenessVerdict.AGAIN),  # one came twice
        (99, 99, 0, PassEnding(99, 0), CompletenessVerdict.AGAIN),  # one went after it was read, another slipped by
        (90, 90, 0, PassEnding(100, 0), CompletenessVerdict.AGAIN),
        (60, 60, 0, None, CompletenessVerdict.GO_ON),
    ],
)
def test_a_first_pass(
    told: int, seen: int, aside: int, ending: PassEnding | None, expected: CompletenessVerdict
) -> None:
    """H16: it is enough only if every number agrees and nothing changed."""
    assert verdict(task(), told, seen, ending, aside=aside) is expected


@pytest.mark.parametrize(
    ("was_clean", "told", "ending", "missed", "expected"),
    [
        (False, 100, PassEnding(100, 3), 0, CompletenessVerdict.COMPLETE),
        (False, 100, PassEnding(100, 3), 1, CompletenessVerdict.AGAIN),
        (
            False,
            99,
            PassEnding(99, 0),
            0,
            CompletenessVerdict.AGAIN,
        ),  # rows slipped by again: those before may have slipped twice
        (True, 99, PassEnding(99, 0), 0, CompletenessVerdict.COMPLETE),
        (True, 99, PassEnding(99, 0), 1, CompletenessVerdict.AGAIN),
        (True, 90, PassEnding(100, 3), 0, CompletenessVerdict.AGAIN),  # it does not give what it counts
        (True, 97, PassEnding(100, 3), 0, CompletenessVerdict.COMPLETE),
    ],
)
def test_a_later_pass(
    was_clean: bool, told: int, ending: PassEnding, missed: int, expected: CompletenessVerdict
) -> None:
    """H16: what moved is forgiven when a pass, or two in a row, find nothing that was missed."""
    assert verdict(task(scan=2, was_clean=was_clean), told, told, ending, missed) is expected


def test_passes_come_to_an_end() -> None:
    """H16: after so many it is a failure, which says what the source does."""
    last = task(scan=PASSES)
    for told, ending, code in ((90, PassEnding(100, 0), "SOURCE_SHORT"), (100, PassEnding(99, 0), "SOURCE_MOVING")):
        found, why = judge(last, PassCounts.after(last, told, 0, StoreResult(told, 5)), ending, PASSES)
        assert (found, (why or "").split(":")[0]) == (CompletenessVerdict.FAILED, code)


def test_a_source_without_an_end_is_noticed() -> None:
    """H4: twice what was counted, and some: nobody reads on."""
    found, why = judge(task(told=1_150), PassCounts.after(task(told=1_150), 60, 0, StoreResult(0, 0)), None, PASSES)
    assert (found, (why or "").split(":")[0]) == (CompletenessVerdict.FAILED, "SOURCE_PAGING_ENDLESS")
