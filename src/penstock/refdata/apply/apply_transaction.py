"""What one transaction decides, and how it is written down: versions, ends of updates, what is to be told."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from penstock.kernel.db.database import Connection
from penstock.refdata import store
from penstock.refdata.model import Change, Commit, Dict, Event, Standing, Verdict, changed_keys, next_standing


@dataclass
class Judging:
    """The decisions of a transaction that holds the dictionaries in *standings*."""

    tx: Connection
    actor: str
    now: datetime
    standings: dict[Dict, Standing]
    commits: list[Commit] = field(default_factory=list)
    ended: list[tuple[Dict, UUID, Verdict]] = field(default_factory=list)

    def commit(self, event: Event, *, items: int) -> Change:
        """Give *event* the next version of its dictionary."""
        command, target = event.command, event.target
        standing = next_standing(self.standings[target], command.source_revision)
        self.standings[target] = standing
        self.commits.append(
            Commit(
                target,
                event.event_id,
                standing.version,
                command.event_type,
                event.source,
                command.source_revision,
                items,
                changed_keys(command),
                event.trace,
            )
        )
        occurred_at = command.occurred_at or self.now
        return Change(target, event.event_id, command, standing.version, occurred_at, self.now)

    def end(self, target: Dict, event_ids: Sequence[UUID], verdict: Verdict) -> Verdict:
        """Let updates end so."""
        self.ended += [(target, event_id, verdict) for event_id in event_ids]
        return verdict

    async def write(self) -> None:
        """Write it all down; at the commit it is so."""
        advanced = {commit.target: self.standings[commit.target] for commit in self.commits}
        await store.advance(self.tx, advanced, now=self.now)
        await store.finish(self.tx, self.ended, actor=self.actor, now=self.now)
        await store.tell(self.tx, self.commits, now=self.now)
        await store.notify(self.tx)
