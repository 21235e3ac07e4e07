"""The moves of all parts as one stream, whichever databases their journals are in."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.flows import model as flows
from penstock.harvest import model as harvest
from penstock.ingest import model as ingest
from penstock.kernel.db.database import Database
from penstock.kernel.machine import StateMachine
from penstock.kernel.states.event_stream import ChangeNotifications, JournalTail, LiveEvents
from penstock.kernel.states.journal import StoredEntry
from penstock.overview import schemas
from penstock.overview.contract import Part
from penstock.refdata import model as refdata
from penstock.tracking import model as tracking

MACHINES: Mapping[Part, Sequence[StateMachine[Any]]] = {
    Part.TRACKING: list(tracking.MACHINES.values()),
    Part.REFDATA: [refdata.UPDATE, refdata.SNAPSHOT],
    Part.INGEST: [ingest.RUN],
    Part.HARVEST: [harvest.PLAN, harvest.RUN, harvest.PARTITION],
    Part.FLOWS: [flows.RUN, flows.STEP],
}
PART_OF: Mapping[str, Part] = {machine.name: part for part, machines in MACHINES.items() for machine in machines}


class EventHistory(LiveEvents):
    """The stream of the moves of all parts."""


def make_event_history(databases: Mapping[Part, Database], notifiers: Sequence[ChangeNotifications]) -> EventHistory:
    """Return the stream of all parts. Parts that share a database share a journal, and so one order of moves."""
    machines: dict[Database, list[str]] = {}
    for part, db in databases.items():
        machines.setdefault(db, []).extend(machine.name for machine in MACHINES[part])
    return EventHistory([JournalTail(db, names) for db, names in machines.items()], notifiers)


def make_encoder(subject_prefix: str) -> Callable[[StoredEntry], schemas.OverviewEvent | None]:
    """Return a function that makes an event of a journal entry, or None if its subject lacks the prefix."""

    def encode(stored: StoredEntry) -> schemas.OverviewEvent | None:
        entry = stored.entry
        if not entry.subject.startswith(subject_prefix):
            return None
        return schemas.OverviewEvent(
            part=PART_OF[entry.machine], **{name: getattr(entry, name) for name in entry.__slots__}
        )

    return encode
