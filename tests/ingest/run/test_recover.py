"""The recovery of a run that was killed."""

import pytest

from penstock.ingest.api.queries import IngestViews
from penstock.ingest.contract import IngestRunState
from penstock.ingest.run import store
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.tree import paths
from penstock.ingest.workspace import IngestWorkspace
from tests.ingest.harness import SUPPLIER, IngestHarness, run, snapshot
from tests.support.crash import Killed, call_at

ONE, TWO, THREE = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3))


@pytest.mark.parametrize(
    ("step", "status"),
    [
        (PublishStep.STARTED, "FAIL"),
        (PublishStep.SWITCHING, "FAIL"),
        (PublishStep.SWITCHED, "PASS"),
        (PublishStep.MOVED, "PASS"),
    ],
)
async def test_killed_run_is_ended_by_the_next_run(
    harness: IngestHarness, workspace: IngestWorkspace, views: IngestViews, step: PublishStep, status: str
) -> None:
    """I16: a killed run ends with FAIL INTERRUPTED before the switch, with PASS after it; until then it is RUNNING."""
    harness.drop(ONE)
    with pytest.raises(Killed):
        run(workspace, call_at(step))
    (running,) = (await views.list_runs(None, None, store.START, 10)).items
    assert (running.status, running.manifest) == (IngestRunState.RUNNING, None)
    run(workspace)
    row, _, history = await views.read_run(running.run_id)
    assert (row.status.value, row.failure_code) == (status, "INTERRUPTED" if status == "FAIL" else None)
    assert row.manifest == harness.read_json(paths.make_run_path(running.run_id, paths.MANIFEST))
    assert [stored.entry.target for stored in history] == ["RUNNING", status]
    assert (harness.current() == running.run_id) == (status == "PASS")
    assert harness.names(paths.make_inbox_path(SUPPLIER)) == []
