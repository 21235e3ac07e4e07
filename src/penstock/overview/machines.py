"""Whose machines are whose: the journal tells a machine, people ask for a part."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.flows import model as flows
from penstock.harvest import model as harvest
from penstock.ingest import model as ingest
from penstock.kernel.machine import Machine
from penstock.overview.contract import Part
from penstock.refdata import model as refdata
from penstock.tracking import model as tracking

MACHINES: Mapping[Part, Sequence[Machine[Any]]] = {
    Part.TRACKING: list(tracking.MACHINES.values()),
    Part.REFDATA: [refdata.UPDATE, refdata.SNAPSHOT],
    Part.INGEST: [ingest.RUN],
    Part.HARVEST: [harvest.PLAN, harvest.RUN, harvest.PARTITION],
    Part.FLOWS: [flows.RUN, flows.STEP],
}
PART_OF: Mapping[str, Part] = {machine.name: part for part, machines in MACHINES.items() for machine in machines}
