"""R2, R20: how a dictionary is read: all of it, what changed, or a few items, under the version it really has."""

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
MAX_STEPS = 2_000  # more, and everything is loaded anew
_ONE_ROW = "let it return one row per key"
Rows = list[tuple[str, str]]


class LoadedVersion(NamedTuple):
    """A whole dictionary under the version it really has: key to payload, as JSON text."""

    version: int
    items: Mapping[str, str]


class DictionarySnapshot:
    """A dictionary at one moment: whatever is read of it belongs to its *mark*."""

    def __init__(
        self, tx: Connection, target: DictionaryKey, source: "DictionaryReader | _PinnedDictionary", mark: VersionStamp
    ) -> None:
        self.target = target
        self.mark = mark
        self._tx = tx
        self._source = source

    async def read_all(self) -> AsyncGenerator[Rows, None]:
        """Every item, many at a time; Corrupt when a key or a value is null."""
        await enable_all_plans(self._tx)
        with _readable(self.target):
            cursor = await self._tx.cursor(self._source.rows, self.target.tenant_id)
            while rows := await cursor.fetch(READ_BATCH):
                yield _checked(self.target, rows)

    async def read_keys(self, keys: Sequence[str]) -> Rows | None:
        """The items of *keys* that there are; None when one of them is nothing the table's keys can be."""
        with _readable(self.target):
            query = f"{self._source.rows} WHERE k = ANY ($2::text[]{await self._source.read_key_cast(self._tx)})"
            try:
                async with self._tx.transaction():
                    return _checked(self.target, await self._tx.fetch(query, self.target.tenant_id, keys))
            except asyncpg.DataError:
                return None

    async def read_existing(self, keys: Sequence[str]) -> Rows:
        """The items of *keys* that there are, whatever the others are."""
        found = await self.read_keys(keys)
        if found is not None:
            return found
        return [row for key in keys for row in await self.read_keys([key]) or ()]

    async def list_steps(self, mark: VersionStamp) -> list[CommitEntry] | None:
        """The commits after *mark* up to this one; None when they are not all known, or *mark* is of another past."""
        if mark == self.mark:
            return []
        steps = await store.list_commits(self._tx, self.target, mark.version, limit=MAX_STEPS + 1)
        versions = [step.mark.version for step in steps]
        is_whole = bool(steps) and versions == list(range(mark.version, self.mark.version + 1))
        return steps[1:] if is_whole and steps[0].mark == mark and steps[-1].mark == self.mark else None

    async def list_commits(self, version: int) -> list[CommitEntry]:
        """The commits after *version* up to this one, the last of them if they are many."""
        first = max(version, self.mark.version - MAX_STEPS) + 1
        return await store.list_commits(self._tx, self.target, first, limit=MAX_STEPS)

    async def shares_history(self, mark: VersionStamp) -> bool:
        """R24: whether *mark* is of the past of this one, as far as that is remembered."""
        if mark.is_pinned or self.mark.is_pinned:
            return True
        if mark.version >= self.mark.version:
            return mark == self.mark
        then = await store.list_commits(self._tx, self.target, mark.version, limit=1)
        return not then or then[0].mark.version != mark.version or then[0].mark == mark


