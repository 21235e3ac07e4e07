"""R6: waits for updates to end: one question to the database for all who wait, whenever something was applied."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog

from penstock.kernel.db.database import Database
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.errors import Transient
from penstock.kernel.tasks.wait import cancel_and_wait, wait_event
from penstock.refdata import store
from penstock.refdata.contract import UpdateState
from penstock.refdata.model import UpdateRecord
from penstock.refdata.store import EventKey

COMMITS = ""  # the one topic of the bell: a commit does not say whose it was
_LOOK_AGAIN = 0.25  # seconds: the net under a notification that was not heard


class CommitWaiter:
    """Those who wait for the end of an update, in this process."""

    def __init__(self, db: Database, notifier: Notifier) -> None:
        self._db = db
        self._notifier = notifier
        self._waiting: dict[EventKey, list[asyncio.Future[UpdateRecord]]] = {}
        self._somebody = asyncio.Event()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow(), name="follow updates")
        try:
            yield
        finally:
            await cancel_and_wait(task)

    @contextmanager
    def follow(self, update: UpdateRecord) -> "Iterator[asyncio.Future[UpdateRecord]]":
        """The end of *update*. Asked for before its command is published: so no commit is too quick to be heard."""
        key, end = (update.tenant_id, update.event_id), asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(end)
        self._somebody.set()
        try:
            yield end
        finally:
            self._forget(key, end)

    async def _follow(self) -> None:
        while True:
            await self._somebody.wait()
            notified = self._notifier.next_event(COMMITS)  # before the look, so that no ring falls between
            await self._look()
            if self._notifier.is_closed:
                return
            if self._waiting:
                await wait_event(notified, _LOOK_AGAIN)

    async def _look(self) -> None:
        keys = list(self._waiting)
        if not keys:
            self._somebody.clear()
            return
        try:
            async with self._db.connection() as connection:
                known = await store.find_updates(connection, keys)
        except Transient as error:  # they wait no longer than they wanted to
            structlog.get_logger().warning("follow_failed", code=error.code, error=error.message)
            return
        except Exception:  # noqa: BLE001 - the edge of the task: those who come later must not wait in vain
            structlog.get_logger().exception("follow_crashed")
            return
        for key, update in known.items():
            if update.status is not UpdateState.PENDING:
                for future in self._waiting.get(key, []):
                    if not future.done():
                        future.set_result(update)

    def _forget(self, key: EventKey, future: "asyncio.Future[UpdateRecord]") -> None:
        waiting = self._waiting[key]
        waiting.remove(future)
        if not waiting:
            del self._waiting[key]
