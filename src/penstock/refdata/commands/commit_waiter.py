"""R6: waits for the results of updates, with one query for all waiting writers after each commit."""

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

COMMITS = ""  # the only topic of the notifier: a notification does not name the dictionary
_POLL = 0.25  # seconds: in case a notification is lost


class CommitWaiter:
    """The writers of this process that wait for the result of an update."""

    def __init__(self, db: Database, notifier: Notifier) -> None:
        self._db = db
        self._notifier = notifier
        self._waiting: dict[EventKey, list[asyncio.Future[UpdateRecord]]] = {}
        self._has_waiters = asyncio.Event()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Resolve the waiting writers until the end."""
        task = asyncio.create_task(self._resolve_updates(), name="commit waiter")
        try:
            yield
        finally:
            await cancel_and_wait(task)

    @contextmanager
    def follow(self, update: UpdateRecord) -> "Iterator[asyncio.Future[UpdateRecord]]":
        """Yield the future result of *update*. Call it before the command is published, so that no commit is missed."""
        key, result = (update.tenant_id, update.event_id), asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(result)
        self._has_waiters.set()
        try:
            yield result
        finally:
            self._remove(key, result)

    async def _resolve_updates(self) -> None:
        while True:
            await self._has_waiters.wait()
            notified = self._notifier.get_next_event(COMMITS)  # before the query, so that no notification is missed
            await self._poll()
            if self._notifier.is_closed:
                return
            if self._waiting:
                await wait_event(notified, _POLL)

    async def _poll(self) -> None:
        keys = list(self._waiting)
        if not keys:
            self._has_waiters.clear()
            return
        try:
            async with self._db.connection() as connection:
                updates = await store.find_updates(connection, keys)
        except Transient as error:  # the writers wait until their own timeouts
            structlog.get_logger().warning("commit_poll_failed", code=error.code, error=error.message)
            return
        except Exception:  # noqa: BLE001 - the edge of the task: later writers need it
            structlog.get_logger().exception("commit_poll_crashed")
            return
        for key, update in updates.items():
            if update.status is not UpdateState.PENDING:
                for future in self._waiting.get(key, []):
                    if not future.done():
                        future.set_result(update)

    def _remove(self, key: EventKey, future: "asyncio.Future[UpdateRecord]") -> None:
        waiting = self._waiting[key]
        waiting.remove(future)
        if not waiting:
            del self._waiting[key]
