"""What a listener reads: the items of its inbox, in the words of the port."""

from asyncio import Task
from collections.abc import AsyncIterator, Sequence

from penstock.kernel.db.listener import MissedNotifications, Notification, NotificationInbox
from penstock.kernel.signals import Resync, Signal


class SignalStream(AsyncIterator[Signal | Resync]):
    """Gives each item once and in order; whoever stops waiting loses none.

    *sources* are the tasks that fill the inbox: they never end by themselves, and should one break, the reader is told
    to resync and then given its error.
    """

    def __init__(self, inbox: NotificationInbox, sources: Sequence["Task[None]"] = ()) -> None:
        self._inbox = inbox
        self._sources = sources
        for source in sources:
            source.add_done_callback(lambda _ended: inbox.put(MissedNotifications("the listener broke")))

    async def __anext__(self) -> Signal | Resync:
        for source in self._sources:
            if source.done() and not source.cancelled():
                source.result()
        item = await self._inbox.get()
        return Signal(item.payload) if isinstance(item, Notification) else Resync(item.reason)
