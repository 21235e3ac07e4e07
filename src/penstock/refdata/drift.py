"""R5: tells when a dictionary's tables were changed past us: a look for people, no reason to serve or not."""

from collections.abc import Iterable

import asyncpg
import structlog

from penstock.kernel.db.database import Database, plan_freely
from penstock.refdata import store
from penstock.refdata.dictionaries.catalogue import Dictionary
from penstock.refdata.metrics import RefdataMetrics
from penstock.refdata.model import Dict
from penstock.refdata.sql_template import Template, parse


class DriftWatch:
    """Remembers what each `driftCheckSql` said at which version, as long as the process lives."""

    def __init__(self, db: Database, metrics: RefdataMetrics) -> None:
        self._db = db
        self._metrics = metrics
        self._last: dict[Dict, tuple[int, object]] = {}

    async def look(self, dictionaries: Iterable[Dictionary]) -> int:
        """Ask every `driftCheckSql`; how many dictionaries changed without a new version."""
        found = 0
        for dictionary in dictionaries:
            if dictionary.section.drift_check_sql and dictionary.section.enabled:
                check = parse(dictionary.section.drift_check_sql, ["tenantId"])
                for target in await self._targets(dictionary.section.code):
                    found += await self._has_drifted(target, check)
        return found

    async def _targets(self, code: str) -> list[Dict]:
        async with self._db.connection() as connection:
            return await store.targets_of(connection, code)

    async def _has_drifted(self, target: Dict, check: Template) -> bool:
        log = structlog.get_logger().bind(tenantId=target.tenant_id, dictCode=target.dict_code)
        try:
            async with self._db.transaction("repeatable_read") as tx:
                await plan_freely(tx)
                version = await store.committed_version(tx, target)
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
