"""F6, F12: the engine first accepts a report, then publishes its artifacts, then ends its step."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import asyncpg
import structlog

from penstock.flows import artifacts, store
from penstock.flows.artifacts import CheckOwnership
from penstock.flows.contract import StepReportKind, StepStatus, make_artifact_folder
from penstock.flows.engine.decide import make_failure
from penstock.flows.model import StepEnd, StepError, StepReport
from penstock.flows.step import ReportCheck
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Invalid
from penstock.kernel.storage import Storage
from penstock.kernel.text import format_time

_log = structlog.get_logger()


class FlowPublisher:
    """The publication of the files that attempts wrote, as artifacts of their step."""

    def __init__(self, storage: Storage, report_checks: Mapping[str, ReportCheck]) -> None:
        self.storage = storage
        self._report_checks = report_checks

    async def check_report(self, row: asyncpg.Record, report: StepReport) -> StepReport:
        """F12: return the report after its check: files in the store count, not the claims of the worker."""
        try:
            names = artifacts.check_names(report.artifacts)
        except Invalid as error:  # an invalid report fails its step, not the other reports of its batch
            return _refuse(replace(report, artifacts=()), StepError(error.code, error.message))
        missing = await artifacts.find_missing(self.storage, row["run_id"], row["step_id"], report.fence, names)
        if missing and report.outcome is StepReportKind.SUCCEEDED:
            report = _refuse(report, artifacts.make_missing_error(missing))
        report = replace(report, artifacts=names)
        check = self._report_checks.get(row["kind"])
        return report if check is None else await self._check_document(row, report, check)

    async def _check_document(self, row: asyncpg.Record, report: StepReport, check: ReportCheck) -> StepReport:
        name = check.document
        data = await artifacts.read_attempt(self.storage, row["run_id"], row["step_id"], report.fence, name)
        outputs = {output: value for output, value in report.outputs.items() if output != check.output}
        if data is not None:  # a document in the store is published, even if the report does not name it
            folder = make_artifact_folder(row["kind"], row["run_id"], row["step_id"])
            outputs[check.output] = self.storage.make_uri(f"{folder}/{name}")
            report = replace(report, artifacts=sorted({*report.artifacts, name}))
        report = replace(report, outputs=outputs)
        if report.outcome is not StepReportKind.SUCCEEDED:
            return report
        verdict = _call_check(check, data, row["resolved_inputs"] or row["spec"].get("inputs", {}), report)
        if isinstance(verdict, StepError):
            return _refuse(report, verdict)
        return replace(report, outputs={**outputs, **verdict})

    async def seal(self, tx: Connection, end: StepEnd, report: StepReport, worker: str, now: datetime) -> None:
        """Accept a report as final: no other worker gets the step."""
        sealed = {
            "target": end.target.value,
            "outputs": end.outputs,
            "error": end.error,
            "reason": end.reason,
            "digest": end.digest,
            "artifacts": list(report.artifacts),
            "worker": worker,
            "at": format_time(now),
        }
        await tx.fetchval(store.SQL["seal"], end.run, end.n, end.fence, sealed)

    async def publish(self, row: asyncpg.Record, check_ownership: CheckOwnership) -> tuple[StepEnd, str]:
        """Publish the artifacts of a sealed step; return the end of the step and the worker that reported it.

        *check_ownership* raises if another process has ended the step; then no further object is changed.
        """
        sealed, attempt = row["sealed"], (row["run_id"], row["step_id"], row["fence"])
        missing = await artifacts.find_missing(self.storage, *attempt, sealed["artifacts"])
        names = [name for name in sealed["artifacts"] if name not in missing]
        await check_ownership()
        await artifacts.delete_others(self.storage, row["kind"], row["run_id"], row["step_id"], names, check_ownership)
        published = await artifacts.publish(self.storage, row["kind"], *attempt, names, check_ownership)
        end = StepEnd(
            row["run"],
            row["n"],
            row["fence"],
            StepStatus.RUNNING,
            StepStatus(sealed["target"]),
            outputs=sealed["outputs"],
            error=sealed["error"],
            reason=sealed["reason"],
        )
        if missing and end.target is StepStatus.SUCCEEDED:  # deleted after the report was accepted
            end = make_failure(row, artifacts.make_missing_error(missing))
        return end._replace(digest=sealed["digest"], artifacts=artifacts.encode(published)), sealed["worker"]


def _call_check(
    check: ReportCheck, data: bytes | None, inputs: Mapping[str, Any], report: StepReport
) -> Mapping[str, Any] | StepError:
    try:
        return check.verdict(data, inputs, frozenset(report.artifacts))
    except Exception as error:  # noqa: BLE001 - an edge: an error in a user's code must not fail the other reports
        _log.exception("flow_report_check_crashed", run=report.run_id, step=report.step_id)
        return StepError("WORKER_ERROR", f"the report check of the kind failed: {type(error).__name__}: {error}")


def _refuse(report: StepReport, error: StepError) -> StepReport:
    """Return a refused success as a failure."""
    return replace(report, outcome=StepReportKind.FAILED, error=error, is_retryable=None)
