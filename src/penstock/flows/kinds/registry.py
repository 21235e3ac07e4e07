"""F2, F14: the kinds that come with Penstock, and what their inputs must be, so that a mistake is told before a run."""

from collections.abc import Mapping

from penstock.flows.config import FlowsSection
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.kinds import http, python
from penstock.flows.kinds.inputs import checks
from penstock.flows.kinds.platform import harvest, ingest, refdata, tracking
from penstock.flows.step import CheckInputs
from penstock.kernel.clock import Clock

check_inputs: Mapping[str, CheckInputs] = {
    http.KIND: checks(http.HttpInputs),
    python.KIND: checks(python.PythonInputs),
    ingest.KIND: checks(ingest.IngestInputs),
    harvest.KIND: checks(harvest.HarvestInputs),
    refdata.KIND: checks(refdata.RefdataInputs),
    tracking.KIND: checks(tracking.TrackingInputs),
}
BUILT_IN_MODULES = ("penstock.flows.kinds.market.workers",)  # loaded by name, as those of `flows.modules` are
WAITING = frozenset({harvest.KIND, ingest.KIND, refdata.KIND, tracking.KIND})  # they wait for others, and do little


def open_catalogue(section: FlowsSection, clock: Clock | None = None) -> FlowCatalogue:
    """Return the catalogue of *section*, with the kinds that come with Penstock."""
    return FlowCatalogue(section, clock, kind_checks=check_inputs, built_in_modules=BUILT_IN_MODULES)
