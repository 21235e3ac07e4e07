"""The stream of a listener."""

import asyncio

import pytest

from penstock.kernel.db.listener import NotificationInbox
from penstock.kernel.signals.stream import SignalStream
from tests.kernel.signals.feed_reader import read_until_resync


async def test_a_failed_source_is_raised_in_the_reader() -> None:
    """R22: a reader does not wait forever if a source of signals fails because of a bug."""

    async def fail() -> None:
        raise LookupError("a fault")

    feed = SignalStream(NotificationInbox(), [asyncio.create_task(fail())])
    await read_until_resync(feed)
    with pytest.raises(LookupError):
        await anext(feed)
