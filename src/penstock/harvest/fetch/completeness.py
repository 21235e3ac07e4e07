"""H16: the verdict on a pass over a partition, without I/O."""

from dataclasses import dataclass
from enum import StrEnum

from penstock.harvest.fetch.partitions import PartitionTask
from penstock.harvest.fetch.raw_store import StoreResult

_SLACK = 1_000  # records that a source may send beyond twice its count


class CompletenessVerdict(StrEnum):
    """The next step of a partition."""

    CONTINUE = "continue"
    COMPLETE = "complete"
    AGAIN = "again"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PassEnding:
    """Counts of the source at the end of a pass: records, and records that changed during the pass."""

    count: int
    changed: int


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Counts of a pass: records *received*, distinct records *seen*, and records that an earlier pass had *missed*."""

    received: int
    seen: int
    missed: int
    is_repeated: bool  # whether a key was received twice: a record moved, or two records have one key

    @classmethod
    def from_turn(cls, task: PartitionTask, received: int, rejected: int, stored: StoreResult) -> "PassCounts":
        """Return the counts of the pass of *task* after one more turn."""
        total, seen = task.received + received, task.seen + stored.seen + rejected
        return cls(total, seen, task.missed + stored.missed, seen < total)


def judge_pass(
    task: PartitionTask, counts: PassCounts, ending: PassEnding | None, passes: int
) -> tuple[CompletenessVerdict, str | None]:
    """Return the verdict, and the error if the partition failed.

    Nothing was missed if the source counted the same before and after, sent exactly as many records, none twice, and
    reports no change. If records changed, a second pass is enough if its numbers agree and it finds no record that the
    first pass should have found. If its numbers do not agree, rows moved between its pages too, and two such passes in
    a row are required. In any case the source must have sent as many records as it counts.
    """
    if ending is None:
        if counts.received > 2 * task.counted + _SLACK:
            numbers = f"{task.counted} records counted, {counts.received} received, and the pages do not end"
            error = f"SOURCE_PAGING_ENDLESS: {numbers}; the source seems to ignore the offset"
            return CompletenessVerdict.FAILED, error
        return CompletenessVerdict.CONTINUE, None
    is_short = counts.received < ending.count - ending.changed
    agrees = task.counted == counts.received == ending.count and not counts.is_repeated
    if agrees and not ending.changed:
        return CompletenessVerdict.COMPLETE, None
    if is_clean(task, counts) and not is_short and (agrees or task.was_clean):
        return CompletenessVerdict.COMPLETE, None
    if task.scan < passes:
        return CompletenessVerdict.AGAIN, None
    numbers = f"{task.counted} counted before, {counts.received} received, {ending.count} counted after"
    numbers += f", {ending.changed} changed"
    if is_short:
        error = f"SOURCE_SHORT: the source sends fewer records than it counts, in {passes} passes: {numbers}"
    else:
        error = f"SOURCE_MOVING: records still move after {passes} passes: {numbers}, {counts.missed} missed"
    return CompletenessVerdict.FAILED, error


def is_clean(task: PartitionTask, counts: PassCounts) -> bool:
    """Return whether this is a later pass that found no record which an earlier pass should have found."""
    return task.scan > 1 and not counts.missed
