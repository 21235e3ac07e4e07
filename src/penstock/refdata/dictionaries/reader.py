"""R2, R20: reads of a dictionary: all items, changed items or single items, always with their version."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import asyncpg

from penstock.kernel.db.database import Connection, Database, enable_all_plans, is_transient
from penstock.kernel.errors import Corrupt, Invalid, Transient
from penstock.refdata import sql_template, store
from penstock.refdata.model import CommitEntry, DictionaryKey, VersionStamp

READ_BATCH = 5_000
MAX_STEPS = 2_000  # with more commits, all items are loaded
_ONE_ROW = "change loadSql to return one row per key"
Rows = list[tuple[str, str]]


class LoadedVersion(NamedTuple):
    """All items of a dictionary, key to payload as JSON text, and their version."""

    version: int
    items: Mapping[str, str]


class DictionarySnapshot:
    """A consistent view of a dictionary: all reads have the version *mark*."""

    def __init__(
        self, tx: Connection, target: DictionaryKey, source: "DictionaryReader | _PinnedDictionary", mark: VersionStamp
    ) -> None:
        self.target = target
        self.mark = mark
        self._tx = tx
        self._source = source

    async def read_all(self) -> AsyncGenerator[Rows, None]:
        """Yield all items in batches; Corrupt if a key or a value is null."""
        await enable_all_plans(self._tx)
        with _load_sql_errors(self.target):
            cursor = await self._tx.cursor(self._source.rows, self.target.tenant_id)
            while rows := await cursor.fetch(READ_BATCH):
                yield _check_rows(self.target, rows)

    async def read_keys(self, keys: Sequence[str]) -> Rows | None:
        """Return the existing items of *keys*; None if a key cannot be converted to the type of the table's keys."""
        with _load_sql_errors(self.target):
            query = f"{self._source.rows} WHERE k = ANY ($2::text[]{await self._source.read_key_cast(self._tx)})"
            try:
                async with self._tx.transaction():
                    return _check_rows(self.target, await self._tx.fetch(query, self.target.tenant_id, keys))
            except asyncpg.DataError:
                return None

    async def read_existing(self, keys: Sequence[str]) -> Rows:
        """Return the existing items of *keys*, also if some keys cannot be converted to the type of the table's."""
        rows = await self.read_keys(keys)
        if rows is not None:
            return rows
        return [row for key in keys for row in await self.read_keys([key]) or ()]

    async def list_steps(self, mark: VersionStamp) -> list[CommitEntry] | None:
        """Return the commits after *mark* up to this version; None if some are unknown or belong to another history."""
        if mark == self.mark:
            return []
        steps = await store.list_commits(self._tx, self.target, mark.version, limit=MAX_STEPS + 1)
        versions = [step.mark.version for step in steps]
        is_whole = bool(steps) and versions == list(range(mark.version, self.mark.version + 1))
        return steps[1:] if is_whole and steps[0].mark == mark and steps[-1].mark == self.mark else None

    async def list_commits(self, version: int) -> list[CommitEntry]:
        """Return the commits after *version* up to this one; if they are many, only the last."""
        first = max(version, self.mark.version - MAX_STEPS) + 1
        return await store.list_commits(self._tx, self.target, first, limit=MAX_STEPS)

    async def shares_history(self, mark: VersionStamp) -> bool:
        """R24: return whether *mark* belongs to the same history as this version, as far as the history goes back."""
        if mark.is_pinned or self.mark.is_pinned:
            return True
        if mark.version >= self.mark.version:
            return mark == self.mark
        first = await store.list_commits(self._tx, self.target, mark.version, limit=1)
        return not first or first[0].mark.version != mark.version or first[0].mark == mark


