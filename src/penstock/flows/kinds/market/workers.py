"""F13: the founding document's three workers, as the configuration has them."""

import asyncio
from collections.abc import Mapping

from penstock.flows.config import FlowsSection
from penstock.flows.contract import CHART_EXPORT, LLM_REPORT, MANIFEST, MANIFEST_OUTPUT, OHLCV_EXPORT
from penstock.flows.kinds.http_client import Pause
from penstock.flows.kinds.inputs import checks
from penstock.flows.kinds.market.charts import OpenPainter, worker_charts
from penstock.flows.kinds.market.manifest import check_written, verdict
from penstock.flows.kinds.market.ohlcv import OhlcvInputs, Query, worker_ohlcv_export
from penstock.flows.kinds.market.renderers import drawn_here, image_api, opened
from penstock.flows.kinds.market.report import Model, ReportInputs, worker_llm_report
from penstock.flows.step import CheckInputs, ReportCheck, Workers
from penstock.kernel.clock import Clock, SystemClock

check_inputs: Mapping[str, CheckInputs] = {  # F2, F12: what is looked over when a run is asked for
    OHLCV_EXPORT: checks(OhlcvInputs),
    CHART_EXPORT: check_written,
    LLM_REPORT: checks(ReportInputs),
}
check_reports: Mapping[str, ReportCheck] = {CHART_EXPORT: ReportCheck(MANIFEST, MANIFEST_OUTPUT, verdict)}


def market_workers(
    section: FlowsSection,
    query: Query | None = None,
    *,
    image_token: str | None = None,
    llm_token: str | None = None,
    clock: Clock | None = None,
    pause: Pause = asyncio.sleep,
) -> Workers:
    """OHLCV_EXPORT, CHART_EXPORT and LLM_REPORT; *query* asks the database, the tokens are the secrets themselves."""
    llm, workers, time = section.llm, Workers(), clock or SystemClock()
    model = Model(llm, llm.url, llm_token, time, pause) if llm.url else None
    workers.worker(OHLCV_EXPORT)(worker_ohlcv_export(section.files, query))
    workers.worker(CHART_EXPORT)(worker_charts(_painter(section, image_token, time, pause)))
    workers.worker(LLM_REPORT)(worker_llm_report(model))
    return workers


def _painter(section: FlowsSection, token: str | None, clock: Clock, pause: Pause) -> OpenPainter:
    """The image API when one is set, else the painter of our own."""
    if section.images.url is None:
        return drawn_here
    api = image_api(section.images, section.images.url, token, clock, pause)
    return lambda: opened(api)
