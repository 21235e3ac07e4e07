"""Every state machine there is, and its picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from docs.generators.drawing import draw

from penstock.flows import model as flows
from penstock.harvest import model as harvest
from penstock.ingest import model as ingest
from penstock.kernel.machine import StateMachine
from penstock.refdata import model as refdata
from penstock.tracking import model as tracking

# By the names of their pictures. The stages of tracking are alike.
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
    """All pictures, by their places under docs/."""
    return {f"images/machines/{name}.svg": draw(alike[0], name) for name, alike in MACHINES.items()}
