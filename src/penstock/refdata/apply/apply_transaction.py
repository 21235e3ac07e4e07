"""What one transaction decides, and how it is written down: versions, ends of updates, what is to be told."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from penstock.kernel.db.database import Connection
from penstock.refdata import store
from penstock.refdata.model import (
    CommandCommit,
    CommandEvent,
    CommandVerdict,
    DictionaryHead,
    DictionaryKey,
    ItemChange,
    list_changed_keys,
    next_head,
)


@dataclass
class ApplyTransaction:
    """The decisions of a transaction that holds the dictionaries in *standings*."""

    tx: Connection
    actor: str
    now: datetime
    standings: dict[DictionaryKey, DictionaryHead]
    commits: list[CommandCommit] = field(default_factory=list)
    ended: list[tuple[DictionaryKey, UUID, CommandVerdict]] = field(default_factory=list)

    def commit(self, event: CommandEvent, *, items: int) -> ItemChange:
        """Give *event* the next version of its dictionary."""
        command, target = event.command, event.target
        standing = next_head(self.standings[target], command.source_revision)
        self.standings[target] = standing
        self.commits.append(
            CommandCommit(
                target,
                event.event_id,
                standing.version,
                command.event_type,
                event.source,
                command.source_revision,
                items,
                list_changed_keys(command),
                event.trace,
            )
        )
        occurred_at = command.occurred_at or self.now
        return ItemChange(target, event.event_id, command, standing.version, occurred_at, self.now)

    def end(self, target: DictionaryKey, event_ids: Sequence[UUID], verdict: CommandVerdict) -> CommandVerdict:
        """Let updates end so."""
        self.ended += [(target, event_id, verdict) for event_id in event_ids]
        return verdict

    async def write(self) -> None:
        """Write it all down; at the commit it is so."""
        advanced = {commit.target: self.standings[commit.target] for commit in self.commits}
        await store.advance_heads(self.tx, advanced, now=self.now)
        await store.finish_updates(self.tx, self.ended, actor=self.actor, now=self.now)
        await store.append_outbox(self.tx, self.commits, now=self.now)
        await store.notify_commit(self.tx)
