"""F2, F14: the built-in step kinds and the checks of their inputs, so that errors are reported before a run."""

from collections.abc import Mapping

from penstock.flows.config import FlowsSection
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.kinds import http, python
from penstock.flows.kinds.inputs import make_input_check
from penstock.flows.kinds.platform import harvest, ingest, refdata, tracking
from penstock.flows.step import CheckInputs
from penstock.kernel.clock import Clock

check_inputs: Mapping[str, CheckInputs] = {
    http.KIND: make_input_check(http.HttpInputs),
    python.KIND: make_input_check(python.PythonInputs),
    ingest.KIND: make_input_check(ingest.IngestInputs),
    harvest.KIND: make_input_check(harvest.HarvestInputs),
    refdata.KIND: make_input_check(refdata.RefdataInputs),
    tracking.KIND: make_input_check(tracking.TrackingInputs),
}
BUILT_IN_MODULES = ("penstock.flows.kinds.market.workers",)  # loaded by name, like the modules of `flows.modules`
WAITING = frozenset({harvest.KIND, ingest.KIND, refdata.KIND, tracking.KIND})  # they mostly wait for other parts


def open_catalogue(section: FlowsSection, clock: Clock | None = None) -> FlowCatalogue:
    """Return the catalogue of *section*, with the built-in kinds."""
    return FlowCatalogue(section, clock, kind_checks=check_inputs, built_in_modules=BUILT_IN_MODULES)
