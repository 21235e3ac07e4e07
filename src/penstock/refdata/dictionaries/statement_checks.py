"""The check of the SQL of all dictionaries against the database, for the status report."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import NamedTuple

from penstock.kernel.db.database import Connection, Database
from penstock.kernel.errors import Invalid
from penstock.refdata import sql_template, store
from penstock.refdata.dictionaries.catalogue import Dictionary, DictionaryCatalogue
from penstock.refdata.dictionaries.reader import check_statement

VALID_FOR = timedelta(seconds=10)
_TIMEOUT = 3.0  # seconds for all dictionaries; those that are not reached are not reported


class BrokenStatement(NamedTuple):
    """A dictionary whose SQL fails; *subject* is TENANT/CODE if it fails for a tenant, otherwise CODE."""

    subject: str
    error: str


class StatementChecks:
    """Checks the SQL of all dictionaries, at most once in VALID_FOR."""

    def __init__(self, db: Database, catalogue: DictionaryCatalogue) -> None:
        self._db = db
        self._catalogue = catalogue
        self._checked_at: datetime | None = None
        self._broken: Sequence[BrokenStatement] = ()

    async def find_broken(self) -> Sequence[BrokenStatement]:
        """Return the dictionaries whose SQL fails in this database. No row of them is read."""
        now = self._db.clock.now()
        if self._checked_at is None or now - self._checked_at > VALID_FOR:
            self._broken, self._checked_at = await self._check_all(), now
        return self._broken

    async def _check_all(self) -> list[BrokenStatement]:
        broken: list[BrokenStatement] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT), self._db.connection() as connection:
                for dictionary in self._catalogue.list_all():
                    if dictionary.section.enabled:
                        broken += await _check(connection, dictionary)
        return broken


async def _check(connection: Connection, dictionary: Dictionary) -> list[BrokenStatement]:
    section, subject = dictionary.section, dictionary.section.code
    try:
        await dictionary.provider.check_statements(connection)
        if section.drift_check_sql:
            statement = sql_template.parse(section.drift_check_sql, ["tenantId"]).sql
            await check_statement(connection, "driftCheckSql", statement)
        for target in (await store.list_targets(connection, section.code))[:1]:
            subject = f"{target.tenant_id}/{section.code}"
            await dictionary.provider.try_load(connection, target)
    except Invalid as error:
        return [BrokenStatement(subject, error.message)]
    return []
