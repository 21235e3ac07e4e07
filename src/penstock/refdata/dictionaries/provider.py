"""R2: the storage of a dictionary: tables of the user, through SQL templates, or the table `dictionary_item`."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import Any, Protocol

from msgspec import UNSET

from penstock.kernel.db.database import Connection, Database
from penstock.kernel.errors import Invalid
from penstock.refdata import sql_template as template
from penstock.refdata import store
from penstock.refdata.config import DictionarySection, SqlTemplateSection
from penstock.refdata.contract import Op, SnapshotEntry
from penstock.refdata.dictionaries.reader import DictionaryReader, DictionarySnapshot, LoadedVersion, check_statement
from penstock.refdata.model import DictionaryKey, ItemChange, encode_snapshot, group_runs
from penstock.refdata.sql_template import SqlTemplate

Chunks = Sequence[Sequence[SnapshotEntry]]


class DictionaryProvider(Protocol):
    """R2: reads and writes one dictionary, independent of its tables."""

    load_hash: str  # changes with loadSql
    has_exact_keys: bool  # whether keys are read exactly as they were written

    def open_snapshot(self, db: Database, target: DictionaryKey) -> AbstractAsyncContextManager[DictionarySnapshot]:
        """Yield a consistent snapshot of the dictionary with its version."""

    async def load_all(self, db: Database, target: DictionaryKey) -> LoadedVersion:
        """Return all items and their version, read in one snapshot; Corrupt if a key is null or not unique."""

    async def get_committed_version(self, db: Database, target: DictionaryKey) -> int:
        """Return the last version."""

    async def count_items(self, tx: Connection, target: DictionaryKey) -> int:
        """Return the number of items."""

    async def retain(self, tx: Connection, target: DictionaryKey, version: int) -> int:
        """R30: store all items as those of *version*, and return their number."""

    async def check_statements(self, connection: Connection) -> None:
        """Raise Invalid, with the statement and its error, unless PostgreSQL accepts every statement."""

    async def try_load(self, connection: Connection, target: DictionaryKey) -> None:
        """Raise Invalid unless PostgreSQL starts to execute loadSql; no row is read."""

    async def apply_delta(self, tx: Connection, changes: Sequence[ItemChange]) -> None:
        """Write *changes* in their order."""

    async def apply_snapshot(self, tx: Connection, change: ItemChange, chunks: Chunks) -> None:
        """Replace all items by those of *chunks*."""


class PostgresSqlProvider(DictionaryReader):
    """A dictionary in tables of the user; without *apply* it is read-only."""

    def __init__(self, load_sql: str, apply: SqlTemplateSection | None) -> None:
        super().__init__(load_sql)
        self._apply = _DictionaryTemplates(apply) if apply else None

    async def check_statements(self, connection: Connection) -> None:
        await super().check_statements(connection)
        for name, statement in self._apply.list_statements() if self._apply else ():
            await check_statement(connection, name, statement.sql)

    async def apply_delta(self, tx: Connection, changes: Sequence[ItemChange]) -> None:
        templates = self._get_templates(changes[0].target)
        ops = [
            (item.op, {**change.get_values(), "key": item.key, "payload": None if item.payload is UNSET else item.text})
            for change in changes
            for item in change.command.items
        ]
        for op, values in group_runs(ops):
            await _execute_many(tx, templates.item[Op(op)], values)

    async def apply_snapshot(self, tx: Connection, change: ItemChange, chunks: Chunks) -> None:
        templates, values = self._get_templates(change.target), change.get_values()
        if templates.replace is not None:
            whole = list(chain.from_iterable(chunks))
            await _execute_many(tx, templates.replace, [{**values, "snapshotJson": encode_snapshot(whole)}])
        if templates.stage is not None:
            for chunk in chunks:
                await _execute_many(tx, templates.stage, _bind_chunk(templates.stage, values, chunk))
        if templates.finalize is not None:
            await _execute_many(tx, templates.finalize, [values])

    def _get_templates(self, target: DictionaryKey) -> "_DictionaryTemplates":
        if self._apply is None:
            raise read_only_error(target.dict_code)
        return self._apply


class _DictionaryTemplates:
    """The parsed statements of one dictionary."""

    def __init__(self, apply: SqlTemplateSection) -> None:
        self.item = {Op.UPSERT: template.parse(apply.upsert_sql), Op.DELETE: template.parse(apply.delete_sql)}
        self.replace = _parse(apply.snapshot_replace_sql)
        self.stage = _parse(apply.snapshot_stage_sql)
        self.finalize = _parse(apply.snapshot_finalize_sql)

    def list_statements(self) -> list[tuple[str, SqlTemplate]]:
        """Return each statement with its setting."""
        items = {"upsertSql": self.item[Op.UPSERT], "deleteSql": self.item[Op.DELETE]}
        rest = {
            "snapshotReplaceSql": self.replace,
            "snapshotStageSql": self.stage,
            "snapshotFinalizeSql": self.finalize,
        }
        return [*items.items(), *((name, statement) for name, statement in rest.items() if statement is not None)]


class ItemTableProvider(DictionaryReader):
    """A dictionary in the table `dictionary_item`."""

    has_exact_keys = True

    def __init__(self, code: str) -> None:
        # A code contains no quote, see contract.NAME.
        super().__init__(
            "SELECT item_key AS k, payload AS v FROM dictionary_item "
            f"WHERE tenant_id = :tenantId AND dict_code = '{code}' AND NOT deleted"
        )
        self._code = code

    async def apply_delta(self, tx: Connection, changes: Sequence[ItemChange]) -> None:
        last = {
            (change.target.tenant_id, item.key): item for change in changes for item in change.command.items
        }  # the last item with a key wins
        now = changes[-1].applied_at
        upserts = [(tenant, key, item.text) for (tenant, key), item in last.items() if item.op is Op.UPSERT]
        deletes = [key for key, item in last.items() if item.op is Op.DELETE]
        await store.upsert_items(tx, self._code, upserts, now=now)
        await store.delete_items(tx, self._code, deletes, now=now)

    async def apply_snapshot(self, tx: Connection, change: ItemChange, chunks: Chunks) -> None:
        await store.replace_items(tx, change.target, chain.from_iterable(chunks), now=change.applied_at)


def make_provider(section: DictionarySection) -> DictionaryProvider:
    """Return the provider of a configured dictionary."""
    if section.load_sql is None:
        return ItemTableProvider(section.code)
    return PostgresSqlProvider(section.load_sql, section.apply)


def read_only_error(code: str) -> Invalid:
    hint = "add `apply` to the dictionary in refdata.dictionaries, or change its tables directly"
    return Invalid("DICTIONARY_READ_ONLY", f"dictionary {code} is read-only", hint=hint)


def _bind_chunk(
    stage: SqlTemplate, values: Mapping[str, Any], chunk: Sequence[SnapshotEntry]
) -> list[Mapping[str, Any]]:
    """Return the parameters that stage a chunk: one set for the chunk, or one per item, depending on the template."""
    if "snapshotJson" in stage.names:
        return [{**values, "snapshotJson": encode_snapshot(chunk)}]
    return [{**values, "key": entry.key, "payload": entry.text} for entry in chunk]


def _parse(text: str | None) -> SqlTemplate | None:
    return None if text is None else template.parse(text)


async def _execute_many(tx: Connection, template: SqlTemplate, values: Sequence[Mapping[str, Any]]) -> None:
    await tx.executemany(template.sql, [template.bind(value) for value in values])
