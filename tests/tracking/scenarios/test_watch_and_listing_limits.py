"""Limits of event streams."""

import pytest

from penstock.kernel.errors import Transient
from penstock.kernel.states import event_stream
from penstock.tracking.service import Tracking


async def test_too_many_watchers_are_refused(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    """T17: the number of streams is limited; a refused client can connect when another one has left."""
    monkeypatch.setattr(event_stream, "STREAM_LIMIT", 1)
    async with tracking.live.reserve_slot():
        with pytest.raises(Transient) as refused:
            async with tracking.live.reserve_slot():
                pass
        assert refused.value.code == "TOO_MANY_STREAMS"
    async with tracking.live.reserve_slot():
        pass
