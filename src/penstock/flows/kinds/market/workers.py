"""F13: the three kinds of the founding document, in a module that is loaded like a user's module."""

from penstock.flows.contract import CHART_EXPORT
from penstock.flows.kinds.inputs import make_input_check
from penstock.flows.kinds.market.charts import OpenRenderer, worker_charts
from penstock.flows.kinds.market.manifest import MANIFEST, MANIFEST_OUTPUT, check_manifest, check_unresolved_inputs
from penstock.flows.kinds.market.ohlcv import OHLCV_EXPORT, OhlcvInputs, worker_ohlcv_export
from penstock.flows.kinds.market.renderers import open_image_api, open_local_renderer
from penstock.flows.kinds.market.report import LLM_REPORT, ReportInputs, ReportModel, worker_llm_report
from penstock.flows.step import KindContext, ReportCheck, Workers
from penstock.kernel.config.loader import SecretRef, resolve_secret

kinds = Workers()
kinds.declare(OHLCV_EXPORT, check_inputs=make_input_check(OhlcvInputs))
kinds.declare(
    CHART_EXPORT,
    check_inputs=check_unresolved_inputs,
    check_report=ReportCheck(MANIFEST, MANIFEST_OUTPUT, check_manifest),
)
kinds.declare(LLM_REPORT, check_inputs=make_input_check(ReportInputs))


def make_workers(context: KindContext) -> Workers:
    """Return the workers of OHLCV_EXPORT, CHART_EXPORT and LLM_REPORT with their configuration."""
    section, workers, llm = context.section, Workers(), context.section.llm
    images, url = section.images, section.images.url
    images_token, llm_token = _resolve_token("images", images.token), _resolve_token("llm", llm.token)
    renderer: OpenRenderer = (
        open_local_renderer
        if url is None
        else lambda: open_image_api(images, url, images_token, context.clock, context.pause)
    )
    model = ReportModel(llm, llm.url, llm_token, context.clock, context.pause) if llm.url else None
    workers.worker(OHLCV_EXPORT)(worker_ohlcv_export(section.files, context.query))
    workers.worker(CHART_EXPORT)(worker_charts(renderer))
    workers.worker(LLM_REPORT)(worker_llm_report(model))
    return workers


def _resolve_token(name: str, token: SecretRef | None) -> str | None:
    return resolve_secret(token, f"flows.{name}.token") if token else None
