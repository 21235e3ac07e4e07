"""What all parts say over HTTP, they say alike."""

import pytest
from pydantic import BaseModel

from penstock.flows.api import schemas as flows
from penstock.harvest.api import schemas as harvest
from penstock.ingest.api import schemas as ingest
from penstock.overview import schemas as overview
from penstock.tracking.api import schemas as tracking

MOVE = {"from", "to", "actor", "at", "reason", "fence"}


@pytest.mark.parametrize(
    "told", [tracking.TrackingEvent, flows.FlowMove, ingest.IngestMove, harvest.HarvestMove, overview.OverviewEvent]
)
def test_a_move_has_one_shape(told: type[BaseModel]) -> None:
    """T17, F18, H13: from where to where, who, when, why and under which fence, whichever part tells it."""
    fields = set(told.model_json_schema(mode="serialization")["properties"])
    assert fields >= MOVE
    assert not fields & {"source", "target"}
