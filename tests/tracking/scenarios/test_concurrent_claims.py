"""Many concurrent claimers: no row is claimed twice, and the rows of a killed process return to the queue."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from multiprocessing.connection import Connection
from typing import Any

from penstock.kernel.db.database import Database
from penstock.tracking.contract import StageReportAnswer, StageReportKind
from penstock.tracking.model import RowReport
from tests.support.fork_server import FORKED
from tests.tracking.scenarios.claimer_process import STAGE, ClaimedKey, claim_and_hang, claim_and_report, open_tracking

CLAIMERS = 16
ROWS = 5_000
CLAIMED = 100


class Claimer(AbstractContextManager["Claimer"]):
    """A process that claims rows, and sends the test what it claimed."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._ours, theirs = FORKED.Pipe(duplex=False)
        self._process = FORKED.Process(target=target, args=(*args, theirs))
        self._process.start()
        theirs.close()

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    async def receive(self) -> list[ClaimedKey]:
        """Return the keys that the process has claimed."""
        pipe: Connection = self._ours
        claimed: list[ClaimedKey] = await asyncio.to_thread(pipe.recv)
        return claimed


async def fill(db: Database, rows: int) -> None:
    """Insert rows that wait for the splitter, two shards per file."""
    await db.execute(
        "INSERT INTO pipeline_tracking (filename, shard, event_ingest_status)"
        " SELECT 'f' || n / 2, n % 2, 'done' FROM generate_series(0, $1::int - 1) AS n",
        rows,
    )


async def drain_with_many_processes(url: str) -> list[ClaimedKey]:
    """Let many processes claim and finish all rows; return the claimed keys."""
    with ExitStack() as stack:
        claimers = [stack.enter_context(Claimer(claim_and_report, url, f"w{n}")) for n in range(CLAIMERS)]
        batches = await asyncio.gather(*(claimer.receive() for claimer in claimers))
        return [key for batch in batches for key in batch]


async def test_sixteen_claimers_and_a_killed_one(db: Database, database_url: str) -> None:
    """T12, T13, T14: of 5,000 rows none is claimed twice; those of a killed claimer return, and its report is late."""
    await fill(db, ROWS)
    with Claimer(claim_and_hang, database_url, "doomed", CLAIMED) as doomed:
        lost = await doomed.receive()
    claimed = await drain_with_many_processes(database_url)
    assert len(lost) == CLAIMED
    assert len(set(claimed)) == len(claimed) == ROWS - CLAIMED, "a row was claimed twice"
    assert not {key[:2] for key in claimed} & {key[:2] for key in lost}

    assert await open_tracking(db).reap() == CLAIMED
    again = await drain_with_many_processes(database_url)
    assert {key[:2] for key in again} == {key[:2] for key in lost}
    assert len(again) == CLAIMED
    late = await open_tracking(db).report(STAGE, [RowReport(*key, StageReportKind.FAILED) for key in lost])
    assert {result.answer for result in late} == {StageReportAnswer.SUPERSEDED}
    counts = {
        (count.stage, count.status): count.rows
        for count in await open_tracking(db).count_rows()
        if count.stage is STAGE
    }
    assert counts == {(STAGE, "done"): ROWS}
