"""F6, F12: the report that counts is decided first; then what it left is published; then its step ends."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import asyncpg
import structlog

from penstock.flows import artifacts, store
from penstock.flows.artifacts import IsOurs
from penstock.flows.contract import StepReportKind, StepStatus, artifact_folder
from penstock.flows.engine.decide import given_up
from penstock.flows.model import StepEnd, StepError, StepReport
from penstock.flows.step import ReportCheck
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Invalid
from penstock.kernel.storage import Storage


class FlowPublisher:
    """Makes artifacts of what attempts wrote."""

    def __init__(self, storage: Storage, report_checks: Mapping[str, ReportCheck]) -> None:
        self.storage = storage
        self._report_checks = report_checks

    async def judged(self, row: asyncpg.Record, report: StepReport) -> StepReport:
        """F12: the report as it is believed: by what is there, not by what is said."""
        try:
            names = artifacts.checked_names(report.artifacts)
        except Invalid as error:  # what makes no sense is a failure of the step, not of those reported with it
            return _refused(replace(report, artifacts=()), StepError(error.code, error.message))
        gone = await artifacts.missing(self.storage, row["run_id"], row["step_id"], report.fence, names)
        if gone and report.outcome is StepReportKind.SUCCEEDED:
            report = _refused(report, artifacts.missing_error(gone))
        report = replace(report, artifacts=names)
        check = self._report_checks.get(row["kind"])
        return report if check is None else await self._by_document(row, report, check)

    async def _by_document(self, row: asyncpg.Record, report: StepReport, check: ReportCheck) -> StepReport:
        name = check.document
        data = await artifacts.read_attempt(self.storage, row["run_id"], row["step_id"], report.fence, name)
        outputs = {output: value for output, value in report.outputs.items() if output != check.output}
        if data is not None:  # a document that was written is published, even when the report forgot it
            folder = artifact_folder(row["kind"], row["run_id"], row["step_id"])
            outputs[check.output] = self.storage.uri(f"{folder}/{name}")
            report = replace(report, artifacts=sorted({*report.artifacts, name}))
        report = replace(report, outputs=outputs)
        if report.outcome is not StepReportKind.SUCCEEDED:
            return report
        found = _found(check, data, row["given"] or row["spec"].get("inputs", {}), report)
        if isinstance(found, StepError):
            return _refused(report, found)
        return replace(report, outputs={**outputs, **found})

    async def seal(self, tx: Connection, end: StepEnd, report: StepReport, worker: str, now: datetime) -> None:
        """From here on nobody else gets the step."""
        sealed = {
            "target": end.target.value,
            "outputs": end.outputs,
            "error": end.error,
            "reason": end.reason,
            "digest": end.digest,
            "artifacts": list(report.artifacts),
            "worker": worker,
            "at": now.isoformat(),
        }
        await tx.fetchval(store.SQL["seal"], end.run, end.n, end.fence, sealed)

    async def publish(self, row: asyncpg.Record, is_ours: IsOurs) -> tuple[StepEnd, str]:
        """The end of a sealed step, once what it left is where it belongs; and who reported it.

        *is_ours* raises when somebody else has ended the step: then nothing is touched any more.
        """
        sealed, name = row["sealed"], (row["run_id"], row["step_id"], row["fence"])
        gone = await artifacts.missing(self.storage, *name, sealed["artifacts"])
        there = [one for one in sealed["artifacts"] if one not in gone]
        await is_ours()
        await artifacts.make_room(self.storage, row["kind"], row["run_id"], row["step_id"], there, is_ours)
        found = await artifacts.publish(self.storage, row["kind"], *name, there, is_ours)
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
        if gone and end.target is StepStatus.SUCCEEDED:  # somebody removed it since
            end = given_up(row, artifacts.missing_error(gone))
        return end._replace(digest=sealed["digest"], artifacts=artifacts.document(found)), sealed["worker"]


def _found(
    check: ReportCheck, data: bytes | None, inputs: Mapping[str, Any], report: StepReport
) -> Mapping[str, Any] | StepError:
    try:
        return check.verdict(data, inputs, frozenset(report.artifacts))
    except Exception as error:  # noqa: BLE001 - an edge: a user's code must not cost the other reports
        structlog.get_logger().exception("report_check_crashed", part="flows", run=report.run_id, step=report.step_id)
        return StepError("WORKER_ERROR", f"the check of the report: {type(error).__name__}: {error}")


def _refused(report: StepReport, error: StepError) -> StepReport:
    """A success that is none."""
    return replace(report, outcome=StepReportKind.FAILED, error=error, is_retryable=None)
