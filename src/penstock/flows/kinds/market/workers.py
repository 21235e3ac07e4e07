"""F13: the founding document's three kinds, in a module that is loaded as a user's is."""

from penstock.flows.contract import CHART_EXPORT
from penstock.flows.kinds.inputs import checks
from penstock.flows.kinds.market.charts import OpenPainter, worker_charts
from penstock.flows.kinds.market.manifest import MANIFEST, MANIFEST_OUTPUT, check_written, verdict
from penstock.flows.kinds.market.ohlcv import OHLCV_EXPORT, OhlcvInputs, worker_ohlcv_export
from penstock.flows.kinds.market.renderers import drawn_here, image_api
from penstock.flows.kinds.market.report import LLM_REPORT, ReportInputs, ReportModel, worker_llm_report
from penstock.flows.step import KindContext, ReportCheck, Workers
from penstock.kernel.config.loader import SecretRef, resolve_secret

kinds = Workers()
kinds.declare(OHLCV_EXPORT, check_inputs=checks(OhlcvInputs))
kinds.declare(CHART_EXPORT, check_inputs=check_written, check_report=ReportCheck(MANIFEST, MANIFEST_OUTPUT, verdict))
kinds.declare(LLM_REPORT, check_inputs=checks(ReportInputs))


def make_workers(context: KindContext) -> Workers:
    """Return the workers of OHLCV_EXPORT, CHART_EXPORT and LLM_REPORT, as the configuration has them."""
    section, workers, llm = context.section, Workers(), context.section.llm
    images, url = section.images, section.images.url
    images_token, llm_token = _token("images", images.token), _token("llm", llm.token)
    painter: OpenPainter = (
        drawn_here if url is None else lambda: image_api(images, url, images_token, context.clock, context.pause)
    )
    model = ReportModel(llm, llm.url, llm_token, context.clock, context.pause) if llm.url else None
    workers.worker(OHLCV_EXPORT)(worker_ohlcv_export(section.files, context.query))
    workers.worker(CHART_EXPORT)(worker_charts(painter))
    workers.worker(LLM_REPORT)(worker_llm_report(model))
    return workers


def _token(name: str, token: SecretRef | None) -> str | None:
    return resolve_secret(token, f"flows.{name}.token") if token else None
