"""Watching and listing have their limits."""

import pytest

from penstock.kernel.db.database import Database
from penstock.kernel.errors import Transient
from penstock.kernel.states import event_stream
from penstock.tracking import store
from penstock.tracking.service import Tracking
from tests.support.http import problem
from tests.tracking.harness import TrackingHarness


async def test_one_watcher_too_many_is_told_so(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    """T17: streams are bounded; who comes too many may ask again when another has left."""
    monkeypatch.setattr(event_stream, "WATCHERS", 1)
    async with tracking.live.watching():
        with pytest.raises(Transient) as refused:
            async with tracking.live.watching():
                pass
        assert refused.value.code == "TOO_MANY_WATCHERS"
    async with tracking.live.watching():
        pass


async def test_a_listing_that_takes_too_long_is_given_up(
    api: TrackingHarness, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6: a listing must not keep a connection from the queues: it ends with a 503, and the next one works."""
    quick = "SET LOCAL statement_timeout = '50ms'"
    with monkeypatch.context() as impatient:
        impatient.setitem(store._ANY, "be_quick", quick)
        async with db.transaction() as tx:
            await tx.execute("LOCK TABLE pipeline_tracking IN ACCESS EXCLUSIVE MODE")
            problem(await api.http.get("/files"), 503, "DATABASE_BUSY")
    assert await api.get("/files") == {"files": [], "next": None}
