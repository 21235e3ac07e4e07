"""F13: SQL queries of steps, in read-only transactions."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from penstock.flows.step import Query
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Invalid, TooLarge

_TIMEOUT = "60s"


def make_query(db: Database) -> Query:
    """Return a function that queries *db* in a read-only transaction, with a limit of rows."""

    async def query(sql: str, params: Sequence[Any], limit: int) -> Sequence[Mapping[str, Any]]:
        statement = re.sub(r";\s*\Z", "", sql)
        try:
            # A separate session, because its end resets all settings and locks of the statement.
            async with db.session() as tx, tx.transaction():
                await tx.execute(f"SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = '{_TIMEOUT}'")
                # Only a query is valid as a subquery: no COPY, no SET, no second statement.
                rows = await tx.fetch(f"SELECT * FROM (\n{statement}\n) AS result LIMIT {limit + 1}", *params)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            raise Invalid("SQL_FAILED", f"the SQL statement failed: {str(error).splitlines()[0][:300]}") from error
        if len(rows) > limit:
            hint = "add a condition or a LIMIT to the statement"
            raise TooLarge("SQL_TOO_MANY_ROWS", f"the SQL statement returns more than {limit} rows", hint=hint)
        return [dict(row) for row in rows]

    return query
