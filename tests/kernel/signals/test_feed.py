"""A source of signals and its reader."""

import asyncio

import pytest

from penstock.kernel.db.listener import NotificationInbox
from penstock.kernel.signals.feed import SignalStream
from tests.kernel.signals.feed_reader import resynced


async def test_a_listener_that_breaks_says_so() -> None:
    """R22: should a source of signals end by a fault of ours, its reader is not left waiting for ever."""

    async def broken() -> None:
        raise LookupError("a fault")

    feed = SignalStream(NotificationInbox(), [asyncio.create_task(broken())])
    await resynced(feed)
    with pytest.raises(LookupError):
        await anext(feed)
