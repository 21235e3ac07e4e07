"""Random operations on a feed, message by message, with invariants."""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from uuid import UUID

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from penstock.harvest import contract
from penstock.harvest.consolidate import watermark
from penstock.harvest.contract import HarvestRunState
from penstock.harvest.fetch.partitions import make_consolidation, make_work_item
from penstock.harvest.model import RUN
from penstock.harvest.simulator.faults import Faults
from penstock.kernel.errors import Conflict, NotFound
from tests.harvest.stepper import FEED, HarvestStepper, harvest_stepper
from tests.services.postgres import fresh_database
from tests.support.soak import Campaign, examples, model_examples

T = TypeVar("T")
RECORDS = 150
DOWN = Faults(rate_500=1.0)
SHORT = Faults(rate_short=0.4)


class HarvestLifecycle(RuleBasedStateMachine):
    """A feed whose source changes and fails, whose messages are repeated, and whose operators act at any time."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.folder = TemporaryDirectory()
        self.stones = self.run(self._open())
        self.runs: list[UUID] = []
        self.watermark: datetime | None = None
        self.is_down = False

    async def _open(self) -> HarvestStepper:
        url = await self.stack.enter_async_context(fresh_database(self.url))
        return await self.stack.enter_async_context(harvest_stepper(url, Path(self.folder.name), records=RECORDS))

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        try:
            self.stones.source.set_faults()
            self.run(self.stones.finish())
            self._retry_last_run()
            self.run(self._check_truth())
        finally:
            self.run(self.stack.aclose())
            self.loop.close()
            self.folder.cleanup()

    def _retry_last_run(self) -> None:
        if self.runs:
            with suppress(Conflict, NotFound):
                self.run(self.stones.harvest.retry(self.runs[-1], "test"))
            self.run(self.stones.finish())

    async def _check_truth(self) -> None:
        """Check that after an undisturbed full run the served records are those of the source."""
        run_id = await self.stones.harvest.start(FEED, "test", full=True)
        await self.stones.finish()
        assert (await self.stones.run(run_id))["state"] == "completed"
        canonical, truth = await self.stones.read_canonical(), self.stones.source.read_truth()
        served = {key: _served_values(row) for key, row in canonical.items()}
        assert served == {key: _expected_values(row) for key, row in truth.items()}
        assert await self.stones.db.fetchval("SELECT count(*) FROM raw_pending") == 0

    @rule(full=st.booleans())
    def start(self, full: bool) -> None:
        active = [run for run, state in self._states() if state in RUN.groups["active"]]
        planning = self.run(self.stones.db.fetchval("SELECT count(*) FROM harvest_plan WHERE state = 'planning'"))
        if active or planning:
            with pytest.raises(Conflict):
                self.run(self.stones.harvest.start(FEED, "test", full=full))
        else:
            self.runs.append(self.run(self.stones.harvest.start(FEED, "test", full=full)))

    @rule(topic=st.sampled_from([contract.PLANS, contract.CONSOLIDATIONS]))
    def decide(self, topic: str) -> None:
        self.run(self.stones.deliver(topic, limit=4))

    @rule(turns=st.integers(1, 6))
    def fetch(self, turns: int) -> None:
        for _ in range(turns):
            self.run(self.stones.deliver(contract.WORK_ITEMS))

    @rule()
    def fetch_all(self) -> None:
        self.run(self.stones.drain(contract.WORK_ITEMS))

    @rule(updates=st.integers(0, 5), inserts=st.integers(0, 3), deletes=st.integers(0, 3))
    def change(self, updates: int, inserts: int, deletes: int) -> None:
        self.stones.source.change_records(updates, inserts, deletes)

    @rule(faults=st.sampled_from([Faults(), DOWN, SHORT]))
    def set_faults(self, faults: Faults) -> None:
        self.stones.source.set_faults(faults)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), reason=st.just("a reason"))
    def act_as_operator(self, data: st.DataObject, reason: str) -> None:
        run_id = data.draw(st.sampled_from(self.runs))
        harvest = self.stones.harvest
        action = data.draw(st.sampled_from(["retry", "force", "cancel"]))
        with suppress(Conflict, NotFound):
            if action == "retry":
                self.run(harvest.retry(run_id, "test"))
            elif action == "force":
                self.run(harvest.force(run_id, "test", reason))
            else:
                self.run(harvest.cancel(run_id, "test", reason))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """Deliver messages again, late, early and of partitions that have ended."""
        run_id = data.draw(st.sampled_from(self.runs))
        number, offset = data.draw(st.integers(0, 4)), data.draw(st.sampled_from([0, 30, 60]))
        item = make_work_item(run_id, f"partition-{number}", offset, data.draw(st.integers(1, 2)), "again")
        again = data.draw(st.sampled_from([item, make_consolidation(run_id, "again")]))
        self.run(self.stones.republish(again))

    def _states(self) -> Iterator[tuple[UUID, HarvestRunState]]:
        for row in self.run(self.stones.db.fetch("SELECT run_id, state FROM run_metadata")):
            yield row["run_id"], HarvestRunState(row["state"])

    @invariant()
    def counters_are_exact(self) -> None:
        """H5: a partition is counted once."""
        query = """
            SELECT r.run_id, completed_workers, failed_workers, expected_workers, state,
                   count(*) FILTER (WHERE w.status = 'completed') AS completed,
                   count(*) FILTER (WHERE w.status = 'failed') AS failed,
                   (SELECT count(*) FROM partition_progress p WHERE p.run_id = r.run_id) AS partitions,
                   (SELECT count(*) FROM partition_progress p WHERE p.run_id = r.run_id AND p.completed) AS complete
            FROM run_metadata r LEFT JOIN worker_runs w USING (run_id) GROUP BY r.run_id"""
        for row in self.run(self.stones.db.fetch(query)):
            counted = row["completed_workers"], row["failed_workers"], row["expected_workers"]
            assert counted == (row["completed"], row["failed"], row["partitions"])
            assert row["complete"] == row["completed"]
            if row["state"] == "workers_running":
                assert row["completed"] + row["failed"] < row["partitions"]

    @invariant()
    def at_most_one_run_is_active(self) -> None:
        """H2: a feed has at most one active run."""
        query = """
            SELECT (SELECT count(*) FROM run_metadata WHERE state IN ('created', 'workers_running', 'consolidating'))
                 + (SELECT count(*) FROM harvest_plan WHERE state = 'planning')"""
        assert self.run(self.stones.db.fetchval(query)) <= 1

    @invariant()
    def watermark_only_grows(self) -> None:
        """H8, H9: the watermark moves only with a completed run, and its copy is equal."""
        row = self.run(self.stones.db.fetchrow("SELECT watermark, watermark_run, watermark_at FROM harvest_feed"))
        if row is None or row["watermark"] is None:
            return
        assert self.watermark is None or row["watermark"] >= self.watermark
        self.watermark = row["watermark"]
        run = self.run(self.stones.run(row["watermark_run"]))
        assert (run["state"], run["watermark_after"], run["completed_at"]) == (
            "completed",
            row["watermark"],
            row["watermark_at"],
        )
        stored = self.run(self.stones.storage.get(watermark.make_blob_path(FEED)))
        blob = {name: orjson.loads(stored.data)[name] for name in ("lastUpdatedAt", "lastRunId", "lastRunCompletedAt")}
        assert datetime.fromisoformat(blob["lastUpdatedAt"]) == row["watermark"]
        assert (blob["lastRunId"], datetime.fromisoformat(blob["lastRunCompletedAt"])) == (
            str(row["watermark_run"]),
            row["watermark_at"],
        )

    @invariant()
    def history_has_only_declared_moves(self) -> None:
        """H1: every move is declared, and starts in the state in which the move before it ended."""
        query = """
            SELECT subject, source, target FROM (
                SELECT id, unnest(subjects) AS subject, unnest(sources) AS source, unnest(targets) AS target
                FROM journal WHERE machine = $1
            ) AS moves ORDER BY id"""
        states: dict[str, str] = {}
        for row in self.run(self.stones.db.fetch(query, RUN.name)):
            assert states.get(row["subject"]) == row["source"]
            if row["source"] is not None:
                assert RUN.can(HarvestRunState(row["source"]), HarvestRunState(row["target"]))
            states[row["subject"]] = row["target"]
        assert states == {str(run): state.value for run, state in self._states()}


def _expected_values(record: dict[str, Any]) -> tuple[str, Decimal, Decimal | None, Decimal | None]:
    certificate = record["diamond"]["certificate"]
    cost = None if record["price"] is None else Decimal(record["price"]) / 100
    price = None if cost is None else (cost * 110 / 100).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return certificate["shape"], Decimal(str(certificate["carats"])), cost, price


def _served_values(row: Any) -> tuple[str, Decimal, Decimal | None, Decimal | None]:
    return row["fields"]["shape"], Decimal(str(row["fields"]["carat"])), row["cost"], row["price"]


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
def test_any_operations_end_with_the_truth(postgres_url: str, campaign: Campaign) -> None:
    """H4, H5, H8–H11: no record is lost or doubled by any order of operations."""
    campaign.rounds, campaign.counts_items = model_examples(12, soak=400), True

    class HarvestCase(HarvestLifecycle):
        url = postgres_url

    run_state_machine_as_test(
        HarvestCase,
        settings=settings(max_examples=campaign.rounds, stateful_step_count=25, deadline=None),
    )
