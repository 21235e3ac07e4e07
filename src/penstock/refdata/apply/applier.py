"""R11: applies commands exactly once each, also if they are delivered repeatedly or a worker resumes late."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from itertools import groupby
from time import time_ns
from typing import NamedTuple
from uuid import UUID

import asyncpg
import structlog

from penstock.kernel.bus import BusDelivery
from penstock.kernel.db.database import Connection, Database, enable_all_plans, is_transient
from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.outcome import Done, Failed, Outcome, Retry
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.kernel.work.worker import Handler
from penstock.refdata import store
from penstock.refdata.apply import snapshots
from penstock.refdata.apply.apply_transaction import ApplyTransaction, log_fields
from penstock.refdata.commands.messages import ParsedMessage, parse_message
from penstock.refdata.contract import EventType
from penstock.refdata.dictionaries import retained_versions
from penstock.refdata.dictionaries.catalogue import Dictionary, DictionaryCatalogue
from penstock.refdata.dictionaries.provider import Chunks
from penstock.refdata.metrics import RefdataMetrics
from penstock.refdata.model import (
    CommandEvent,
    CommandRefusal,
    CommandVerdict,
    DictionaryKey,
    ItemChange,
    UpdateRecord,
    check_revision,
    format_error,
)

_LARGE = 100_000  # bytes of a message
_TOO_SLOW = CommandRefusal("STATEMENT_TIMEOUT", "an SQL statement of the dictionary timed out in every attempt")


class UnappliableCommand(Exception):
    """A statement of a dictionary failed permanently: one of the commands at hand cannot be applied."""

    def __init__(self, refusal: CommandRefusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class StatementTimeout(Exception):
    """A statement of a dictionary timed out; *counts* is false if the cause is the server, not the command."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.counts = counts


class _CommandCase(NamedTuple):
    """A command, and either the dictionary that it changes or its refusal."""

    event: CommandEvent
    dictionary: Dictionary | None
    refusal: CommandRefusal | None = None

    @property
    def key(self) -> tuple[str, UUID]:
        return self.event.target.tenant_id, self.event.event_id


