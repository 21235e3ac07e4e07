"""What becomes of a run that was killed or cut off."""

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
    ("step", "ended"),
    [
        (PublishStep.STARTED, "FAIL"),
        (PublishStep.SWITCHING, "FAIL"),
        (PublishStep.SWITCHED, "PASS"),
        (PublishStep.MOVED, "PASS"),
    ],
)
async def test_a_run_that_was_killed_is_ended_by_the_next(
    harness: IngestHarness, place: IngestWorkspace, views: IngestViews, step: PublishStep, ended: str
) -> None:
    """I16: FAIL INTERRUPTED before the switch, PASS after it; until then it is seen as running."""
    harness.drop(ONE)
    with pytest.raises(Killed):
        run(place, call_at(step))
    (known,) = (await views.runs(None, None, store.START, 10)).items
    assert (known.status, known.manifest) == (IngestRunState.RUNNING, None)
    run(place)
    row, _, history = await views.run(known.run_id)
    assert (row.status.value, row.failure_code) == (ended, "INTERRUPTED" if ended == "FAIL" else None)
    assert row.manifest == harness.read_json(paths.run(known.run_id, paths.MANIFEST))
    assert [one.entry.target for one in history] == ["RUNNING", ended]
    assert (harness.current() == known.run_id) == (ended == "PASS")
    assert harness.names(paths.inbox(SUPPLIER)) == []