class DictionaryReader:
    """What every provider reads with."""

    has_exact_keys = False

    def __init__(self, load_sql: str) -> None:
        load = sql_template.parse(load_sql, ["tenantId"])
        self.load_hash = hashlib.sha256(load_sql.encode()).hexdigest()
        self.rows = f"SELECT k::text AS k, v::text AS v FROM (\n{load.sql}\n) AS loaded"
        self._keys = f"SELECT k FROM (\n{load.sql}\n) AS loaded LIMIT 0"
        self._key_cast: str | None = None

    async def check_statements(self, connection: Connection) -> None:
        await check_statement(connection, "loadSql", self.rows)

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
                # Also one that nobody writes has a version: it grows when the way to read it changes.
                await store.create_dictionaries(connection, [target], now=db.clock.now())

    async def load_all(self, db: Database, target: DictionaryKey) -> LoadedVersion:
        items: dict[str, str] = {}
        count = 0
        async with self.open_snapshot(db, target) as snapshot:
            async for rows in snapshot.read_all():
                items.update(rows)
                count += len(rows)
        if len(items) < count:
            raise duplicate_key_error(target)
        return LoadedVersion(snapshot.mark.version, items)

    async def get_committed_version(self, db: Database, target: DictionaryKey) -> int:
        async with db.connection() as connection:
            return await store.read_committed_version(connection, target)

    async def count_items(self, tx: Connection, target: DictionaryKey) -> int:
        """How many items there are."""
        return int(await tx.fetchval(f"SELECT count(*) FROM ({self.rows}) AS counted", target.tenant_id))

    async def retain(self, tx: Connection, target: DictionaryKey, version: int) -> int:
        """R30: keep all items as those of *version*; how many."""
        statement = f"""
            INSERT INTO retained_item (tenant_id, dict_code, version, item_key, payload)
            SELECT $1, $2, $3, k, v::jsonb FROM ({self.rows}) AS kept
            ON CONFLICT DO NOTHING"""
        return int((await tx.execute(statement, *target, version)).rpartition(" ")[2])

    async def read_key_cast(self, tx: Connection) -> str:
        """Keys are text to us. Compared as what they are to the table, an index finds them."""
        if self._key_cast is None:
            kind = (await tx.prepare(self._keys)).get_attributes()[0].type
            self._key_cast = f'::"{kind.schema}"."{kind.name}"[]' if kind.kind == "scalar" else ""
        return self._key_cast

    async def _mark(self, tx: Connection, target: DictionaryKey) -> VersionStamp | None:
        found = await store.read_stamp(tx, target)
        if found is None:
            return None
        mark, load_hash = found
        if load_hash not in (None, self.load_hash) and not mark.is_pinned:
            # What we would read is not what others call by this version.
            hint = "the configuration changed elsewhere: it is reloaded when the file here changes too"
            raise Transient("LOAD_SQL_CHANGED", f"{target.dict_code} is read another way now", hint=hint)
        return mark


class _PinnedDictionary:
    """R30: what is read of a dictionary that is pinned."""

    def __init__(self, code: str, mark: VersionStamp) -> None:
        # A code has no quote in it, see contract.NAME.
        self.rows = (
            "SELECT k, v FROM (SELECT item_key AS k, payload::text AS v FROM retained_item "
            f"WHERE tenant_id = $1 AND dict_code = '{code}' AND version = {mark.version}) AS kept"
        )

    async def read_key_cast(self, tx: Connection) -> str:  # noqa: ARG002 - its keys are text
        return ""


def duplicate_key_error(target: DictionaryKey) -> Corrupt:
    said = f"loadSql of {target.dict_code} yields a key more than once"
    return Corrupt("LOAD_SQL_NULL_KEY", said, hint=_ONE_ROW)


async def check_statement(connection: Connection, name: str, statement: str) -> None:
    """Invalid unless PostgreSQL takes *statement*."""
    try:
        await connection.prepare(statement)
    except asyncpg.PostgresError as error:
        if is_transient(error):
            raise
        raise Invalid("BAD_SQL", f"{name}: {error}", hint="mend the statement, or the tables it names") from error


@contextmanager
def _readable(target: DictionaryKey) -> Iterator[None]:
    try:
        yield
    except asyncpg.SyntaxOrAccessError as error:
        hint = "loadSql must be a SELECT that yields k and v"
        raise Invalid("LOAD_SQL", f"loadSql of {target.dict_code} cannot be run: {error}", hint=hint) from error


def _checked(target: DictionaryKey, rows: Sequence[asyncpg.Record]) -> Rows:
    found = [(row[0], row[1]) for row in rows]
    for key, value in found:
        if key is None:
            raise Corrupt("LOAD_SQL_NULL_KEY", f"loadSql of {target.dict_code} yields a null key", hint=_ONE_ROW)
        if value is None:
            said = f"loadSql of {target.dict_code} yields a null v"
            raise Corrupt("LOAD_VALUES", said, hint="let it return JSON")
    return found
