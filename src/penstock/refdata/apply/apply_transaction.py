"""The decisions of one transaction, and how they are stored and logged: versions, results and invalidations."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import structlog

from penstock.kernel.db.database import Connection
from penstock.kernel.telemetry.log_level import LOG_LEVEL
from penstock.refdata import store
from penstock.refdata.model import (
    CommandCommit,
    CommandEvent,
    CommandId,
    CommandVerdict,
    DictionaryHead,
    DictionaryKey,
    ItemChange,
    list_changed_keys,
    make_next_head,
)
from penstock.refdata.store import EventKey


@dataclass
class ApplyTransaction:
    """The decisions of a transaction that has locked the dictionaries in *heads*."""

    tx: Connection
    actor: str
    now: datetime
    heads: dict[DictionaryKey, DictionaryHead]
    commits: list[CommandCommit] = field(default_factory=list)
    results: list[tuple[CommandId, CommandVerdict]] = field(default_factory=list)
    finished: set[EventKey] = field(default_factory=set)  # commands whose result was stored and is final

    def commit(self, event: CommandEvent, *, items: int) -> ItemChange:
        """Give *event* the next version of its dictionary."""
        command, target = event.command, event.target
        head = make_next_head(self.heads[target], command.source_revision)
        self.heads[target] = head
        self.commits.append(
            CommandCommit(
                target,
                event.event_id,
                head.version,
                command.event_type,
                event.source,
                command.source_revision,
                items,
                list_changed_keys(command),
                event.trace,
            )
        )
        occurred_at = command.occurred_at or self.now
        return ItemChange(target, event.event_id, command, head.version, occurred_at, self.now)

    def finish(self, commands: Iterable[CommandId], verdict: CommandVerdict) -> CommandVerdict:
        """Set *verdict* as the result of *commands*, and return it."""
        self.results += [(command, verdict) for command in commands]
        return verdict

    async def write(self) -> None:
        """Store all decisions; they are durable when the transaction commits."""
        advanced = {commit.target: self.heads[commit.target] for commit in self.commits}
        await store.advance_heads(self.tx, advanced, now=self.now)
        self.finished = await store.finish_updates(self.tx, self.results, actor=self.actor, now=self.now)
        await store.append_outbox(self.tx, self.commits, now=self.now)
        await store.notify_commit(self.tx)

    def log(self) -> None:
        """R26: log one line for each command that is committed or failed now. Call it once, after the commit."""
        log, level = structlog.get_logger().bind(), LOG_LEVEL.number
        for command, (version, refusal, _) in self.results:
            if (command.target.tenant_id, command.event_id) not in self.finished:
                if level <= logging.DEBUG:
                    log.debug("chunk_staged", **log_fields(command))
            elif refusal is not None:
                log.warning("command_failed", **log_fields(command), code=refusal.code, error=refusal.message)
            elif level <= logging.INFO:
                log.info("command_committed", **log_fields(command), version=version)


def log_fields(command: CommandId) -> dict[str, Any]:
    """Return the fields that identify *command* in a log line; `trace_id` only if the command belongs to a trace."""
    fields = {
        "eventId": str(command.event_id),
        "dictCode": command.target.dict_code,
        "source": str(command.source),
        "tenantId": command.target.tenant_id,
    }
    return {**fields, "trace_id": command.trace.split("-")[1]} if command.trace else fields
