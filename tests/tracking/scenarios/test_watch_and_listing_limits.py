"""Watching and listing have their limits."""

import pytest

from penstock.kernel.errors import Transient
from penstock.kernel.states import event_stream
from penstock.tracking.service import Tracking


async def test_one_watcher_too_many_is_told_so(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    """T17: streams are bounded; who comes too many may ask again when another has left."""
    monkeypatch.setattr(event_stream, "WATCHERS", 1)
    async with tracking.live.reserve_slot():
        with pytest.raises(Transient) as refused:
            async with tracking.live.reserve_slot():
                pass
        assert refused.value.code == "TOO_MANY_WATCHERS"
    async with tracking.live.reserve_slot():
        pass
