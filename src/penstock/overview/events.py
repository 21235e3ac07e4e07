"""Every move of every part as one stream, whichever databases their journals are in."""

from collections.abc import Callable, Mapping, Sequence

from penstock.kernel.db.database import Database
from penstock.kernel.states.event_stream import Live, Ringing, Tail
from penstock.kernel.states.journal import Noted
from penstock.overview import wire
from penstock.overview.contract import Part
from penstock.overview.machines import MACHINES, PART_OF


def all_moves(databases: Mapping[Part, Database], bells: Sequence[Ringing]) -> Live:
    """The moves of all parts. Parts whose database is the same have one journal, told in its order."""
    machines: dict[Database, list[str]] = {}
    for part, db in databases.items():
        machines.setdefault(db, []).extend(machine.name for machine in MACHINES[part])
    return Live([Tail(db, names) for db, names in machines.items()], bells)


def told(subject: str) -> Callable[[Noted], wire.Event | None]:
    """What is told of a move to those who watch subjects that begin so."""

    def fitting(noted: Noted) -> wire.Event | None:
        entry = noted.entry
        if not entry.subject.startswith(subject):
            return None
        return wire.Event(part=PART_OF[entry.machine], **{name: getattr(entry, name) for name in entry.__slots__})

    return fitting
