"""Random steps of several workers through the pipeline, against a plain model."""

import asyncio
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from prometheus_client import CollectorRegistry

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.errors import Conflict, NotFound
from penstock.tracking import store
from penstock.tracking.config import TrackingSection
from penstock.tracking.contract import Stage, StageReportAnswer, StageReportKind, StageStatus
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.model import QUEUES, FailureFilter, RowKey, RowReport, StageCount
from penstock.tracking.service import Tracking
from tests.support.soak import Campaign, model_examples

R = TypeVar("R")
LEASE = timedelta(seconds=60)
MAX_ATTEMPTS = 3
FILES = st.sampled_from(["20250101000000", "20250101000001", "zz"])
SHARDS = st.integers(0, 2)
WORKERS = st.sampled_from(["ann", "bob", "cy"])
MOVES = {
    "start": ((StageStatus.NEW,), StageStatus.STARTED),
    "done": ((StageStatus.STARTED,), StageStatus.DONE),
    "fail": ((StageStatus.NEW, StageStatus.STARTED), StageStatus.FAILED),
    "retry": ((StageStatus.FAILED,), StageStatus.NEW),
}


@dataclass
class PipelineModelRow:
    """The expected state of a row."""

    status: dict[Stage, StageStatus] = field(default_factory=lambda: dict.fromkeys(Stage, StageStatus.NEW))
    attempts: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    created: float = 0
    due: float = 0
    number: int = 0
    fence: int = 0
    worker: str | None = None
    expires: float | None = None
    updated: float = 0
    moves: list[tuple[Stage, StageStatus | None, StageStatus]] = field(default_factory=list)

    def go(self, stage: Stage, now: float, *path: StageStatus) -> None:
        for target in path:
            self.moves.append((stage, self.status[stage], target))
            self.status[stage] = target
        self.updated = now

    def is_ready(self, stage: Stage) -> bool:
        before = stage.before
        return self.status[stage] is StageStatus.NEW and (before is None or self.status[before] is StageStatus.DONE)


