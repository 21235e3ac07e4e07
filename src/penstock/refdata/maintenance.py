"""The periodic tasks of refdata: lost commands, incomplete snapshots, retention, drift, and metrics of the backlog."""

import hashlib
from collections.abc import Iterable, Sequence
from datetime import timedelta

import asyncpg
import structlog

from penstock.kernel.bus import Bus
from penstock.kernel.db.database import Connection, Database, enable_all_plans
from penstock.kernel.tasks.periodic import PeriodicTask
from penstock.refdata import store
from penstock.refdata.apply import snapshots
from penstock.refdata.apply.relay import OUTBOX
from penstock.refdata.commands.messages import build_give_up_message
from penstock.refdata.commands.service import Refdata
from penstock.refdata.config import DictionarySection
from penstock.refdata.dictionaries import retained_versions
from penstock.refdata.dictionaries.catalogue import Dictionary
from penstock.refdata.metrics import RefdataMetrics
from penstock.refdata.model import DictionaryKey, DriftCheck, compare_drift
from penstock.refdata.sql_template import SqlTemplate, parse

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
_PROBE_BATCH = 100  # a second: updates that only wait in a backlog must not add much to it
_PROBE_AGAIN = timedelta(minutes=10)


class DriftWatch:
    """R5: compares the value of each `driftCheckSql` with the stored one, in any number of processes."""

    def __init__(self, db: Database, metrics: RefdataMetrics) -> None:
        self._db = db
        self._metrics = metrics

    async def check_all(self, dictionaries: Iterable[Dictionary]) -> int:
        """Run every `driftCheckSql`, and return the number of values that changed without a new version."""
        drifts = 0
        for section in (dictionary.section for dictionary in dictionaries):
            if section.drift_check_sql and section.enabled:
                statement = parse(section.drift_check_sql, ["tenantId"])
                async with self._db.connection() as connection:
                    targets = await store.list_targets(connection, section.code)
                for target in targets:
                    drifts += await self._has_drifted(target, section, statement)
        return drifts

    async def _has_drifted(self, target: DictionaryKey, section: DictionarySection, statement: SqlTemplate) -> bool:
        log = structlog.get_logger().bind(tenantId=target.tenant_id, dictCode=target.dict_code)
        try:
            async with self._db.transaction("repeatable_read") as tx:
                last, check = await self._check(tx, target, section, statement)
        except asyncpg.PostgresError as error:
            log.warning("drift_check_failed", error=str(error))
            return False
        if check == last:
            return False
        async with self._db.connection() as connection:
            is_stored = await store.store_drift_check(connection, target, last, check)
        if not is_stored or last is None:
            return False
        if check.drifts > last.drifts:
            self._metrics.count_drift(target.dict_code)
            log.warning("drift_found", version=check.version, previous=last.value, current=check.value)
        elif check.drifts < last.drifts:
            log.info("drift_resolved", version=check.version)
        return check.drifts > last.drifts

    async def _check(
        self, tx: Connection, target: DictionaryKey, section: DictionarySection, statement: SqlTemplate
    ) -> tuple[DriftCheck | None, DriftCheck]:
        """Return the last check of *target* and the current one, read in one snapshot."""
        await enable_all_plans(tx)
        last = await store.read_drift_check(tx, target)
        version = await store.read_committed_version(tx, target)
        value = await tx.fetchval(statement.sql, target.tenant_id)
        is_reloaded = section.reload_on_event == "FULL"
        if last is not None and last.drifts and last.version != version and not is_reloaded:
            commits = await store.list_commits(tx, target, last.version + 1, limit=store.PRUNE_BATCH)
            is_reloaded = any(commit.keys is None for commit in commits)
        check_hash = hashlib.sha256(statement.sql.encode()).hexdigest()
        check = DriftCheck(check_hash, version, None if value is None else str(value))
        return last, compare_drift(last, check, is_reloaded=is_reloaded, now=self._db.clock.now())


def make_lag_task(bus: Bus, topic: str, metrics: RefdataMetrics) -> tuple[str, PeriodicTask, timedelta]:
    """R26: return the periodic task that updates the lag of *topic*."""

    async def update_lag() -> None:
        metrics.set_lag(topic, await bus.count_backlog(topic))

    return f"lag of {topic}", update_lag, 5 * SECOND


class RefdataMaintenance:
    """The periodic tasks of one database; several processes may run them concurrently."""

    def __init__(self, db: Database, bus: Bus, refdata: Refdata, metrics: RefdataMetrics, actor: str) -> None:
        self._catalogue = refdata.catalogue
        self._drift = DriftWatch(db, metrics)
        self._db = db
        self._bus = bus
        self._section = refdata.section
        self._metrics = metrics
        self._actor = actor

    def list_periodic_tasks(self) -> Sequence[tuple[str, PeriodicTask, timedelta]]:
        """Return name, task and interval of each periodic task."""
        return [
            ("refdata sweeper", self.probe_updates, SECOND),
            ("refdata snapshots", self.expire_snapshots, SECOND),
            ("refdata retention", self.prune, MINUTE),
            ("refdata metrics", self.update_metrics, 5 * SECOND),
            ("refdata drift", self.check_drift, MINUTE / 2),
        ]

    async def probe_updates(self) -> int:
        """R8: send probes for old pending updates, and return their number.

        A message on the bus cannot be searched for. A probe is ordered after the command that it asks for: the applier
        that receives it fails the update, unless it has processed the command before.
        """
        now, topic = self._db.clock.now(), self._section.kafka.commands_topic
        async with self._db.transaction() as tx:
            late = await store.claim_late_updates(
                tx,
                created_before=now - self._section.give_up_after,
                probed_before=now - _PROBE_AGAIN,
                now=now,
                limit=_PROBE_BATCH,
            )
            # Publish within the transaction: if the bus is down, the next probe does not wait for ten minutes.
            await self._bus.publish([build_give_up_message(topic, target, event_id) for target, event_id in late])
        return len(late)

    async def expire_snapshots(self) -> int:
        """R13: fail incomplete snapshots without new chunks, and return their number."""
        return await snapshots.expire_snapshots(self._db, self._section.snapshots.expire_after, self._actor)

    async def prune(self) -> int:
        """R14: delete rows after their retention time, and return their number."""
        retention, now = self._section.retention, self._db.clock.now()
        ages = {"processed": retention.processed_events, "tombstones": retention.tombstones}
        ages |= {"updates": retention.updates, "sets": retention.updates}
        total = 0
        for kind, age in ages.items():
            while pruned := await self._prune(kind, age):
                total += pruned
        while pruned := await OUTBOX.prune(self._db, now - retention.history):
            total += pruned
        while pruned := await self._prune_retained():
            total += pruned
        return total

    async def _prune_retained(self) -> int:
        async with self._db.transaction() as tx:
            await enable_all_plans(tx)
            return await retained_versions.prune_retained(tx, self._catalogue.list_all())

    async def _prune(self, kind: str, age: timedelta) -> int:
        async with self._db.transaction() as tx:
            await enable_all_plans(tx)
            return await store.prune(tx, kind, self._db.clock.now() - age)

    async def check_drift(self) -> int:
        """R5: find changes of tables without a new version, and return their number."""
        return await self._drift.check_all(self._catalogue.list_all())

    async def update_metrics(self) -> None:
        """Set the gauges of the backlog."""
        async with self._db.connection() as connection:
            created_at = await store.find_oldest_pending(connection)
        age = (self._db.clock.now() - created_at).total_seconds() if created_at else 0.0
        self._metrics.set_backlog(pending_seconds=age, outbox=await OUTBOX.count_unpublished(self._db))