class CommandApplier:
    """Applies commands that were read from the bus; *actor* is its name in the journal."""

    def __init__(
        self,
        db: Database,
        catalogue: DictionaryCatalogue,
        actor: str,
        *,
        max_attempts: int = 5,
        max_items: int = 5_000_000,
    ) -> None:
        self._db = db
        self._catalogue = catalogue
        self._actor = actor
        self._max_attempts = max_attempts
        self._max_items = max_items

    async def apply_messages(self, messages: Sequence[ParsedMessage]) -> AsyncGenerator[CommandVerdict, None]:
        """Yield the result of each message, in order, when it is durable. Each message must contain an event."""
        for is_alone, group in groupby(messages, key=_needs_own_transaction):
            for part in [[message] for message in group] if is_alone else [list(group)]:
                async with aclosing(self._apply_part(part)) as verdicts:
                    async for verdict in verdicts:
                        yield verdict

    async def _apply_part(self, messages: Sequence[ParsedMessage]) -> AsyncGenerator[CommandVerdict, None]:
        """Apply *messages* in one transaction, or in smaller ones until the command that fails is alone."""
        try:
            verdicts = await self._apply([self._make_case(message) for message in messages])
        except (UnappliableCommand, StatementTimeout) as error:
            if len(messages) > 1:
                for part in _split(messages, error):
                    async with aclosing(self._apply_part(part)) as inner:
                        async for verdict in inner:
                            yield verdict
                return
            if isinstance(error, StatementTimeout) and (not error.counts or messages[0].attempt < self._max_attempts):
                raise
            refusal = error.refusal if isinstance(error, UnappliableCommand) else _TOO_SLOW
            verdicts = [await self._refuse(self._make_case(messages[0]), refusal)]
        for verdict in verdicts:
            yield verdict

    def _make_case(self, message: ParsedMessage) -> _CommandCase:
        event = message.event
        if event is None:
            raise ValueError("the message contains no event")
        if message.refusal is not None:
            return _CommandCase(event, None, message.refusal)
        try:
            return _CommandCase(event, self._catalogue.get_writable(event.target))
        except PenstockError as error:
            return _CommandCase(event, None, CommandRefusal(error.code, error.message))

    async def _apply(self, cases: Sequence[_CommandCase]) -> list[CommandVerdict]:
        """Apply *cases* in one transaction, which locks the dictionaries before it reads the processed events."""
        async with self._db.transaction() as tx:
            if is_snapshot(cases[0].event):
                await enable_all_plans(tx)
            batch = await self._begin(tx, [case.event.target for case in cases if case.dictionary])
            new = await store.mark_processed(tx, [case.event for case in cases], now=batch.now)
            verdicts = await self._decide(batch, cases, new)
            await batch.write()
        batch.log()
        _log_repeated(cases, verdicts)
        return verdicts

    async def _begin(self, tx: Connection, targets: Sequence[DictionaryKey]) -> ApplyTransaction:
        now = self._db.clock.now()
        return ApplyTransaction(tx, self._actor, now, await store.lock_dictionaries(tx, targets, now=now))

    async def _decide(
        self, batch: ApplyTransaction, cases: Sequence[_CommandCase], new: set[tuple[str, UUID]]
    ) -> list[CommandVerdict]:
        verdicts: list[CommandVerdict] = []
        changes: dict[str, list[tuple[Dictionary, ItemChange]]] = defaultdict(list)
        for case in cases:
            if case.key not in new:
                verdicts.append(CommandVerdict(is_repeated=True))
                continue
            new.discard(case.key)  # a second command with this id in the batch is a repetition
            verdicts.append(await self._decide_case(batch, case, changes))
        for group in changes.values():
            with _translate_sql_errors():
                await group[0][0].provider.apply_delta(batch.tx, [change for _, change in group])
        if batch.commits:
            with _translate_sql_errors():  # check deferred constraints now: their errors belong to the commands
                await batch.tx.execute("SET CONSTRAINTS ALL IMMEDIATE")
        return await _recall_results(batch.tx, cases, verdicts)

    async def _decide_case(
        self, batch: ApplyTransaction, case: _CommandCase, changes: dict[str, list[tuple[Dictionary, ItemChange]]]
    ) -> CommandVerdict:
        event, dictionary = case.event, case.dictionary
        if dictionary is None:
            return batch.finish([event.id], CommandVerdict(refusal=case.refusal))
        if is_snapshot(event):

            async def replace(change: ItemChange, chunks: Chunks) -> None:
                with _translate_sql_errors():
                    items = sum(map(len, chunks))
                    if refusal := await retained_versions.check_snapshot(batch.tx, dictionary, change, items):
                        raise UnappliableCommand(refusal)
                    await dictionary.provider.apply_snapshot(batch.tx, change, chunks)

            return await snapshots.apply_snapshot(batch, event, replace, max_items=self._max_items)
        refusal = check_revision(event.target, event.command.source_revision, batch.heads[event.target])
        if refusal is not None:
            return batch.finish([event.id], CommandVerdict(refusal=refusal))
        change = batch.commit(event, items=len(event.command.items))
        changes[event.target.dict_code].append((dictionary, change))
        return batch.finish([event.id], CommandVerdict(change.version))

    async def _refuse(self, case: _CommandCase, refusal: CommandRefusal) -> CommandVerdict:
        """Fail a command in its own transaction, unless another worker has processed it meanwhile."""
        event = case.event
        async with self._db.transaction() as tx:
            batch = await self._begin(tx, [event.target])
            if not await store.mark_processed(tx, [event], now=batch.now):
                return (await _recall_results(tx, [case], [CommandVerdict(is_repeated=True)]))[0]
            if event.command.is_chunk:
                verdict = await snapshots.refuse_chunk(batch, event, refusal)
            else:
                verdict = batch.finish([event.id], CommandVerdict(refusal=refusal))
            await batch.write()
        batch.log()
        return verdict


def is_snapshot(event: CommandEvent) -> bool:
    """Return whether the command of *event* is a SNAPSHOT."""
    return event.command.event_type is EventType.SNAPSHOT


def _needs_own_transaction(message: ParsedMessage) -> bool:
    """Return whether a message is applied alone: snapshots take long and need other plans; retries may fail again."""
    return message.attempt > 1 or (message.event is not None and is_snapshot(message.event))


def _split(messages: Sequence[ParsedMessage], error: Exception) -> list[Sequence[ParsedMessage]]:
    """Return the halves of *messages*, or single messages after a timeout: each attempt with the culprit takes one."""
    if isinstance(error, StatementTimeout):
        return [[message] for message in messages]
    half = len(messages) // 2
    return [messages[:half], messages[half:]]


async def _recall_results(
    tx: Connection, cases: Sequence[_CommandCase], verdicts: Sequence[CommandVerdict]
) -> list[CommandVerdict]:
    """Return *verdicts*, with the stored results in place of those of repeated commands."""
    keys = [case.key for case, verdict in zip(cases, verdicts, strict=True) if verdict.is_repeated]
    updates = await store.find_updates(tx, keys) if keys else {}
    firsts = {case.key: case.event.target for case in reversed(cases)}
    return [
        _recall_result(case, firsts[case.key], updates.get(case.key)) if verdict.is_repeated else verdict
        for case, verdict in zip(cases, verdicts, strict=True)
    ]


