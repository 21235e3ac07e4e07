"""What can be asked of refdata: take a command, say how it stands, tell the history; each owns its transaction."""

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
from penstock.kernel.ids import new_id
from penstock.kernel.telemetry.telemetry import current_traceparent
from penstock.refdata import store
from penstock.refdata.commands.commit_waiter import CommitWaiter
from penstock.refdata.commands.messages import build_command_message
from penstock.refdata.config import RefdataSection
from penstock.refdata.contract import EXACT, Command, CommandSource, UpdateState, encode_command
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.dictionaries.retained_versions import VersionRetention
from penstock.refdata.model import CommandEvent, DictionaryKey, DictionarySummary, UpdateRecord, VersionRecord

_SORTED = msgspec.json.Encoder(order="sorted")
LATEST = datetime(9999, 1, 1, tzinfo=UTC)
LAST_ID = UUID(int=2**128 - 1)


class RefdataOverview(NamedTuple):
    """What is under way at a moment, and what failed before it."""

    at: datetime
    counts: Mapping[str, Any]
    failed: Sequence[Mapping[str, Any]]


class Refdata:
    """The way in: commands are noted, put on the bus, and followed to their end."""

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
        self._topic = section.kafka.commands_topic

    @classmethod
    @asynccontextmanager
    async def open(
        cls, db: Database, bus: Bus, catalogue: DictionaryCatalogue, section: RefdataSection
    ) -> "AsyncIterator[Refdata]":
        """In touch with those who apply."""
        async with Notifier.open(db, store.CHANNEL) as notifier:
            refdata = cls(db, bus, notifier, catalogue, section)
            async with refdata._waiter.run():
                yield refdata

    def stop(self) -> None:
        """Let nobody wait any longer."""
        self.notifier.close()

    async def check(self) -> str:
        """The database's version, or Transient DATABASE_DOWN."""
        return await self._db.check()

    async def read_overview(self, within: timedelta, limit: int) -> RefdataOverview:
        """What is under way in all dictionaries, and which had updates that failed *within* so long."""
        now = self._db.clock.now()
        async with self._db.transaction("repeatable_read") as tx:
            counts = await tx.fetchrow(store.SQL["count_updates"])
            failed = await tx.fetch(store.SQL["list_failing"], now - within, limit)
        return RefdataOverview(now, dict(counts or {}), [dict(row) for row in failed])

    async def submit(self, tenant_id: str, command: Command, wait: timedelta | None = None) -> UpdateRecord:
        """R6, R8: take a command in; how it stands, at the latest after *wait*. Under a known id it is the same one."""
        event, body_hash = self._accepted(tenant_id, command), content_hash(command)
        try:
            self.catalogue.get_writable(event.target)
        except PenstockError:
            if command.event_id is None or (known := await self._known(event)) is None:
                raise
            return _same(known, event, body_hash)  # it was taken in when it could be
        update = await self._noted(event, body_hash)
        if update.status is not UpdateState.PENDING:
            return update
        # Published also when it was known: perhaps it never reached the bus. Twice there it still counts once.
        message = build_command_message(self._topic, event)
        if wait is None:
            await self._bus.publish([message])
            return update
        with self._waiter.follow(update) as end:
            await self._bus.publish([message])
            with suppress(TimeoutError):
                async with asyncio.timeout(wait.total_seconds()):
                    return await end
        return update

    async def submit_all(self, events: Sequence[CommandEvent]) -> None:
        """R10: take in what came over another topic; what is known already is only published again."""
        if not events:
            return
        first = {(event.target.tenant_id, event.event_id): event for event in reversed(events)}
        noted = [(event.target, event.event_id, content_hash(event.command)) for event in first.values()]
        # Published first: what is noted is looked for on the bus, and nobody could send this again under another id.
        await self._bus.publish([build_command_message(self._topic, event) for event in events])
        async with self._db.connection() as connection:
            await store.open_updates(connection, noted, now=self._db.clock.now())

    async def roll_back(self, target: DictionaryKey, version: int, wait: timedelta) -> UpdateRecord:
        """R30: make a dictionary what it was in *version*, under a new one; how that stands after *wait*."""
        *first, last = await self.retention.make_rollback(target, version)
        for command in first:
            await self.submit(target.tenant_id, command)
        return await self.submit(target.tenant_id, last, wait)

    async def get_update(self, tenant_id: str, event_id: UUID) -> UpdateRecord:
        """R7: how an update stands, or NotFound."""
        async with self._db.connection() as connection:
            found = (await store.find_updates(connection, [(tenant_id, event_id)])).get((tenant_id, event_id))
        if found is None:
            hint = "check the id; updates are forgotten after refdata.retention.updates"
            raise NotFound("UNKNOWN_UPDATE", f"tenant {tenant_id} has no update {event_id}", hint=hint)
        return found

    async def list_updates(
        self, tenant_id: str, status: UpdateState, dict_code: str | None, *, before: tuple[datetime, UUID], limit: int
    ) -> Page[UpdateRecord]:
        """A tenant's updates that are under way, or failed, the latest first."""
        async with self._db.connection() as connection:
            rows = await store.list_updates(connection, status, tenant_id, dict_code, before=before, limit=limit + 1)
        is_pending = status is UpdateState.PENDING
        return make_page(rows, limit, lambda row: (row.created_at if is_pending else row.updated_at, str(row.event_id)))

    async def list_versions(self, target: DictionaryKey, *, before: int, limit: int) -> Page[VersionRecord]:
        """R30: the versions of a dictionary and what made them, the latest first."""
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

    def _accepted(self, tenant_id: str, command: Command) -> CommandEvent:
        if command.tenant_id not in (None, tenant_id):
            hint = "leave tenantId out, or post to the tenant it names"
            raise Invalid("TENANT_MISMATCH", f"the command is for tenant {command.tenant_id!r}", hint=hint)
        target = DictionaryKey(tenant_id, command.dict_code)
        now = self._db.clock.now()
        event_id = command.event_id or new_id(self._db.clock)
        filled = msgspec.structs.replace(
            command,
            tenant_id=tenant_id,
            event_id=event_id,
            source=CommandSource.REST,
            occurred_at=command.occurred_at or now,
        )
        return CommandEvent(target, event_id, CommandSource.REST, filled, current_traceparent())

    async def _noted(self, event: CommandEvent, body_hash: bytes) -> UpdateRecord:
        """The update as it stands, opened when it is new; Conflict when its id was used for something else."""
        target, event_id, now = event.target, event.event_id, self._db.clock.now()
        opened = UpdateRecord(
            target.tenant_id, event_id, target.dict_code, UpdateState.PENDING, None, None, None, now, now
        )
        async with self._db.connection() as connection:
            if await store.open_updates(connection, [(target, event_id, body_hash)], now=now):
                return opened
        return _same(await self._known(event) or opened, event, body_hash)

    async def _known(self, event: CommandEvent) -> UpdateRecord | None:
        key = (event.target.tenant_id, event.event_id)
        async with self._db.connection() as connection:
            return (await store.find_updates(connection, [key])).get(key)


def _same(known: UpdateRecord, event: CommandEvent, body_hash: bytes) -> UpdateRecord:
    """*known*, if it is what is asked for now."""
    if known.dict_code != event.target.dict_code or known.body_hash not in (None, body_hash):
        hint = "repeat a command unchanged, or give a new one a new eventId"
        raise Conflict("EVENT_ID_REUSED", f"eventId {event.event_id} was used for another command", hint=hint)
    return known


def content_hash(command: Command) -> bytes:
    """The same for the same content, however it is spelt and whoever sends it."""
    bare = encode_command(msgspec.structs.replace(command, event_id=None, tenant_id=None, source=None))
    with suppress(msgspec.DecodeError, RecursionError):  # nested too deep for it: then the bytes as they came
        bare = _SORTED.encode(EXACT.decode(bare))
    return hashlib.sha256(bare).digest()
