"""H16: what a pass over a partition proves, judged without I/O."""

from dataclasses import dataclass
from enum import StrEnum

from penstock.harvest.fetch.partitions import PartitionTask
from penstock.harvest.fetch.raw_store import StoreResult

_SLACK = 1_000  # records a source may give beyond twice what it counted


class CompletenessVerdict(StrEnum):
    """What becomes of the partition."""

    GO_ON = "go on"
    COMPLETE = "complete"
    AGAIN = "again"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PassEnding:
    """What the source says when a pass is at its end: how many records there are, and how many changed meanwhile."""

    count: int
    changed: int


@dataclass(frozen=True, slots=True)
class PassCounts:
    """How far a pass is: records *told* by the source, *seen* by us, *missed* by the pass before; some set aside."""

    told: int
    seen: int
    missed: int
    is_repeated: bool  # whether some came twice: then something moved, or two have one key

    @classmethod
    def after(cls, task: PartitionTask, told: int, aside: int, kept: StoreResult) -> "PassCounts":
        """The pass of *task* with one turn more."""
        seen = task.seen + kept.seen + aside
        return cls(task.told + told, seen, task.missed + kept.missed, seen < task.told + told)


def judge(
    task: PartitionTask, now: PassCounts, ending: PassEnding | None, passes: int
) -> tuple[CompletenessVerdict, str | None]:
    """The verdict, and in words why it is a failure.

    Nothing was missed if the source counted the same before and after, gave just as many, none twice, and says that
    none changed. Where something changed, a second pass whose numbers agree is enough if it finds nothing the first
    should have found; where they do not agree rows slipped between its pages too, and it takes two such passes in a
    row. All that as long as the source gave all it says it has.
    """
    if ending is None:
        if now.told > 2 * task.counted + _SLACK:
            why = f"{task.counted} records counted, {now.told} given, and no end: does it heed the offset?"
            return CompletenessVerdict.FAILED, f"SOURCE_PAGING_ENDLESS: {why}"
        return CompletenessVerdict.GO_ON, None
    is_short = now.told < ending.count - ending.changed
    agrees = task.counted == now.told == ending.count and not now.is_repeated
    if agrees and not ending.changed:
        return CompletenessVerdict.COMPLETE, None
    if is_clean(task, now) and not is_short and (agrees or task.was_clean):
        return CompletenessVerdict.COMPLETE, None
    if task.scan < passes:
        return CompletenessVerdict.AGAIN, None
    counts = f"{task.counted} counted before, {now.told} given, {ending.count} counted after, {ending.changed} changed"
    if is_short:
        return (
            CompletenessVerdict.FAILED,
            f"SOURCE_SHORT: it does not give what it counts, in {passes} passes: {counts}",
        )
    return (
        CompletenessVerdict.FAILED,
        f"SOURCE_MOVING: records still move after {passes} passes: {counts}, {now.missed} missed",
    )


def is_clean(task: PartitionTask, now: PassCounts) -> bool:
    """Whether a later pass found nothing that the one before it should have found."""
    return task.scan > 1 and not now.missed
