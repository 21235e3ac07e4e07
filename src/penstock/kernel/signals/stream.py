"""The stream of a listener: the items of its inbox as signals."""

from asyncio import Task
from collections.abc import AsyncIterator, Sequence

from penstock.kernel.db.listener import MissedNotifications, Notification, NotificationInbox
from penstock.kernel.signals import Resync, Signal


class SignalStream(AsyncIterator[Signal | Resync]):
    """The items of an inbox, each once and in order, also after a cancelled wait.

    *sources* are the tasks that fill the inbox, and never end without an error. If one fails, the reader receives a
    Resync and then the error.
    """

    def __init__(self, inbox: NotificationInbox, sources: Sequence["Task[None]"] = ()) -> None:
        self._inbox = inbox
        self._sources = sources
        for source in sources:
            source.add_done_callback(lambda _ended: inbox.put(MissedNotifications("the listener failed")))

    async def __anext__(self) -> Signal | Resync:
        for source in self._sources:
            if source.done() and not source.cancelled():
                source.result()
        item = await self._inbox.get()
        return Signal(item.payload) if isinstance(item, Notification) else Resync(item.reason)
