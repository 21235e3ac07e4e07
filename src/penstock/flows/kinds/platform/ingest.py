"""F14: steps that ingest and publish the newest file of a supplier."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol

from pydantic import StringConstraints

from penstock.flows.definition.spec import SpecModel
from penstock.flows.kinds.inputs import read_inputs
from penstock.flows.kinds.platform.common import call_until_available, describe_requester, make_cancelled_error, pause
from penstock.flows.kinds.python import run_in_thread
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.ingest.contract import SUPPLIER, FailureCode, IngestRunStatus
from penstock.kernel.errors import Conflict

KIND = "ingest.run"
_RETRYABLE = (FailureCode.FILE_MISSING.value, FailureCode.SUPERSEDED.value, FailureCode.INTERRUPTED.value)


class IngestInputs(SpecModel):
    """The supplier."""

    supplier: Annotated[str, StringConstraints(pattern=rf"^{SUPPLIER}\z")]


@dataclass(frozen=True, slots=True)
class IngestOutputs:
    """The result of an ingest run."""

    run_id: str
    status: str
    input_filename: str | None
    good_rows: int
    bad_rows: int
    failure_code: str | None
    failure: str | None


class IngestService(Protocol):
    """The functions of ingest that the steps use; they block."""

    def find_last_run(self, supplier: str) -> str | None:
        """Return the run of a supplier that ended last."""

    def run(
        self, supplier: str, requester: str, after: str | None, should_stop: Callable[[], bool]
    ) -> IngestOutputs | None:
        """Return a new run, or the run of an earlier attempt; None without a file; Conflict LOCKED during another run.

        Without a file, a run that ended after the run *after* counts: another process ingested the file.
        """


def make_ingest_handler(suppliers: IngestService, concurrency: int) -> Handler:
    """Return the handler of steps that ingest files: up to *concurrency* at a time, because this process reads them."""
    slots = asyncio.Semaphore(concurrency)

    async def ingest_files(step: FlowStep) -> Outputs:
        supplier = read_inputs(IngestInputs, step.inputs).supplier
        after = await call_until_available(step, lambda: run_in_thread(lambda: suppliers.find_last_run(supplier), KIND))
        run = await call_until_available(step, lambda: _run(step, suppliers, supplier, after, slots))
        if step.cancelled.is_set() and (run is None or run.status != IngestRunStatus.PASS):
            raise make_cancelled_error()
        if run is None:
            message = f"the inbox of supplier {supplier} contains no new file that is ready"
            raise StepFailed(FailureCode.FILE_MISSING.value, message, retryable=True)
        return _make_outputs(run)

    return ingest_files


async def _run(
    step: FlowStep, suppliers: IngestService, supplier: str, after: str | None, slots: asyncio.Semaphore
) -> IngestOutputs | None:
    """Execute a run; wait while another run of the supplier is active."""
    abandoned = threading.Event()  # stops the thread soon after this coroutine was cancelled

    def should_stop() -> bool:
        return step.cancelled.is_set() or abandoned.is_set()

    run = partial(suppliers.run, supplier, describe_requester(step), after, should_stop)
    try:
        while True:
            try:
                async with slots:
                    return await run_in_thread(run, KIND)
            except Conflict as error:
                if error.code != "LOCKED":
                    raise
            await pause(step)
    finally:
        abandoned.set()


def _make_outputs(run: IngestOutputs) -> Outputs:
    outputs = {"runId": run.run_id, "status": run.status, "file": run.input_filename}
    if run.status == IngestRunStatus.PASS:
        return {**outputs, "published": run.good_rows, "rejected": run.bad_rows}
    code = run.failure_code or FailureCode.INTERNAL.value
    raise StepFailed(code, f"run {run.run_id}: {run.failure}", outputs, retryable=code in _RETRYABLE)
