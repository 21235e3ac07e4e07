"""The deletion of old runs in the database."""

from datetime import timedelta

import pytest

from penstock.ingest.api.queries import IngestViews
from penstock.ingest.contract import IngestRunState
from penstock.ingest.maintenance import delete_old_runs
from penstock.ingest.run import store
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.workspace import IngestWorkspace
from penstock.kernel.db.database import Database
from penstock.settings import Settings
from tests.ingest.harness import SUPPLIER, IngestHarness, run, snapshot
from tests.support.crash import Killed, call_at

ONE, TWO, THREE = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3))
BROKEN = snapshot({"A": "none"})


async def test_old_runs_are_deleted(
    harness: IngestHarness, workspace: IngestWorkspace, views: IngestViews, db: Database, configured: Settings
) -> None:
    """I12: runs and moves that are older than their retention are deleted in batches; an active run stays."""
    ids = []
    for content in (ONE, TWO, THREE):
        harness.drop(content)
        manifest = run(workspace).manifest
        assert manifest is not None
        ids.append(manifest.run_id)
    harness.drop(BROKEN)
    with pytest.raises(Killed):
        run(workspace, call_at(PublishStep.STARTED))
    await db.execute("UPDATE ingest_run SET started_at = started_at - interval '40 days' WHERE run_id <> $1", ids[2])
    await db.execute("UPDATE ingest_move SET moved_at = moved_at - interval '40 days' WHERE run_id <> $1", ids[2])
    async with db.transaction() as tx:
        assert await store.prune(tx, db.clock.now() - timedelta(days=41), 100) == 0
        assert await store.prune(tx, db.clock.now() - timedelta(days=39), 1) == 2
    await delete_old_runs(configured.ingest, db)
    runs = (await views.list_runs(None, None, store.START, 10)).items
    assert {(run.run_id in ids, run.status) for run in runs} == {
        (True, IngestRunState.PASS),
        (False, IngestRunState.RUNNING),
    }
    assert [move.run_id for move in await views.list_moves(SUPPLIER, 10)] == [ids[2]]
