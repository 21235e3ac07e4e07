"""The periodic tasks of refdata: lost updates, incomplete snapshots, retention, drift, and metrics of the backlog."""

from collections.abc import Iterable, Sequence
from datetime import timedelta

import asyncpg
import structlog

from penstock.kernel.bus import Bus
from penstock.kernel.db.database import Database, enable_all_plans
from penstock.kernel.tasks.periodic import PeriodicTask
from penstock.refdata import store
from penstock.refdata.apply import snapshots
from penstock.refdata.apply.relay import OUTBOX
from penstock.refdata.commands.messages import build_give_up_message
from penstock.refdata.commands.service import Refdata
from penstock.refdata.dictionaries import retained_versions
from penstock.refdata.dictionaries.catalogue import Dictionary
from penstock.refdata.metrics import RefdataMetrics
from penstock.refdata.model import DictionaryKey
from penstock.refdata.sql_template import SqlTemplate, parse

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
_LOOKED_FOR_AT_ONCE = 100  # a second: those who merely wait behind a backlog must not feed it much
_LOOK_AGAIN = timedelta(minutes=10)


class DriftWatch:
    """Remembers what each `driftCheckSql` said at which version, as long as the process lives."""

    def __init__(self, db: Database, metrics: RefdataMetrics) -> None:
        self._db = db
        self._metrics = metrics
        self._last: dict[DictionaryKey, tuple[int, object]] = {}

    async def look(self, dictionaries: Iterable[Dictionary]) -> int:
        """Ask every `driftCheckSql`; how many dictionaries changed without a new version."""
        found = 0
        for dictionary in dictionaries:
            if dictionary.section.drift_check_sql and dictionary.section.enabled:
                check = parse(dictionary.section.drift_check_sql, ["tenantId"])
                async with self._db.connection() as connection:
                    targets = await store.list_targets(connection, dictionary.section.code)
                for target in targets:
                    found += await self._has_drifted(target, check)
        return found

    async def _has_drifted(self, target: DictionaryKey, check: SqlTemplate) -> bool:
        log = structlog.get_logger().bind(tenantId=target.tenant_id, dictCode=target.dict_code)
        try:
            async with self._db.transaction("repeatable_read") as tx:
                await enable_all_plans(tx)
                version = await store.read_committed_version(tx, target)
                value = await tx.fetchval(check.sql, target.tenant_id)
        except asyncpg.PostgresError as error:
            log.warning("drift_check_failed", error=str(error))
            return False
        before, self._last[target] = self._last.get(target), (version, value)
        has_drifted = before is not None and before[0] == version and before[1] != value
        if has_drifted:
            self._metrics.count_drift(target.dict_code)
            log.warning("drift_found", version=version, was=str(before and before[1]), now=str(value))
        return has_drifted


def make_lag_task(bus: Bus, topic: str, metrics: RefdataMetrics) -> tuple[str, PeriodicTask, timedelta]:
    """R26: show how far behind the workers on *topic* are."""

    async def show_lag() -> None:
        metrics.show_lag(topic, await bus.backlog(topic))

    return f"lag of {topic}", show_lag, 5 * SECOND


class RefdataMaintenance:
    """The chores of one database; any number of processes may do them at once."""

    def __init__(self, db: Database, bus: Bus, refdata: Refdata, metrics: RefdataMetrics, actor: str) -> None:
        section = refdata.section
        self._catalogue = refdata.catalogue
        self._drift = DriftWatch(db, metrics)
        self._db = db
        self._bus = bus
        self._section = section
        self._metrics = metrics
        self._actor = actor

    def list_periodic_tasks(self) -> Sequence[tuple[str, PeriodicTask, timedelta]]:
        return [
            ("refdata sweeper", self.sweep, SECOND),
            ("refdata snapshots", self.expire, SECOND),
            ("refdata retention", self.prune, MINUTE),
            ("refdata metrics", self.show, 5 * SECOND),
            ("refdata drift", self.look_for_drift, MINUTE / 2),
        ]

    async def sweep(self) -> int:
        """R8: end updates whose command never reached the bus; how many are looked for.

        Nobody can tell from outside whether a command is still on the bus. So a message is sent after it: whoever
        applies that one has seen the command before, if it is there at all.
        """
        now, topic = self._db.clock.now(), self._section.kafka.commands_topic
        async with self._db.transaction() as tx:
            late = await store.claim_late_updates(
                tx,
                created_before=now - self._section.give_up_after,
                looked_before=now - _LOOK_AGAIN,
                now=now,
                limit=_LOOKED_FOR_AT_ONCE,
            )
            # Within the transaction: with the bus down they are looked for again, not in ten minutes.
            await self._bus.publish([build_give_up_message(topic, target, event_id) for target, event_id in late])
        return len(late)

    async def expire(self) -> int:
        """R13: let incomplete snapshots fail."""
        return await snapshots.expire(self._db, self._section.snapshots.expire_after, self._actor)

    async def prune(self) -> int:
        """R14: forget what is older than it has to be remembered; how many rows."""
        kept, now = self._section.retention, self._db.clock.now()
        ages = {"processed": kept.processed_events, "tombstones": kept.tombstones}
        ages |= {"updates": kept.updates, "sets": kept.updates}
        total = 0
        for what, age in ages.items():
            while pruned := await self._prune(what, age):
                total += pruned
        while pruned := await OUTBOX.prune(self._db, now - kept.history):
            total += pruned
        while pruned := await self._prune_kept():
            total += pruned
        return total

    async def _prune_kept(self) -> int:
        async with self._db.transaction() as tx:
            await enable_all_plans(tx)
            return await retained_versions.prune_retained(tx, self._catalogue.all())

    async def _prune(self, what: str, age: timedelta) -> int:
        async with self._db.transaction() as tx:
            await enable_all_plans(tx)
            return await store.prune(tx, what, self._db.clock.now() - age)

    async def look_for_drift(self) -> int:
        """R5: tell of changes that came not through us."""
        return await self._drift.look(self._catalogue.all())

    async def show(self) -> None:
        """Set the gauges."""
        async with self._db.connection() as connection:
            since = await store.find_oldest_pending(connection)
        age = (self._db.clock.now() - since).total_seconds() if since else 0.0
        waiting = await OUTBOX.count_unpublished(self._db)
        self._metrics.show(pending=age, outbox=waiting)
