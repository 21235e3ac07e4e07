"""Killed runs and lost states."""

from datetime import timedelta

import pytest

from penstock.ingest.run.hooks import RunHooks
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.tree import paths as layout
from tests.ingest.harness import SUPPLIER, IngestHarness, snapshot
from tests.support.crash import Killed, call_at

ONE, TWO, THREE, BROKEN = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3, "none"))
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def run_killed(harness: IngestHarness, content: bytes, step: PublishStep) -> str:
    """Kill a run at *step*, and return its id."""
    before = set(harness.tree.list_runs(SUPPLIER))
    with pytest.raises(Killed):
        harness.run(content, hooks=RunHooks(on_step=call_at(step)))
    (run_id,) = set(harness.tree.list_runs(SUPPLIER)) - before
    return run_id


def lose_state(harness: IngestHarness) -> None:
    """Let the link point to a state that does not exist, as after an incomplete restore."""
    link = harness.root / layout.CURRENT / SUPPLIER
    link.unlink()
    link.symlink_to(f"../../state_store/{SUPPLIER}/{SUPPLIER}_20200101T000000Z_000000")
