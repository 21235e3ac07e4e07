"""The use cases of refdata: submit commands, read updates and versions; each owns its transaction."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from penstock.kernel.bus import Bus
from penstock.kernel.db.database import Database
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.db.page import Page, make_page
from penstock.kernel.errors import Conflict, Invalid, NotFound, PenstockError
from penstock.kernel.ids import make_id
from penstock.kernel.telemetry.telemetry import format_traceparent
from penstock.refdata import store
from penstock.refdata.commands.commit_waiter import CommitWaiter
from penstock.refdata.commands.messages import build_command_message
from penstock.refdata.config import RefdataSection
from penstock.refdata.contract import EXACT, Command, CommandSource, UpdateState, encode_command
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.dictionaries.retained_versions import VersionRetention
from penstock.refdata.dictionaries.statement_checks import StatementChecks
from penstock.refdata.model import CommandEvent, DictionaryKey, DictionarySummary, UpdateRecord, VersionRecord

_SORTED = msgspec.json.Encoder(order="sorted")
_MAX_DRIFTS = 1_000
LATEST = datetime(9999, 1, 1, tzinfo=UTC)
LAST_ID = UUID(int=2**128 - 1)


class RefdataOverview(NamedTuple):
    """The pending updates at a time, and the dictionaries with failed updates or drift."""

    at: datetime
    counts: Mapping[str, Any]
    failed: Sequence[Mapping[str, Any]]
    drifted: Sequence[Mapping[str, Any]]


class Refdata:
    """The command service: it stores an update for each command, publishes the command, and waits for its result."""

    def __init__(
        self, db: Database, bus: Bus, notifier: Notifier, catalogue: DictionaryCatalogue, section: RefdataSection
    ) -> None:
        self.catalogue = catalogue
        self.section = section
        self._db = db
        self._bus = bus
        self.notifier = notifier
        self._waiter = CommitWaiter(db, notifier)
        self.retention = VersionRetention(db, catalogue)
        self.statements = StatementChecks(db, catalogue)
        self._topic = section.kafka.commands_topic

    @classmethod
    @asynccontextmanager
    async def open(
        cls, db: Database, bus: Bus, catalogue: DictionaryCatalogue, section: RefdataSection
    ) -> "AsyncIterator[Refdata]":
        """Yield the service, with notifications of commits from the processes that apply commands."""
        async with Notifier.open(db, store.CHANNEL) as notifier:
            refdata = cls(db, bus, notifier, catalogue, section)
            async with refdata._waiter.run():
                yield refdata

    def stop(self) -> None:
        """End all waiting requests."""
        self.notifier.close()

    async def check(self) -> str:
        """Return the version of the database, or raise Transient DATABASE_DOWN."""
        return await self._db.check()

    async def read_overview(self, failed_within: timedelta, drifted_within: timedelta, limit: int) -> RefdataOverview:
        """Return counts, and up to *limit* dictionaries each with recently failed updates and with recent drift."""
        now = self._db.clock.now()
        async with self._db.transaction("repeatable_read") as tx:
            counts = await tx.fetchrow(store.SQL["count_updates"])
            failed = await tx.fetch(store.SQL["list_failing"], now - failed_within, limit)
            drifted = await tx.fetch(store.SQL["list_drifts"], now - drifted_within, _MAX_DRIFTS)
        sections = {dictionary.section.code: dictionary.section for dictionary in self.catalogue.list_all()}
        checked = {code for code, section in sections.items() if section.drift_check_sql and section.enabled}
        rows = [dict(row) for row in drifted if row["dict_code"] in checked][:limit]
        return RefdataOverview(now, dict(counts or {}), [dict(row) for row in failed], rows)

    async def submit(self, tenant_id: str, command: Command, wait: timedelta | None = None) -> UpdateRecord:
        """R6, R8: accept a command and return its update, at the latest after *wait*; a known id has its update."""
        event, body_hash = self._accept(tenant_id, command), hash_content(command)
        try:
            self.catalogue.get_writable(event.target)
        except PenstockError:
            if command.event_id is None or (stored := await self._find_update(event)) is None:
                raise
            return _check_same(stored, event, body_hash)  # accepted while the dictionary was writable
        update = await self._open_update(event, body_hash)
        if update.status is not UpdateState.PENDING:
            return update
        # Also publish a known command, which may never have reached the bus. A duplicate is applied once.
        message = build_command_message(self._topic, event)
        if wait is None:
            await self._bus.publish([message])
            return update
        with self._waiter.follow(update) as result:
            await self._bus.publish([message])
            with suppress(TimeoutError):
                async with asyncio.timeout(wait.total_seconds()):
                    return await result
        return update

    async def submit_all(self, events: Sequence[CommandEvent]) -> None:
        """R10: accept the commands of an external topic; known ones are published again."""
        if not events:
            return
        first = {(event.target.tenant_id, event.event_id): event for event in reversed(events)}
        updates = [(event.target, event.event_id, hash_content(event.command)) for event in first.values()]
        # Publish first: a stored update without a command would fail, and its derived id could not be used again.
        await self._bus.publish([build_command_message(self._topic, event) for event in events])
        async with self._db.connection() as connection:
            await store.open_updates(connection, updates, now=self._db.clock.now())

    async def roll_back(self, target: DictionaryKey, version: int, wait: timedelta) -> UpdateRecord:
        """R30: restore a retained version as a new version, and return its update, at the latest after *wait*."""
        *first, last = await self.retention.make_rollback(target, version)
        for command in first:
            await self.submit(target.tenant_id, command)
        return await self.submit(target.tenant_id, last, wait)

    async def get_update(self, tenant_id: str, event_id: UUID) -> UpdateRecord:
        """R7: return an update, or raise NotFound."""
        async with self._db.connection() as connection:
            update = (await store.find_updates(connection, [(tenant_id, event_id)])).get((tenant_id, event_id))
        if update is None:
            hint = "check the id; updates are deleted after refdata.retention.updates"
            raise NotFound("UNKNOWN_UPDATE", f"tenant {tenant_id} has no update {event_id}", hint=hint)
        return update

    async def list_updates(
        self, tenant_id: str, status: UpdateState, dict_code: str | None, *, before: tuple[datetime, UUID], limit: int
    ) -> Page[UpdateRecord]:
        """Return the pending or failed updates of a tenant, latest first."""
        async with self._db.connection() as connection:
            rows = await store.list_updates(connection, status, tenant_id, dict_code, before=before, limit=limit + 1)
        is_pending = status is UpdateState.PENDING
        return make_page(rows, limit, lambda row: (row.created_at if is_pending else row.updated_at, str(row.event_id)))

    async def list_versions(self, target: DictionaryKey, *, before: int, limit: int) -> Page[VersionRecord]:
        """R30: return the versions of a dictionary and their commands, latest first."""
        self.catalogue.get(target)
        async with self._db.connection() as connection:
            rows = await store.list_versions(connection, target, before=before, limit=limit + 1)
        return make_page(rows, limit, lambda row: (row.version,))

    async def list_dictionaries(self, tenant_id: str) -> dict[str, DictionarySummary]:
        """Return the dictionaries of a tenant by code; a configured one without a commit has version 0."""
        codes = self.catalogue.list_codes(tenant_id)
        async with self._db.connection() as connection:
            committed = await store.list_dictionaries(connection, tenant_id)
        return {code: committed.get(code, DictionarySummary(0, None, None)) for code in codes}

    def _accept(self, tenant_id: str, command: Command) -> CommandEvent:
        if command.tenant_id not in (None, tenant_id):
            hint = "remove tenantId from the command, or send it to the path of that tenant"
            raise Invalid("TENANT_MISMATCH", f"the command is for tenant {command.tenant_id!r}", hint=hint)
        target = DictionaryKey(tenant_id, command.dict_code)
        now = self._db.clock.now()
        event_id = command.event_id or make_id(self._db.clock)
        filled = msgspec.structs.replace(
            command,
            tenant_id=tenant_id,
            event_id=event_id,
            source=CommandSource.REST,
            occurred_at=command.occurred_at or now,
        )
        return CommandEvent(target, event_id, CommandSource.REST, filled, format_traceparent())

    async def _open_update(self, event: CommandEvent, body_hash: bytes) -> UpdateRecord:
        """Return the update of *event*, stored if it is new; Conflict if its id belongs to another command."""
        target, event_id, now = event.target, event.event_id, self._db.clock.now()
        opened = UpdateRecord(
            target.tenant_id, event_id, target.dict_code, UpdateState.PENDING, None, None, None, now, now
        )
        async with self._db.connection() as connection:
            if await store.open_updates(connection, [(target, event_id, body_hash)], now=now):
                return opened
        return _check_same(await self._find_update(event) or opened, event, body_hash)

    async def _find_update(self, event: CommandEvent) -> UpdateRecord | None:
        key = (event.target.tenant_id, event.event_id)
        async with self._db.connection() as connection:
            return (await store.find_updates(connection, [key])).get(key)


def _check_same(stored: UpdateRecord, event: CommandEvent, body_hash: bytes) -> UpdateRecord:
    """Return *stored* if it belongs to the same command; raise Conflict otherwise."""
    if stored.dict_code != event.target.dict_code or stored.body_hash not in (None, body_hash):
        hint = "send the command unchanged, or send a new command with a new eventId"
        raise Conflict("EVENT_ID_REUSED", f"eventId {event.event_id} was used for another command", hint=hint)
    return stored


def hash_content(command: Command) -> bytes:
    """Return a hash of the content of *command*, independent of its formatting and its sender."""
    bare = encode_command(msgspec.structs.replace(command, event_id=None, tenant_id=None, source=None))
    with suppress(msgspec.DecodeError, RecursionError):  # nested too deeply: use the bytes as they are
        bare = _SORTED.encode(EXACT.decode(bare))
    return hashlib.sha256(bare).digest()
