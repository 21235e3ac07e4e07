"""All state machines and their pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

from docs.generators.diagram import draw

from penstock.flows import model as flows
from penstock.harvest import model as harvest
from penstock.ingest import model as ingest
from penstock.kernel.machine import StateMachine
from penstock.refdata import model as refdata
from penstock.tracking import model as tracking

# By the name of the picture. All stages of tracking have the same machine.
MACHINES: Mapping[str, Sequence[StateMachine[Any]]] = {
    "tracking-stage": list(tracking.MACHINES.values()),
    "refdata-update": [refdata.UPDATE],
    "refdata-snapshot": [refdata.SNAPSHOT],
    "ingest-run": [ingest.RUN],
    "harvest-plan": [harvest.PLAN],
    "harvest-run": [harvest.RUN],
    "harvest-partition": [harvest.PARTITION],
    "flows-run": [flows.RUN],
    "flows-step": [flows.STEP],
}


def pictures() -> dict[str, str]:
    """Return all pictures by their path below docs/."""
    return {f"images/machines/{name}.svg": draw(machines[0], name) for name, machines in MACHINES.items()}