class DictionaryReader:
    """The reading half of all providers."""

    has_exact_keys = False

    def __init__(self, load_sql: str) -> None:
        load = sql_template.parse(load_sql, ["tenantId"])
        self.load_hash = hashlib.sha256(load_sql.encode()).hexdigest()
        self.rows = f"SELECT k::text AS k, v::text AS v FROM (\n{load.sql}\n) AS loaded"
        self._keys = f"SELECT k FROM (\n{load.sql}\n) AS loaded LIMIT 0"
        self._key_cast: str | None = None

    async def check_statements(self, connection: Connection) -> None:
        await check_statement(connection, "loadSql", self.rows)

    async def try_load(self, connection: Connection, target: DictionaryKey) -> None:
        """Raise Invalid unless PostgreSQL starts to execute loadSql; no row is read."""
        with _translate_sql_errors("loadSql"):
            await connection.fetch(f"SELECT FROM ({self.rows}) AS loaded LIMIT 0", target.tenant_id)

    @asynccontextmanager
    async def open_snapshot(self, db: Database, target: DictionaryKey) -> AsyncIterator[DictionarySnapshot]:
        while True:
            async with db.transaction("repeatable_read") as tx:
                if (mark := await self._mark(tx, target)) is not None:
                    yield DictionarySnapshot(
                        tx, target, _PinnedDictionary(target.dict_code, mark) if mark.is_pinned else self, mark
                    )
                    return
            async with db.connection() as connection:
                # A dictionary without writes has a version too: it grows when loadSql changes.
                await store.create_dictionaries(connection, [target], now=db.clock.now())

    async def load_all(self, db: Database, target: DictionaryKey) -> LoadedVersion:
        items: dict[str, str] = {}
        count = 0
        async with self.open_snapshot(db, target) as snapshot:
            async for rows in snapshot.read_all():
                items.update(rows)
                count += len(rows)
        if len(items) < count:
            raise make_duplicate_key_error(target)
        return LoadedVersion(snapshot.mark.version, items)

    async def get_committed_version(self, db: Database, target: DictionaryKey) -> int:
        async with db.connection() as connection:
            return await store.read_committed_version(connection, target)

    async def count_items(self, tx: Connection, target: DictionaryKey) -> int:
        """Return the number of items."""
        return int(await tx.fetchval(f"SELECT count(*) FROM ({self.rows}) AS counted", target.tenant_id))

    async def retain(self, tx: Connection, target: DictionaryKey, version: int) -> int:
        """R30: store all items as those of *version*, and return their number."""
        statement = f"""
            INSERT INTO retained_item (tenant_id, dict_code, version, item_key, payload)
            SELECT $1, $2, $3, k, v::jsonb FROM ({self.rows}) AS items
            ON CONFLICT DO NOTHING"""
        return int((await tx.execute(statement, *target, version)).rpartition(" ")[2])

    async def read_key_cast(self, tx: Connection) -> str:
        """Return the cast of text keys to the type of the table's keys, so that its index is used."""
        if self._key_cast is None:
            kind = (await tx.prepare(self._keys)).get_attributes()[0].type
            self._key_cast = f'::"{kind.schema}"."{kind.name}"[]' if kind.kind == "scalar" else ""
        return self._key_cast

    async def _mark(self, tx: Connection, target: DictionaryKey) -> VersionStamp | None:
        stored = await store.read_stamp(tx, target)
        if stored is None:
            return None
        mark, load_hash = stored
        if load_hash not in (None, self.load_hash) and not mark.is_pinned:
            # The items that this loadSql returns may differ from those that other processes have under this version.
            hint = "another process has a changed configuration; update the configuration file of this process too"
            raise Transient("LOAD_SQL_CHANGED", f"loadSql of {target.dict_code} was changed", hint=hint)
        return mark


class _PinnedDictionary:
    """R30: the items of a pinned version."""

    def __init__(self, code: str, mark: VersionStamp) -> None:
        # A code contains no quote, see contract.NAME.
        self.rows = (
            "SELECT k, v FROM (SELECT item_key AS k, payload::text AS v FROM retained_item "
            f"WHERE tenant_id = $1 AND dict_code = '{code}' AND version = {mark.version}) AS pinned"
        )

    async def read_key_cast(self, tx: Connection) -> str:  # noqa: ARG002 - the keys are text
        return ""


def make_duplicate_key_error(target: DictionaryKey) -> Corrupt:
    message = f"loadSql of {target.dict_code} returns a key more than once"
    return Corrupt("LOAD_SQL_DUPLICATE_KEY", message, hint=_ONE_ROW)


async def check_statement(connection: Connection, name: str, statement: str) -> None:
    """Raise Invalid unless PostgreSQL accepts *statement*."""
    with _translate_sql_errors(name):
        await connection.prepare(statement)


@contextmanager
def _translate_sql_errors(name: str) -> Iterator[None]:
    try:
        yield
    except asyncpg.PostgresError as error:
        if is_transient(error):
            raise
        raise Invalid("BAD_SQL", f"{name}: {error}", hint="fix the statement, or the tables that it uses") from error


@contextmanager
def _load_sql_errors(target: DictionaryKey) -> Iterator[None]:
    try:
        yield
    except asyncpg.SyntaxOrAccessError as error:
        hint = "loadSql must be a SELECT with the columns k and v; check its tables and the rights of the database user"
        raise Invalid("LOAD_SQL", f"loadSql of {target.dict_code} failed: {error}", hint=hint) from error


def _check_rows(target: DictionaryKey, records: Sequence[asyncpg.Record]) -> Rows:
    rows = [(record[0], record[1]) for record in records]
    for key, value in rows:
        if key is None:
            raise Corrupt("LOAD_SQL_NULL_KEY", f"loadSql of {target.dict_code} returns a null key", hint=_ONE_ROW)
        if value is None:
            message = f"loadSql of {target.dict_code} returns a null value"
            raise Corrupt("LOAD_SQL_NULL_VALUE", message, hint="change loadSql to return JSON in the column v")
    return rows