def _recall_result(case: _CommandCase, first: DictionaryKey, update: UpdateRecord | None) -> CommandVerdict:
    """Return the stored result of a repeated command, or a refusal if its id belongs to another dictionary."""
    code = update.dict_code if update else first.dict_code
    if code != case.event.target.dict_code:
        message = f"eventId {case.event.event_id} was used for {code}"
        return CommandVerdict(refusal=CommandRefusal("EVENT_ID_REUSED", message), is_repeated=True)
    if not update:
        return CommandVerdict(is_repeated=True)
    refusal = CommandRefusal(update.error_code, update.error_message or "") if update.error_code else None
    return CommandVerdict(update.committed_version, refusal, is_repeated=True)


@contextmanager
def _translate_sql_errors() -> Iterator[None]:
    """Convert the errors of a dictionary's statements, and tell temporary ones from permanent ones."""
    try:
        yield
    except (asyncpg.QueryCanceledError, asyncpg.TransactionTimeoutError) as error:
        raise StatementTimeout(counts=True) from error
    except TimeoutError as error:  # no answer, or many statements that are too slow together, but not each alone
        raise StatementTimeout(counts=False) from error
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        if is_transient(error):
            raise
        code = getattr(error, "sqlstate", None)
        message = f"{code} {error}" if code else str(error)
        raise UnappliableCommand(CommandRefusal("SQL_ERROR", format_error(message))) from error


def _log_repeated(cases: Sequence[_CommandCase], verdicts: Sequence[CommandVerdict]) -> None:
    """Log repeated commands, which have been logged as committed or failed before, for debugging."""
    log = structlog.get_logger()
    for case, verdict in zip(cases, verdicts, strict=True):
        if verdict.is_repeated:
            log.debug("command_repeated", **log_fields(case.event.id), version=verdict.version)


def apply_handler(applier: CommandApplier, metrics: RefdataMetrics, telemetry: Telemetry) -> Handler[BusDelivery]:
    """R11: return the handler of the commands topic."""

    async def handle(deliveries: Sequence[BusDelivery], stopping: asyncio.Event) -> Sequence[Outcome | None]:
        started = time_ns()
        parsed = [await _parse(delivery) for delivery in deliveries]
        verdicts: list[CommandVerdict] = []
        stopped_by: list[Outcome | None] = [None]
        try:
            events = [message for message in parsed if message.event is not None]
            async with aclosing(applier.apply_messages(events)) as applied:
                for message in parsed:
                    if stopping.is_set():
                        break
                    refused = CommandVerdict(refusal=message.refusal)
                    verdicts.append(refused if message.event is None else await anext(applied))
        except StatementTimeout as error:
            stopped_by = [Retry("an SQL statement of the dictionary timed out", counts=error.counts), None]
        except Transient as error:
            stopped_by = [Retry(f"{error.code}: {error.message}", counts=False)]
        except Exception as error:  # noqa: BLE001 - the edge: a defect of Penstock is not the command's fault
            structlog.get_logger().exception("apply_crashed")
            stopped_by = [Retry(f"{type(error).__name__}: {error}", counts=False)]
        metrics.count_commands(verdicts)
        for message, verdict in zip(parsed, verdicts, strict=False):
            _trace(telemetry, message, verdict, started)
        outcomes = [_make_outcome(message, verdict) for message, verdict in zip(parsed, verdicts, strict=False)]
        rest = len(parsed) - len(outcomes)
        return [*outcomes, *stopped_by[:rest], *[stopped_by[-1]] * (rest - len(stopped_by))]

    return handle


async def _parse(delivery: BusDelivery) -> ParsedMessage:
    if len(delivery.message.value) > _LARGE:
        await asyncio.sleep(0)  # let other tasks run
    return parse_message(delivery)


def _trace(telemetry: Telemetry, message: ParsedMessage, verdict: CommandVerdict, started: int) -> None:
    """R26: record the apply stage of a traced command."""
    event, refusal = message.event, verdict.refusal
    if event is None or event.trace is None or verdict.is_repeated:
        return
    telemetry.trace(
        "refdata.apply",
        event.trace,
        started,
        error=None if refusal is None else f"{refusal.code}: {refusal.message}",
        tenantId=event.target.tenant_id,
        dictCode=event.target.dict_code,
        eventId=str(event.event_id),
        version=verdict.version,
        source=event.source,
    )


def _make_outcome(message: ParsedMessage, verdict: CommandVerdict) -> Outcome:
    if verdict.refusal is None or message.is_probe:
        return Done()
    return Failed(f"{verdict.refusal.code}: {verdict.refusal.message}")
