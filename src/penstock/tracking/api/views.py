"""What the API shows, made of what the service knows."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from penstock.kernel.states.journal import StoredEntry
from penstock.tracking.api import schemas
from penstock.tracking.contract import Stage, StageStatus
from penstock.tracking.model import FILE_STAGE, STAGE_OF, ShardRow, StageCount, StagePause


def shard(row: ShardRow) -> schemas.ShardStatus:
    """A row of a file."""
    statuses = {f"{stage.field}_status": status for stage, status in row.status.items()}
    return schemas.ShardStatus(shard=row.shard, updated_at=row.updated_at, **statuses)


def queue(stage: Stage, counts: Sequence[StageCount], pause: StagePause | None) -> schemas.QueueView:
    """How long a queue is, and whether it is paused."""
    return schemas.QueueView(
        stage=stage,
        paused=pause is not None,
        paused_since=pause.since if pause else None,
        paused_by=pause.actor if pause else None,
        reason=pause.reason if pause else None,
        ready=_rows(counts, stage, ready=True),
        started=_rows(counts, stage, StageStatus.STARTED),
        failed=_rows(counts, stage, StageStatus.FAILED),
    )


def summary(counts: Sequence[StageCount]) -> schemas.TrackingSummary:
    """T7: the counts, by stage and by shard."""
    by_shard: dict[int, list[StageCount]] = defaultdict(list)
    for count in counts:
        if count.stage is Stage.MYSQL_SENDER:
            by_shard[count.shard].append(count)
    return schemas.TrackingSummary(
        total=_rows(counts, FILE_STAGE),
        by_stage=schemas.StageCounts(**{stage.field: _by_status(counts, stage) for stage in Stage}),
        by_shard=[_by_shard(by_shard[number], number) for number in sorted(by_shard)],
    )


def event(noted: StoredEntry) -> schemas.TrackingEvent:
    """T15, T17: a move."""
    entry = noted.entry
    filename, _, shard = entry.subject.rpartition("/")
    return schemas.TrackingEvent(
        filename=filename,
        shard=int(shard),
        stage=STAGE_OF[entry.machine],
        source=StageStatus(entry.source) if entry.source else None,
        target=StageStatus(entry.target),
        actor=entry.actor,
        at=entry.at,
        reason=entry.reason,
        fence=entry.fence,
    )


def told(stage: Stage | None, filename: str | None) -> Callable[[StoredEntry], schemas.TrackingEvent | None]:
    """T17: what watchers of a stage, or of a file, are told of a move."""

    def fitting(noted: StoredEntry) -> schemas.TrackingEvent | None:
        is_stage = stage is None or STAGE_OF[noted.entry.machine] is stage
        return event(noted) if is_stage and filename in (None, noted.entry.subject.rpartition("/")[0]) else None

    return fitting


def _rows(counts: Sequence[StageCount], stage: Stage, status: StageStatus | None = None, *, ready: bool = False) -> int:
    fitting = (count for count in counts if count.stage is stage and status in (None, count.status))
    return sum(count.rows for count in fitting if count.is_ready or not ready)


def _by_status(counts: Sequence[StageCount], stage: Stage) -> schemas.StatusCounts:
    return schemas.StatusCounts(**{status.value: _rows(counts, stage, status) for status in StageStatus})


def _by_shard(counts: Sequence[StageCount], shard: int) -> schemas.ShardCounts:
    last = Stage.MYSQL_SENDER
    done, failed = _rows(counts, last, StageStatus.DONE), _rows(counts, last, StageStatus.FAILED)
    return schemas.ShardCounts(shard=shard, total=_rows(counts, last), done=done, failed=failed)
