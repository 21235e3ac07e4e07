"""The shared schemas of all parts."""

import pytest
from pydantic import BaseModel

from penstock.flows.api import schemas as flows
from penstock.harvest.api import schemas as harvest
from penstock.ingest.api import schemas as ingest
from penstock.overview import schemas as overview
from penstock.tracking.api import schemas as tracking

MOVE = {"from", "to", "actor", "at", "reason", "fence"}


@pytest.mark.parametrize(
    "model", [tracking.TrackingEvent, flows.FlowMove, ingest.IngestMove, harvest.HarvestMove, overview.OverviewEvent]
)
def test_a_move_has_one_shape(model: type[BaseModel]) -> None:
    """T17, F18, H13: a move of every part has source, target, actor, time, reason and fence."""
    fields = set(model.model_json_schema(mode="serialization")["properties"])
    assert fields >= MOVE
    assert not fields & {"source", "target"}
