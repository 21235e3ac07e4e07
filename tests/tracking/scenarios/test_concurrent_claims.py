"""Many claimers at once: nothing is handed out twice, and what a dead one held comes back."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from multiprocessing.connection import Connection
from typing import Any

from penstock.kernel.db.database import Database
from penstock.tracking.contract import StageReportAnswer, StageReportKind
from penstock.tracking.model import RowReport
from tests.support.fork_server import FORKED
from tests.tracking.scenarios.claimer_process import STAGE, Taken, claim_and_hang, claim_and_report, open_tracking

CLAIMERS = 16
ROWS = 5_000
HELD = 100


class Claimer(AbstractContextManager["Claimer"]):
    """A process that claims, and what it tells."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._ours, theirs = FORKED.Pipe(duplex=False)
        self._process = FORKED.Process(target=target, args=(*args, theirs))
        self._process.start()
        theirs.close()

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    async def taken(self) -> list[Taken]:
        pipe: Connection = self._ours
        told: list[Taken] = await asyncio.to_thread(pipe.recv)
        return told


async def fill(db: Database, rows: int) -> None:
    """Rows that wait for the splitter, two shards a file."""
    await db.execute(
        "INSERT INTO pipeline_tracking (filename, shard, event_ingest_status)"
        " SELECT 'f' || n / 2, n % 2, 'done' FROM generate_series(0, $1::int - 1) AS n",
        rows,
    )


async def drained_by_many(url: str) -> list[Taken]:
    with ExitStack() as stack:
        claimers = [stack.enter_context(Claimer(claim_and_report, url, f"w{n}")) for n in range(CLAIMERS)]
        return [one for told in await asyncio.gather(*(claimer.taken() for claimer in claimers)) for one in told]


async def test_sixteen_claimers_and_one_that_dies(db: Database, database_url: str) -> None:
    """T12, T13, T14: of 5,000 rows none is handed out twice; a killed claimer's rows come back, its report is late."""
    await fill(db, ROWS)
    with Claimer(claim_and_hang, database_url, "doomed", HELD) as doomed:
        lost = await doomed.taken()
    taken = await drained_by_many(database_url)
    assert len(lost) == HELD
    assert len(set(taken)) == len(taken) == ROWS - HELD, "a row was handed out twice"
    assert not {key[:2] for key in taken} & {key[:2] for key in lost}

    assert await open_tracking(db).reap() == HELD
    again = await drained_by_many(database_url)
    assert {key[:2] for key in again} == {key[:2] for key in lost}
    assert len(again) == HELD
    late = await open_tracking(db).report(STAGE, [RowReport(*key, StageReportKind.FAILED) for key in lost])
    assert {result.answer for result in late} == {StageReportAnswer.SUPERSEDED}
    counts = {
        (count.stage, count.status): count.rows for count in await open_tracking(db).counts() if count.stage is STAGE
    }
    assert counts == {(STAGE, "done"): ROWS}
