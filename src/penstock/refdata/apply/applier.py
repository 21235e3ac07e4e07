"""R11: commands become versions, each exactly once, however often it is delivered and whoever wakes up late."""

import asyncio
import logging
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
from penstock.refdata.apply.apply_transaction import ApplyTransaction
from penstock.refdata.commands import messages
from penstock.refdata.commands.messages import ParsedMessage
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
_TOO_SLOW = CommandRefusal("STATEMENT_TIMEOUT", "its statement was given up time after time")


class UnappliableCommand(Exception):
    """A dictionary's own statement failed, and would fail again: one of the events at hand cannot be applied."""

    def __init__(self, refusal: CommandRefusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class StatementTimeout(Exception):
    """A dictionary's own statement was given up: it may be the event's fault; the server's, when it does not count."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.counts = counts


class _CommandCase(NamedTuple):
    """An event, and the dictionary it changes or the reason why it must not."""

    event: CommandEvent
    dictionary: Dictionary | None
    refusal: CommandRefusal | None = None

    @property
    def key(self) -> tuple[str, UUID]:
        return self.event.target.tenant_id, self.event.event_id


class CommandApplier:
    """Applies what was read from the bus; *actor* is the name it goes by in the history."""

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

    async def settle(self, reads: Sequence[ParsedMessage]) -> AsyncGenerator[CommandVerdict, None]:
        """What became of each, in order, told when it is durable. Each must name an event."""
        for is_alone, run in groupby(reads, key=_goes_alone):
            for together in [[read] for read in run] if is_alone else [list(run)]:
                async with aclosing(self._settle(together)) as verdicts:
                    async for verdict in verdicts:
                        yield verdict

    async def _settle(self, reads: Sequence[ParsedMessage]) -> AsyncGenerator[CommandVerdict, None]:
        """In one transaction if it goes, else in smaller parts, until the one that cannot be applied is alone."""
        try:
            verdicts = await self._apply([self._case(read) for read in reads])
        except (UnappliableCommand, StatementTimeout) as error:
            if len(reads) > 1:
                for part in _smaller(reads, error):
                    async with aclosing(self._settle(part)) as inner:
                        async for verdict in inner:
                            yield verdict
                return
            if isinstance(error, StatementTimeout) and (not error.counts or reads[0].attempt < self._max_attempts):
                raise
            refusal = error.refusal if isinstance(error, UnappliableCommand) else _TOO_SLOW
            verdicts = [await self._refuse(self._case(reads[0]), refusal)]
        for verdict in verdicts:
            yield verdict

    def _case(self, read: ParsedMessage) -> _CommandCase:
        event = read.event
        if event is None:
            raise ValueError("nobody knows whose this is")
        if read.refusal is not None:
            return _CommandCase(event, None, read.refusal)
        try:
            return _CommandCase(event, self._catalogue.get_writable(event.target))
        except PenstockError as error:
            return _CommandCase(event, None, CommandRefusal(error.code, error.message))

    async def _apply(self, cases: Sequence[_CommandCase]) -> list[CommandVerdict]:
        """All of it in one transaction, holding the dictionaries from before the look at what was processed."""
        async with self._db.transaction() as tx:
            if is_snapshot(cases[0].event):
                await enable_all_plans(tx)
            judging = await self._judging(tx, [case.event.target for case in cases if case.dictionary])
            new = await store.mark_processed(tx, [case.event for case in cases], now=judging.now)
            verdicts = await self._judge(judging, cases, new)
            await judging.write()
        for case, verdict in zip(cases, verdicts, strict=True):
            _log(case.event, verdict)
        return verdicts

    async def _judging(self, tx: Connection, targets: Sequence[DictionaryKey]) -> ApplyTransaction:
        now = self._db.clock.now()
        return ApplyTransaction(tx, self._actor, now, await store.lock_dictionaries(tx, targets, now=now))

    async def _judge(
        self, judging: ApplyTransaction, cases: Sequence[_CommandCase], new: set[tuple[str, UUID]]
    ) -> list[CommandVerdict]:
        verdicts: list[CommandVerdict] = []
        changes: dict[str, list[tuple[Dictionary, ItemChange]]] = defaultdict(list)
        for case in cases:
            if case.key not in new:
                verdicts.append(CommandVerdict(is_repeated=True))
                continue
            new.discard(case.key)  # should it come a second time among these, it is a repetition
            verdicts.append(await self._judge_one(judging, case, changes))
        for written in changes.values():
            with _their_statement():
                await written[0][0].provider.apply_delta(judging.tx, [change for _, change in written])
        if judging.commits:
            with _their_statement():  # what they put off to the commit is looked at now, while it can be told apart
                await judging.tx.execute("SET CONSTRAINTS ALL IMMEDIATE")
        return await _recalled(judging.tx, cases, verdicts)

    async def _judge_one(
        self, judging: ApplyTransaction, case: _CommandCase, changes: dict[str, list[tuple[Dictionary, ItemChange]]]
    ) -> CommandVerdict:
        event, dictionary = case.event, case.dictionary
        if dictionary is None:
            return judging.end(event.target, [event.event_id], CommandVerdict(refusal=case.refusal))
        if is_snapshot(event):

            async def replace(change: ItemChange, chunks: Chunks) -> None:
                with _their_statement():
                    items = sum(map(len, chunks))
                    if refusal := await retained_versions.check_snapshot(judging.tx, dictionary, change, items):
                        raise UnappliableCommand(refusal)
                    await dictionary.provider.apply_snapshot(judging.tx, change, chunks)

            return await snapshots.judge(judging, event, replace, max_items=self._max_items)
        refusal = check_revision(event.target, event.command.source_revision, judging.standings[event.target])
        if refusal is not None:
            return judging.end(event.target, [event.event_id], CommandVerdict(refusal=refusal))
        change = judging.commit(event, items=len(event.command.items))
        changes[event.target.dict_code].append((dictionary, change))
        return judging.end(event.target, [event.event_id], CommandVerdict(change.version))

    async def _refuse(self, case: _CommandCase, refusal: CommandRefusal) -> CommandVerdict:
        """Let an event fail in a transaction of its own, unless somebody judged it meanwhile."""
        event = case.event
        async with self._db.transaction() as tx:
            judging = await self._judging(tx, [event.target])
            if not await store.mark_processed(tx, [event], now=judging.now):
                return (await _recalled(tx, [case], [CommandVerdict(is_repeated=True)]))[0]
            if event.command.is_chunk:
                verdict = await snapshots.refuse(judging, event, refusal)
            else:
                verdict = judging.end(event.target, [event.event_id], CommandVerdict(refusal=refusal))
            await judging.write()
        _log(event, verdict)
        return verdict


def is_snapshot(event: CommandEvent) -> bool:
    return event.command.event_type is EventType.SNAPSHOT


def _goes_alone(read: ParsedMessage) -> bool:
    """A snapshot takes long, and wants other plans than single items do; what failed before may do so again."""
    return read.attempt > 1 or (read.event is not None and is_snapshot(read.event))


def _smaller(reads: Sequence[ParsedMessage], error: Exception) -> list[Sequence[ParsedMessage]]:
    """Halves; but one by one where every further look at the culprit costs a whole time-out."""
    if isinstance(error, StatementTimeout):
        return [[read] for read in reads]
    half = len(reads) // 2
    return [reads[:half], reads[half:]]


async def _recalled(
    tx: Connection, cases: Sequence[_CommandCase], verdicts: Sequence[CommandVerdict]
) -> list[CommandVerdict]:
    """*verdicts*, with what was said before of those that are repeated."""
    keys = [case.key for case, verdict in zip(cases, verdicts, strict=True) if verdict.is_repeated]
    known = await store.find_updates(tx, keys) if keys else {}
    firsts = {case.key: case.event.target for case in reversed(cases)}
    return [
        _of_before(case, firsts[case.key], known.get(case.key)) if verdict.is_repeated else verdict
        for case, verdict in zip(cases, verdicts, strict=True)
    ]


def _of_before(case: _CommandCase, first: DictionaryKey, known: UpdateRecord | None) -> CommandVerdict:
    """What is to be said of an event whose id came before: the same, unless it was another dictionary's."""
    code = known.dict_code if known else first.dict_code
    if code != case.event.target.dict_code:
        said = f"eventId {case.event.event_id} was used for {code}"
        return CommandVerdict(refusal=CommandRefusal("EVENT_ID_REUSED", said), is_repeated=True)
    if not known:
        return CommandVerdict(is_repeated=True)
    refusal = CommandRefusal(known.error_code, known.error_message or "") if known.error_code else None
    return CommandVerdict(known.committed_version, refusal, is_repeated=True)


@contextmanager
def _their_statement() -> Iterator[None]:
    """Tell failures of a dictionary's own statements from those of ours, and those of the moment from lasting ones."""
    try:
        yield
    except (asyncpg.QueryCanceledError, asyncpg.TransactionTimeoutError) as error:
        raise StatementTimeout(counts=True) from error
    except TimeoutError as error:  # nobody answers; or many statements together take too long, each of them not
        raise StatementTimeout(counts=False) from error
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        if is_transient(error):
            raise
        code = getattr(error, "sqlstate", None)
        said = f"{code} {error}" if code else str(error)
        raise UnappliableCommand(CommandRefusal("SQL_ERROR", format_error(said))) from error


def _log(event: CommandEvent, verdict: CommandVerdict) -> None:
    """R26: one line per event, as loud as it needs a person: not at all, or a look."""
    log = structlog.get_logger()
    if verdict.refusal is None and not log.is_enabled_for(logging.DEBUG):
        return
    about = {
        "tenantId": event.target.tenant_id,
        "dictCode": event.target.dict_code,
        "eventId": str(event.event_id),
        "source": event.source,
        "version": verdict.version,
        **({"trace_id": event.trace.split("-")[1]} if event.trace else {}),
    }
    if verdict.is_repeated:
        log.debug("event_repeated", **about)
    elif verdict.refusal is not None:
        log.warning("event_failed", code=verdict.refusal.code, error=verdict.refusal.message, **about)
    else:
        log.debug("chunk_staged" if verdict.version is None else "event_committed", **about)


def apply_handler(applier: CommandApplier, metrics: RefdataMetrics, telemetry: Telemetry) -> Handler[BusDelivery]:
    """R11: the handler of the commands' topic."""

    async def handle(deliveries: Sequence[BusDelivery], stopping: asyncio.Event) -> Sequence[Outcome | None]:
        began = time_ns()
        reads = [await _read(delivery) for delivery in deliveries]
        verdicts: list[CommandVerdict] = []
        stopped_by: list[Outcome | None] = [None]
        try:
            async with aclosing(applier.settle([read for read in reads if read.event is not None])) as settled:
                for one in reads:
                    if stopping.is_set():
                        break
                    verdicts.append(CommandVerdict(refusal=one.refusal) if one.event is None else await anext(settled))
        except StatementTimeout as error:
            stopped_by = [Retry("its statement was given up", counts=error.counts), None]
        except Transient as error:
            stopped_by = [Retry(f"{error.code}: {error.message}", counts=False)]
        except Exception as error:  # noqa: BLE001 - the edge: what is wrong with us is not the command's fault
            structlog.get_logger().exception("apply_crashed")
            stopped_by = [Retry(f"{type(error).__name__}: {error}", counts=False)]
        metrics.count(verdicts)
        for one, verdict in zip(reads, verdicts, strict=False):
            _trace(telemetry, one, verdict, began)
        outcomes = [_outcome(one, verdict) for one, verdict in zip(reads, verdicts, strict=False)]
        rest = len(reads) - len(outcomes)
        return [*outcomes, *stopped_by[:rest], *[stopped_by[-1]] * (rest - len(stopped_by))]

    return handle


async def _read(delivery: BusDelivery) -> ParsedMessage:
    if len(delivery.message.value) > _LARGE:
        await asyncio.sleep(0)  # let others have their turn
    return messages.parse_message(delivery)


def _trace(telemetry: Telemetry, read: ParsedMessage, verdict: CommandVerdict, began: int) -> None:
    """R26: the stage of a traced command that ends here."""
    if read.event is None or read.event.trace is None or verdict.is_repeated:
        return
    event, refusal = read.event, verdict.refusal
    telemetry.trace(
        "refdata.apply",
        event.trace,
        began,
        error=None if refusal is None else f"{refusal.code}: {refusal.message}",
        tenantId=event.target.tenant_id,
        dictCode=event.target.dict_code,
        eventId=str(event.event_id),
        version=verdict.version,
        source=event.source,
    )


def _outcome(read: ParsedMessage, verdict: CommandVerdict) -> Outcome:
    if verdict.refusal is None or read.is_probe:
        return Done()
    return Failed(f"{verdict.refusal.code}: {verdict.refusal.message}")
