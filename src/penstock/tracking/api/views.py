"""Convert the results of the service to the schemas of the API."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from penstock.kernel.states.journal import StoredEntry
from penstock.tracking.api import schemas
from penstock.tracking.contract import Stage, StageStatus
from penstock.tracking.model import FILE_STAGE, LAST_STAGE, STAGES_BY_MACHINE, ShardRow, StageCount, StagePause


def view_shard(row: ShardRow) -> schemas.ShardStatus:
    """Return the statuses of one shard."""
    statuses = {f"{stage.field}_status": status for stage, status in row.status.items()}
    return schemas.ShardStatus(shard=row.shard, updated_at=row.updated_at, **statuses)


def view_queue(stage: Stage, counts: Sequence[StageCount], pause: StagePause | None) -> schemas.QueueView:
    """Return the length of a queue, and its pause."""
    return schemas.QueueView(
        stage=stage,
        paused=pause is not None,
        paused_since=pause.since if pause else None,
        paused_by=pause.actor if pause else None,
        reason=pause.reason if pause else None,
        ready=_sum_rows(counts, stage, ready=True),
        started=_sum_rows(counts, stage, StageStatus.STARTED),
        failed=_sum_rows(counts, stage, StageStatus.FAILED),
    )


def view_summary(counts: Sequence[StageCount]) -> schemas.TrackingSummary:
    """T7: return the counts by stage and by shard."""
    by_shard: dict[int, list[StageCount]] = defaultdict(list)
    for count in counts:
        if count.stage is LAST_STAGE:
            by_shard[count.shard].append(count)
    return schemas.TrackingSummary(
        total=_sum_rows(counts, FILE_STAGE),
        by_stage=schemas.StageCounts(**{stage.field: _count_by_status(counts, stage) for stage in Stage}),
        by_shard=[_count_by_shard(by_shard[number], number) for number in sorted(by_shard)],
    )


def view_event(stored: StoredEntry) -> schemas.TrackingEvent:
    """T15, T17: return one move of a shard."""
    entry = stored.entry
    filename, _, shard = entry.subject.rpartition("/")
    return schemas.TrackingEvent(
        filename=filename,
        shard=int(shard),
        stage=STAGES_BY_MACHINE[entry.machine],
        source=StageStatus(entry.source) if entry.source else None,
        target=StageStatus(entry.target),
        actor=entry.actor,
        at=entry.at,
        reason=entry.reason,
        fence=entry.fence,
    )


def make_event_filter(
    stage: Stage | None, filename: str | None
) -> Callable[[StoredEntry], schemas.TrackingEvent | None]:
    """T17: return a function that converts the moves of *stage* and *filename*, and returns None for other moves."""

    def convert(stored: StoredEntry) -> schemas.TrackingEvent | None:
        is_stage = stage is None or STAGES_BY_MACHINE[stored.entry.machine] is stage
        is_file = filename in (None, stored.entry.subject.rpartition("/")[0])
        return view_event(stored) if is_stage and is_file else None

    return convert


def _sum_rows(
    counts: Sequence[StageCount], stage: Stage, status: StageStatus | None = None, *, ready: bool = False
) -> int:
    matching = (count for count in counts if count.stage is stage and status in (None, count.status))
    return sum(count.rows for count in matching if count.is_ready or not ready)


def _count_by_status(counts: Sequence[StageCount], stage: Stage) -> schemas.StatusCounts:
    return schemas.StatusCounts(**{status.value: _sum_rows(counts, stage, status) for status in StageStatus})


def _count_by_shard(counts: Sequence[StageCount], shard: int) -> schemas.ShardCounts:
    done, failed = _sum_rows(counts, LAST_STAGE, StageStatus.DONE), _sum_rows(counts, LAST_STAGE, StageStatus.FAILED)
    return schemas.ShardCounts(shard=shard, total=_sum_rows(counts, LAST_STAGE), done=done, failed=failed)
