"""F2, F14: what the inputs of the built-in kinds must be, so that a mistake is told when a run is asked for."""

from collections.abc import Mapping

from penstock.flows.kinds import http, python
from penstock.flows.kinds.inputs import checks
from penstock.flows.kinds.market import workers
from penstock.flows.kinds.platform import harvest, ingest, refdata, tracking
from penstock.flows.step import CheckInputs, ReportCheck

check_inputs: Mapping[str, CheckInputs] = {
    http.KIND: checks(http.HttpInputs),
    python.KIND: checks(python.PythonInputs),
    ingest.KIND: checks(ingest.IngestInputs),
    harvest.KIND: checks(harvest.HarvestInputs),
    refdata.KIND: checks(refdata.RefdataInputs),
    tracking.KIND: checks(tracking.TrackingInputs),
    **workers.check_inputs,
}
check_reports: Mapping[str, ReportCheck] = workers.check_reports
WAITING = frozenset({harvest.KIND, ingest.KIND, refdata.KIND, tracking.KIND})  # they wait for others, and do little
