"""R2: where a dictionary's items live: in tables of the user's, reached by SQL templates, or in our own."""

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
    """R2: how one dictionary is read and written, whatever tables it lives in."""

    load_hash: str  # changes with the way it is read
    has_exact_keys: bool  # whether a key is read back just as it was written

    def open_snapshot(self, db: Database, target: DictionaryKey) -> AbstractAsyncContextManager[DictionarySnapshot]:
        """The dictionary as it is at one moment, to be read under the version it has then."""

    async def load_all(self, db: Database, target: DictionaryKey) -> LoadedVersion:
        """All items and their version, read in one snapshot; Corrupt when a key is null or comes twice."""

    async def get_committed_version(self, db: Database, target: DictionaryKey) -> int:
        """The version readers may ask for."""

    async def count_items(self, tx: Connection, target: DictionaryKey) -> int:
        """How many items there are."""

    async def retain(self, tx: Connection, target: DictionaryKey, version: int) -> int:
        """R30: keep all items as those of *version*; how many."""

    async def check_statements(self, connection: Connection) -> None:
        """Invalid, with the statement and what is wrong with it, unless PostgreSQL would take every statement."""

    async def apply_delta(self, tx: Connection, changes: Sequence[ItemChange]) -> None:
        """Write what *changes* say, in their order."""

    async def apply_snapshot(self, tx: Connection, change: ItemChange, chunks: Chunks) -> None:
        """Make the items just those of *chunks*."""


class PostgresSqlProvider(DictionaryReader):
    """A dictionary in the user's own tables; without *apply* others write it, and it is read-only here."""

    def __init__(self, load_sql: str, apply: SqlTemplateSection | None) -> None:
        super().__init__(load_sql)
        self._apply = _DictionaryTemplates(apply) if apply else None

    async def check_statements(self, connection: Connection) -> None:
        await super().check_statements(connection)
        for name, statement in self._apply.named() if self._apply else ():
            await check_statement(connection, name, statement.sql)

    async def apply_delta(self, tx: Connection, changes: Sequence[ItemChange]) -> None:
        templates = self._templates(changes[0].target)
        ops = [
            (item.op, {**change.values(), "key": item.key, "payload": None if item.payload is UNSET else item.text})
            for change in changes
            for item in change.command.items
        ]
        for op, values in group_runs(ops):
            await _execute_many(tx, templates.item[Op(op)], values)

    async def apply_snapshot(self, tx: Connection, change: ItemChange, chunks: Chunks) -> None:
        templates, values = self._templates(change.target), change.values()
        if templates.replace is not None:
            whole = list(chain.from_iterable(chunks))
            await _execute_many(tx, templates.replace, [{**values, "snapshotJson": encode_snapshot(whole)}])
        if templates.stage is not None:
            for chunk in chunks:
                await _execute_many(tx, templates.stage, _staged(templates.stage, values, chunk))
        if templates.finalize is not None:
            await _execute_many(tx, templates.finalize, [values])

    def _templates(self, target: DictionaryKey) -> "_DictionaryTemplates":
        if self._apply is None:
            raise read_only_error(target.dict_code)
        return self._apply


class _DictionaryTemplates:
    """The statements of one dictionary, ready to be bound."""

    def __init__(self, apply: SqlTemplateSection) -> None:
        self.item = {Op.UPSERT: template.parse(apply.upsert_sql), Op.DELETE: template.parse(apply.delete_sql)}
        self.replace = _parsed(apply.snapshot_replace_sql)
        self.stage = _parsed(apply.snapshot_stage_sql)
        self.finalize = _parsed(apply.snapshot_finalize_sql)

    def named(self) -> list[tuple[str, SqlTemplate]]:
        """Each statement with its key in the configuration."""
        known = {"upsertSql": self.item[Op.UPSERT], "deleteSql": self.item[Op.DELETE]}
        rest = {
            "snapshotReplaceSql": self.replace,
            "snapshotStageSql": self.stage,
            "snapshotFinalizeSql": self.finalize,
        }
        return [*known.items(), *((name, found) for name, found in rest.items() if found is not None)]


class ItemTableProvider(DictionaryReader):
    """A dictionary in `dictionary_item`, for those without tables of their own."""

    has_exact_keys = True

    def __init__(self, code: str) -> None:
        # A code has no quote in it, see contract.NAME.
        super().__init__(
            "SELECT item_key AS k, payload AS v FROM dictionary_item "
            f"WHERE tenant_id = :tenantId AND dict_code = '{code}' AND NOT deleted"
        )
        self._code = code

    async def apply_delta(self, tx: Connection, changes: Sequence[ItemChange]) -> None:
        last = {
            (change.target.tenant_id, item.key): item for change in changes for item in change.command.items
        }  # of several with one key the last holds
        now = changes[-1].applied_at
        upserts = [(tenant, key, item.text) for (tenant, key), item in last.items() if item.op is Op.UPSERT]
        deletes = [place for place, item in last.items() if item.op is Op.DELETE]
        await store.upsert_items(tx, self._code, upserts, now=now)
        await store.delete_items(tx, self._code, deletes, now=now)

    async def apply_snapshot(self, tx: Connection, change: ItemChange, chunks: Chunks) -> None:
        await store.replace_items(tx, change.target, chain.from_iterable(chunks), now=change.applied_at)


def make_provider(section: DictionarySection) -> DictionaryProvider:
    """The provider a dictionary's configuration asks for."""
    if section.load_sql is None:
        return ItemTableProvider(section.code)
    return PostgresSqlProvider(section.load_sql, section.apply)


def read_only_error(code: str) -> Invalid:
    hint = "it has no `apply` in the configuration: change its tables where they are written"
    return Invalid("DICTIONARY_READ_ONLY", f"{code} takes no updates", hint=hint)


def _staged(stage: SqlTemplate, values: Mapping[str, Any], chunk: Sequence[SnapshotEntry]) -> list[Mapping[str, Any]]:
    """What stages a chunk: all of it at once, or item by item, as the template asks."""
    if "snapshotJson" in stage.names:
        return [{**values, "snapshotJson": encode_snapshot(chunk)}]
    return [{**values, "key": entry.key, "payload": entry.text} for entry in chunk]


def _parsed(text: str | None) -> SqlTemplate | None:
    return None if text is None else template.parse(text)


async def _execute_many(tx: Connection, template: SqlTemplate, values: Sequence[Mapping[str, Any]]) -> None:
    await tx.executemany(template.sql, [template.bind(value) for value in values])
