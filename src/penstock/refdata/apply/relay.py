"""R15: the relay, which announces the commits of the outbox to the pods."""

import asyncio
from collections.abc import Sequence
from time import time_ns

import asyncpg
import msgspec
import structlog

from penstock.kernel.db.database import Database
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.db.outbox import Outbox
from penstock.kernel.errors import Transient
from penstock.kernel.signals import Signals
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.wait import wait_event
from penstock.kernel.telemetry.telemetry import TRACEPARENT, Telemetry
from penstock.refdata.commands.commit_waiter import COMMITS

OUTBOX = Outbox("outbox_event")
_POLL = 0.5  # seconds: in case a notification is lost


class OutboxRelay:
    """R15: announces commits to the pods in the order of versions, at least once."""

    def __init__(self, db: Database, signals: Signals, notifier: Notifier, telemetry: Telemetry) -> None:
        self._db = db
        self._telemetry = telemetry
        self._signals = signals
        self._notifier = notifier

    async def run(self, stopping: asyncio.Event) -> None:
        """Announce commits until *stopping*; retry with growing delays while signals or database are down."""
        backoff = Backoff()
        while not stopping.is_set():
            notified = self._notifier.get_next_event(COMMITS)
            try:
                count = await self.step()
                backoff.reset()
                if count:
                    continue
                await wait_event(stopping if self._notifier.is_closed else notified, _POLL)
            except Transient as error:
                structlog.get_logger().warning("relay_failed", code=error.code, error=error.message)
                await wait_event(stopping, backoff.compute_next().total_seconds())
            except Exception:  # noqa: BLE001 - the edge of the loop: the relay survives a defect
                structlog.get_logger().exception("relay_crashed")
                await wait_event(stopping, backoff.compute_next().total_seconds())

    async def step(self) -> int:
        """Announce waiting commits, and return their number."""
        return await OUTBOX.relay(self._db, self._announce)

    async def _announce(self, rows: Sequence[asyncpg.Record]) -> None:
        started = time_ns()
        await self._signals.announce([row["payload"] for row in rows])
        for row in rows:
            if TRACEPARENT in row["payload"]:
                payload = msgspec.json.decode(row["payload"])
                fields = {name: payload[name] for name in ("tenantId", "dictCode", "eventId", "version")}
                # R26: the last stage of a traced command.
                self._telemetry.trace("refdata.announce", payload.get(TRACEPARENT), started, **fields)
