"""F2, F14: what the inputs of the built-in kinds must be, so that a mistake is told when a run is asked for."""

from collections.abc import Mapping

from penstock.flows.kinds import harvest, http, ingest, market, python, refdata, tracking
from penstock.flows.kinds.reading import CheckInputs, checks

check_inputs: Mapping[str, CheckInputs] = {
    http.KIND: checks(http.HttpInputs),
    python.KIND: checks(python.PythonInputs),
    ingest.KIND: checks(ingest.IngestInputs),
    harvest.KIND: checks(harvest.HarvestInputs),
    refdata.KIND: checks(refdata.RefdataInputs),
    tracking.KIND: checks(tracking.TrackingInputs),
    **market.check_inputs,
}
