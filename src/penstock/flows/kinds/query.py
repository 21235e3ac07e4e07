"""F13: statements of steps, in transactions that cannot write."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from penstock.flows.step import Query
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Invalid, TooLarge

_TIMEOUT = "60s"


def read_only(db: Database) -> Query:
    """Ask *db* in a transaction that cannot write, for at most so many rows."""

    async def query(sql: str, params: Sequence[Any], limit: int) -> Sequence[Mapping[str, Any]]:
        statement = re.sub(r";\s*\Z", "", sql)
        try:
            # A session of its own, which forgets at its end what the statement set or locked.
            async with db.session() as tx, tx.transaction():
                await tx.execute(f"SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = '{_TIMEOUT}'")
                # Inside another SELECT only what gives rows can stand: no COPY, no SET, no second statement.
                rows = await tx.fetch(f"SELECT * FROM (\n{statement}\n) AS given LIMIT {limit + 1}", *params)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            raise Invalid("SQL_FAILED", f"the statement failed: {str(error).splitlines()[0][:300]}") from error
        if len(rows) > limit:
            raise TooLarge("SQL_TOO_MANY_ROWS", f"the statement gives more than {limit} rows")
        return [dict(row) for row in rows]

    return query
