"""H5: a partition ends once; the transaction that ends the last one decides what becomes of the run."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from penstock.harvest import store
from penstock.harvest.alerts import Code, Severity, raise_alert
from penstock.harvest.contract import (
    WORK_DONE,
    PartitionState,
    RunState,
    WorkDone,
)
from penstock.harvest.fetch import partitions
from penstock.harvest.fetch.messages import consolidation
from penstock.harvest.fetch.partitions import Counters, Ended
from penstock.kernel.bus import Bus, Message
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Corrupt


async def end_partitions(
    tx: Connection, bus: Bus, feed: str, run_id: UUID, trace_id: str, ended: Sequence[Ended], by: str, now: datetime
) -> None:
    """Count partitions, already marked as ended, and tell of them; the last of a run triggers consolidation."""
    await partitions.note_partitions(tx, run_id, ended, PartitionState.RUNNING, by, now)
    counters = await partitions.count_ended(tx, run_id, ended, now)
    if counters is None:
        raise Corrupt("RUN_NOT_FETCHING", f"a partition of run {run_id} ended after the run did")
    await bus.publish([_done(one, feed, run_id, trace_id, now) for one in ended], tx=tx)
    if counters.is_all:
        await _end_fetching(tx, bus, feed, run_id, trace_id, counters, by, now)


async def _end_fetching(
    tx: Connection, bus: Bus, feed: str, run_id: UUID, trace_id: str, counters: Counters, by: str, now: datetime
) -> None:
    if counters.failed == 0:
        await store.move_run(tx, run_id, RunState.WORKERS_RUNNING, "trigger", by, now)
        await bus.publish([consolidation(run_id, trace_id)], tx=tx)
        return
    reason = f"{counters.failed} of {counters.expected} partitions failed"
    await store.move_run(tx, run_id, RunState.WORKERS_RUNNING, "skip", by, now, reason)
    message = f"Run {run_id} of {feed}: {reason}. Consolidation skipped, watermark NOT advanced."
    await raise_alert(tx, feed, run_id, Code.CONSOLIDATION_SKIPPED, Severity.ERROR, message, now)


def _done(one: Ended, feed: str, run_id: UUID, trace_id: str, now: datetime) -> Message:
    done = WorkDone(run_id, feed, one.partition_id, one.status, one.records, now, trace_id, one.error)
    return Message(WORK_DONE, str(run_id), msgspec.json.encode(done))