class PipelineLifecycle(RuleBasedStateMachine):
    """The pipeline and a plain model of it, driven by random steps."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.start_of_time = self.clock.now()
        self.opened = Database.open(self.url, clock=self.clock, size=2)
        self.db = self.run(self.opened.__aenter__())
        self.run(self.db.execute("TRUNCATE pipeline_tracking RESTART IDENTITY; TRUNCATE journal, pipeline_pause"))
        section = TrackingSection(lease=LEASE, max_attempts=MAX_ATTEMPTS)
        notifier = Notifier(self.db, store.CHANNEL)
        self.tracking = Tracking(self.db, notifier, section, TrackingMetrics(CollectorRegistry()))
        self.rows: dict[tuple[str, int], PipelineModelRow] = {}
        self.paused: set[Stage] = set()
        self.handed_out: list[tuple[Stage, tuple[str, int], int]] = []

    def run(self, work: Awaitable[R]) -> R:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.run(self.opened.__aexit__(None, None, None))
        self.loop.close()

    @property
    def now(self) -> float:
        return (self.clock.now() - self.start_of_time).total_seconds()

    def file(self, filename: str) -> list[PipelineModelRow]:
        return [row for (name, _), row in sorted(self.rows.items()) if name == filename]

    @rule(filename=FILES, shards=st.sets(SHARDS, min_size=1), worker=st.none() | WORKERS)
    def register(self, filename: str, shards: set[int], worker: str | None) -> None:
        known = self.file(filename)
        state = known[0].status[Stage.EVENT_INGEST] if known else StageStatus.STARTED
        new = sorted(shard for shard in shards if (filename, shard) not in self.rows)
        work = self.tracking.register(filename, sorted(shards), worker=worker, actor="producer")
        if new and state is StageStatus.DONE:
            with pytest.raises(Conflict, match="complete"):
                self.run(work)
            return
        assert self.run(work) is bool(new)
        for shard in new:
            producer = known[0].worker if known else worker
            row = PipelineModelRow(
                created=self.now, due=self.now, number=len(self.rows), worker=producer, updated=self.now
            )
            row.status[Stage.EVENT_INGEST] = state
            row.attempts[Stage.EVENT_INGEST] = int(state is StageStatus.STARTED)
            row.moves.append((Stage.EVENT_INGEST, None, state))
            self.rows[filename, shard] = row

    @rule(filename=FILES, name=st.sampled_from(list(MOVES)), worker=st.none() | WORKERS)
    def move_file(self, filename: str, name: str, worker: str | None) -> None:
        self.take_step(Stage.EVENT_INGEST, name, filename, None, worker)

    @rule(
        filename=FILES,
        shard=SHARDS,
        stage=st.sampled_from(QUEUES),
        name=st.sampled_from(list(MOVES)),
        worker=st.none() | WORKERS,
    )
    def move_row(self, filename: str, shard: int, stage: Stage, name: str, worker: str | None) -> None:
        self.take_step(stage, name, filename, shard, worker)

    def take_step(self, stage: Stage, name: str, filename: str, shard: int | None, worker: str | None) -> None:
        rows = self.file(filename) if shard is None else list(filter(None, [self.rows.get((filename, shard))]))
        work = self.tracking.move(stage, name, filename, shard, worker=worker, actor=worker or "operator")
        if not rows:
            with pytest.raises(NotFound):
                self.run(work)
            return
        may = [self.may_move(row, stage, name, worker) for row in rows]
        if not all(allowed or self.has_moved(row, stage, name, worker) for row, allowed in zip(rows, may, strict=True)):
            with pytest.raises(Conflict) as refused:
                self.run(work)
            assert refused.value.details["current"] in {row.status[stage] for row in rows}
            return
        assert self.run(work) == len(rows)
        for row, allowed in zip(rows, may, strict=True):
            if allowed:
                self.step(row, stage, name, worker)

    def may_move(self, row: PipelineModelRow, stage: Stage, name: str, worker: str | None) -> bool:
        sources, _ = MOVES[name]
        if row.status[stage] not in sources:
            return False
        if name == "start":
            return row.is_ready(stage) and stage not in self.paused
        is_claimed = name in ("done", "fail") and row.status[stage] is StageStatus.STARTED
        return not (is_claimed and worker and row.worker and worker != row.worker)

    def has_moved(self, row: PipelineModelRow, stage: Stage, name: str, worker: str | None) -> bool:
        is_target = row.status[stage] is MOVES[name][1]
        return is_target and (name != "start" or (worker is not None and worker == row.worker))

    def step(self, row: PipelineModelRow, stage: Stage, name: str, worker: str | None) -> None:
        if row.status[stage] is StageStatus.STARTED:
            row.expires = None
        row.go(stage, self.now, MOVES[name][1])
        row.due = min(row.due, self.now)
        if name == "start":
            row.fence, row.worker, row.attempts[stage] = row.fence + 1, worker, row.attempts[stage] + 1
        if name == "retry":
            row.attempts[stage] = 0

    @rule(stage=st.sampled_from(QUEUES), worker=WORKERS, limit=st.integers(1, 5))
    def claim(self, stage: Stage, worker: str, limit: int) -> None:
        claimed = self.run(self.tracking.claim(stage, worker, limit=limit))
        due = [key for key, row in self.rows.items() if row.is_ready(stage) and row.due <= self.now]
        expected = [] if stage in self.paused else sorted(due, key=lambda k: (self.rows[k].due, self.rows[k].number))
        assert [row[:2] for row in claimed] == expected[:limit]
        for item in claimed:
            row = self.rows[item.filename, item.shard]
            row.go(stage, self.now, StageStatus.STARTED)
            row.fence, row.worker, row.attempts[stage] = row.fence + 1, worker, row.attempts[stage] + 1
            row.expires = self.now + LEASE.total_seconds()
            assert (item.fence, item.attempt) == (row.fence, row.attempts[stage])
            self.handed_out.append((stage, (item.filename, item.shard), item.fence))

    @precondition(lambda self: self.handed_out)
    @rule(data=st.data(), outcome=st.sampled_from(StageReportKind), wait=st.integers(0, 90))
    def report(self, data: st.DataObject, outcome: StageReportKind, wait: int) -> None:
        stage, key, fence = data.draw(st.sampled_from(self.handed_out))
        report = RowReport(*key, fence, outcome, "busy", timedelta(seconds=wait))
        (result,) = self.run(self.tracking.report(stage, [report]))
        row = self.rows[key]
        if row.fence != fence:
            assert result.answer is StageReportAnswer.SUPERSEDED
        elif row.status[stage] is StageStatus.STARTED:
            assert result.answer is StageReportAnswer.SETTLED
            self.end(row, stage, outcome, wait)
        else:
            wanted = (
                StageStatus.DONE
                if outcome is StageReportKind.DONE
                else StageStatus.FAILED
                if outcome is StageReportKind.FAILED
                else StageStatus.NEW
            )
            if outcome is StageReportKind.RETRY and row.attempts[stage] >= MAX_ATTEMPTS:
                wanted = StageStatus.FAILED
            assert (result.answer is StageReportAnswer.UNCHANGED) == (row.status[stage] is wanted)
        assert result.status is row.status[stage]

    def end(self, row: PipelineModelRow, stage: Stage, outcome: StageReportKind, wait: int) -> None:
        row.expires = None
        if outcome in (StageReportKind.DONE, StageReportKind.FAILED):
            row.go(stage, self.now, StageStatus.DONE if outcome is StageReportKind.DONE else StageStatus.FAILED)
            row.due = min(row.due, self.now)
        elif outcome is StageReportKind.RETRY and row.attempts[stage] >= MAX_ATTEMPTS:
            row.go(stage, self.now, StageStatus.FAILED)
            row.due = min(row.due, self.now)
        else:
            row.go(stage, self.now, StageStatus.FAILED, StageStatus.NEW)
            row.attempts[stage] -= outcome is StageReportKind.RELEASE
            row.due = self.now + wait

    @precondition(lambda self: self.handed_out)
    @rule(data=st.data(), by_worker=st.booleans())
    def heartbeat(self, data: st.DataObject, by_worker: bool) -> None:
        stage, key, fence = data.draw(st.sampled_from(self.handed_out))
        worker = data.draw(WORKERS)
        keys = None if by_worker else [RowKey(*key, fence)]
        _, extended, lost = self.run(self.tracking.heartbeat(stage, worker, keys))
        mine = {
            (name, row.fence)
            for name, row in self.rows.items()
            if row.status[stage] is StageStatus.STARTED
            and (row.worker == worker and row.expires is not None if by_worker else (name, row.fence) == (key, fence))
        }
        assert {((key.filename, key.shard), key.fence) for key in extended} == mine
        assert len(lost) == (0 if by_worker or mine else 1)
        for name, _ in mine:
            if self.rows[name].expires is not None:
                self.rows[name].expires = self.now + LEASE.total_seconds()

    @rule(seconds=st.integers(1, 100))
    def pass_time(self, seconds: int) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    @rule()
    def reap(self) -> None:
        late = [row for row in self.rows.values() if row.expires is not None and row.expires < self.now]
        assert self.run(self.tracking.reap()) == len(late)
        for row in late:
            (stage,) = [stage for stage in QUEUES if row.status[stage] is StageStatus.STARTED]
            exhausted = row.attempts[stage] >= MAX_ATTEMPTS
            row.go(stage, self.now, StageStatus.FAILED, *([] if exhausted else [StageStatus.NEW]))
            row.fence, row.expires, row.due = row.fence + 1, None, self.now

    @rule(stage=st.sampled_from(Stage), resume=st.booleans())
    def pause_or_resume(self, stage: Stage, resume: bool) -> None:
        if resume:
            self.run(self.tracking.resume(stage))
            self.paused.discard(stage)
        else:
            self.run(self.tracking.pause(stage, actor="operator", reason=None))
            self.paused.add(stage)

    @rule(stage=st.sampled_from(QUEUES), filename=FILES, shards=st.none() | st.sets(SHARDS, min_size=1))
    def retry_failed(self, stage: Stage, filename: str, shards: set[int] | None) -> None:
        chosen = FailureFilter(filename[:10], None if shards is None else sorted(shards))
        failed = [
            row
            for (name, shard), row in self.rows.items()
            if row.status[stage] is StageStatus.FAILED
            and name.startswith(filename[:10])
            and (shards is None or shard in shards)
        ]
        assert self.run(self.tracking.retry_failed(stage, chosen, limit=100, actor="operator")) == len(failed)
        for row in failed:
            row.go(stage, self.now, StageStatus.NEW)
            row.attempts[stage], row.due = 0, min(row.due, self.now)

    @rule()
    def fold(self) -> None:
        self.run(self.tracking.fold_counts())

    @invariant()
    def table_equals_model(self) -> None:
        """Check that no row is lost or doubled, and that statuses and times match the model."""
        records = self.run(self.db.fetch("SELECT * FROM pipeline_tracking"))
        found = {(record["filename"], record["shard"]): record for record in records}
        assert found.keys() == self.rows.keys()
        for key, row in self.rows.items():
            record = found[key]
            assert {stage: record[f"{stage.field}_status"] for stage in Stage} == row.status
            assert {stage: record[f"{stage.field}_attempts"] for stage in Stage} == row.attempts
            assert (record["fence"], record["worker"]) == (row.fence, row.worker)
            assert (record["updated_at"] - self.start_of_time).total_seconds() == row.updated

    @invariant()
    def counts_equal_a_full_count(self) -> None:
        """T7: check that the counters equal a full count of the rows."""
        expected: Counter[tuple[Stage, StageStatus, bool, int]] = Counter()
        for (_, shard), row in self.rows.items():
            for stage in Stage:
                number = shard if stage is Stage.MYSQL_SENDER else -1
                expected[stage, row.status[stage], row.is_ready(stage), number] += 1
        counts: list[StageCount] = self.run(self.tracking.count_rows())
        counted = {(count.stage, count.status, count.is_ready, count.shard): count.rows for count in counts}
        assert counted == dict(expected)

    @invariant()
    def history_equals_model(self) -> None:
        """T15: check that every move is in the history, in order, including returns through failed."""
        for filename in {name for name, _ in self.rows}:
            stored = self.run(self.tracking.list_moves(filename)).items
            for (name, shard), row in self.rows.items():
                if name == filename:
                    entries = [move.entry for move in stored if move.entry.subject == f"{name}/{shard}"]
                    moves = [(entry.machine.removeprefix("tracking."), entry.source, entry.target) for entry in entries]
                    assert moves == row.moves


@pytest.mark.soak
async def test_pipeline_behaves_like_the_model(database_url: str, campaign: Campaign) -> None:
    """T1, T4, T7, T8, T12, T13, T14, T15, T19: after any steps of workers table, counts and history equal a model."""
    campaign.rounds = model_examples(25, soak=1000)
    machine = type("Run", (PipelineLifecycle,), {"url": database_url})
    await asyncio.to_thread(
        run_state_machine_as_test,
        machine,
        settings=settings(max_examples=campaign.rounds, stateful_step_count=40, deadline=None),
    )
