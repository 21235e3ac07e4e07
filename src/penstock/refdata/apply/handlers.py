"""R10, R11, R15: what the roles of refdata do: turn foreign messages into commands, apply them, tell of it."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from time import time_ns
from typing import Any

import asyncpg
import msgspec
import structlog

from penstock.kernel.bus import Delivery
from penstock.kernel.db.database import Database
from penstock.kernel.db.notifier import Bell
from penstock.kernel.db.outbox import Outbox
from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.signals import Signals
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.outcome import Done, Failed, Outcome, Retry
from penstock.kernel.tasks.wait import happens
from penstock.kernel.telemetry.telemetry import TRACEPARENT, Telemetry
from penstock.kernel.work.worker import Handler
from penstock.refdata.apply.applier import Applier, TooSlow
from penstock.refdata.commands.commit_waiter import SOMETHING
from penstock.refdata.commands.external_topics import Mapped
from penstock.refdata.commands.messages import Read, read
from penstock.refdata.commands.service import Refdata
from penstock.refdata.metrics import RefdataMetrics
from penstock.refdata.model import Event, Verdict

OUTBOX = Outbox("outbox_event")
_LARGE = 100_000  # bytes of a message
_POLL = 0.5  # seconds: the net under a notification that was not heard


def apply_handler(applier: Applier, metrics: RefdataMetrics, telemetry: Telemetry) -> Handler[Delivery]:
    """R11: the handler of the commands' topic."""

    async def handle(deliveries: Sequence[Delivery], stopping: asyncio.Event) -> Sequence[Outcome | None]:
        began = time_ns()
        reads = [await _read(delivery) for delivery in deliveries]
        verdicts: list[Verdict] = []
        stopped_by: list[Outcome | None] = [None]
        try:
            async with aclosing(applier.settle([one for one in reads if one.event is not None])) as settled:
                for one in reads:
                    if stopping.is_set():
                        break
                    verdicts.append(Verdict(refusal=one.refusal) if one.event is None else await anext(settled))
        except TooSlow as error:
            stopped_by = [Retry("its statement was given up", counts=error.counts), None]
        except Transient as error:
            stopped_by = [Retry(f"{error.code}: {error.message}", counts=False)]
        except Exception as error:  # noqa: BLE001 - the edge: what is wrong with us is not the command's fault
            structlog.get_logger().exception("apply_crashed")
            stopped_by = [Retry(f"{type(error).__name__}: {error}", counts=False)]
        metrics.count(verdicts)
        for one, verdict in zip(reads, verdicts, strict=False):
            _trace(telemetry, one, verdict, began)
        outcomes = [_outcome(one, verdict) for one, verdict in zip(reads, verdicts, strict=False)]
        rest = len(reads) - len(outcomes)
        return [*outcomes, *stopped_by[:rest], *[stopped_by[-1]] * (rest - len(stopped_by))]

    return handle


async def _read(delivery: Delivery) -> Read:
    if len(delivery.message.value) > _LARGE:
        await asyncio.sleep(0)  # let others have their turn
    return read(delivery)


def _trace(telemetry: Telemetry, read: Read, verdict: Verdict, began: int) -> None:
    """R26: the stage of a traced command that ends here."""
    if read.event is None or read.event.trace is None or verdict.is_repeated:
        return
    event, refusal = read.event, verdict.refusal
    telemetry.trace(
        "refdata.apply",
        event.trace,
        began,
        error=None if refusal is None else f"{refusal.code}: {refusal.message}",
        tenantId=event.target.tenant_id,
        dictCode=event.target.dict_code,
        eventId=str(event.event_id),
        version=verdict.version,
        source=event.source,
    )


def _outcome(read: Read, verdict: Verdict) -> Outcome:
    if verdict.refusal is None or read.is_looking:
        return Done()
    return Failed(f"{verdict.refusal.code}: {verdict.refusal.message}")


def adapter_handler(refdata: Refdata, mapped: Mapped) -> Handler[Delivery]:
    """R10: the handler of somebody else's topic."""

    async def handle(deliveries: Sequence[Delivery], _stopping: asyncio.Event) -> Sequence[Outcome | None]:
        events: list[Event] = []
        outcomes: list[Outcome | None] = []
        for delivery in deliveries:
            try:
                events.append(mapped.event(delivery))
                outcomes.append(Done())
            except PenstockError as error:
                outcomes.append(Failed(f"{error.code}: {error.message}"))
        try:
            await refdata.submit_all(events)
        except Transient as error:
            return [Retry(f"{error.code}: {error.message}", counts=False)] * len(deliveries)
        except Exception as error:  # noqa: BLE001 - the edge: one message must not hold up its partition for ever
            structlog.get_logger().exception("adapter_crashed")
            return [Retry(f"{type(error).__name__}: {error}")] * len(deliveries)
        return outcomes

    return handle


class Relay:
    """R15: tells the pods what was committed, in the order of versions, at least once."""

    def __init__(self, db: Database, signals: Signals, bell: Bell, telemetry: Telemetry) -> None:
        self._db = db
        self._telemetry = telemetry
        self._signals = signals
        self._bell = bell

    async def run(self, stopping: asyncio.Event) -> None:
        """Announce until *stopping*; a carrier that is down is tried again, later and later."""
        backoff = Backoff()
        while not stopping.is_set():
            rung = self._bell.next(SOMETHING)
            try:
                count = await self.step()
                backoff.reset()
                if count:
                    continue
                await happens(stopping if self._bell.is_closed else rung, _POLL)
            except Transient as error:
                structlog.get_logger().warning("relay_failed", code=error.code, error=error.message)
                await happens(stopping, backoff.next().total_seconds())
            except Exception:  # noqa: BLE001 - the edge of the loop: the relay outlives a mistake
                structlog.get_logger().exception("relay_crashed")
                await happens(stopping, backoff.next().total_seconds())

    async def step(self) -> int:
        """Announce what waits; how many."""
        return await OUTBOX.relay(self._db, self._announce)

    async def _announce(self, rows: Sequence[asyncpg.Record]) -> None:
        began = time_ns()
        await self._signals.announce([row["payload"] for row in rows])
        for row in rows:
            if TRACEPARENT in row["payload"]:
                self._trace(msgspec.json.decode(row["payload"]), began)

    def _trace(self, told: dict[str, Any], began: int) -> None:
        """R26: the stage of a traced command that ends here."""
        about = {name: told[name] for name in ("tenantId", "dictCode", "eventId", "version")}
        self._telemetry.trace("refdata.announce", told.get(TRACEPARENT), began, **about)
