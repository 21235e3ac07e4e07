"""F14: steps that take a supplier's newest file through to its published state."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol

from pydantic import StringConstraints

from penstock.flows.definition.spec import SpecModel
from penstock.flows.kinds.inputs import read
from penstock.flows.kinds.platform.common import call_until_available, pause, requester, stopped
from penstock.flows.kinds.python import run_in_thread
from penstock.flows.step import FlowStep, Handler, Outputs, StepFailed
from penstock.ingest.contract import SUPPLIER, FailureCode, IngestRunStatus
from penstock.kernel.errors import Conflict

KIND = "ingest.run"
_MAY_GO_LATER = (FailureCode.FILE_MISSING.value, FailureCode.SUPERSEDED.value, FailureCode.INTERRUPTED.value)


class IngestInputs(SpecModel):
    """Whose file."""

    supplier: Annotated[str, StringConstraints(pattern=rf"^{SUPPLIER}\z")]


@dataclass(frozen=True, slots=True)
class IngestOutputs:
    """A run of ingest that has ended, as far as a step needs to know it."""

    run_id: str
    status: str
    input_filename: str | None
    good_rows: int
    bad_rows: int
    failure_code: str | None
    failure: str | None


class IngestService(Protocol):
    """What is needed of ingest; it blocks."""

    def last(self, supplier: str) -> str | None:
        """The run of a supplier that ended last."""

    def run(
        self, supplier: str, requester: str, after: str | None, should_stop: Callable[[], bool]
    ) -> IngestOutputs | None:
        """One run, or the one that was asked for before; None when there is no file. Conflict LOCKED, as ingest has it.

        Without a file a run counts that ended after the run *after*: somebody else was quicker.
        """


def ingest_worker(suppliers: IngestService, at_once: int) -> Handler:
    """The worker that has files of suppliers published, so many at a time: it is this process that reads them."""
    room = asyncio.Semaphore(at_once)

    async def work(step: FlowStep) -> Outputs:
        supplier = read(IngestInputs, step.inputs).supplier

        after = await call_until_available(step, lambda: run_in_thread(lambda: suppliers.last(supplier), KIND))
        run = await call_until_available(step, lambda: _run(step, suppliers, supplier, after, room))
        if step.cancelled.is_set() and (run is None or run.status != IngestRunStatus.PASS):
            raise stopped()
        if run is None:
            said = f"the inbox of {supplier} holds no file that is ready and new"
            raise StepFailed(FailureCode.FILE_MISSING.value, said, retryable=True)
        return _outputs(run)

    return work


async def _run(
    step: FlowStep, suppliers: IngestService, supplier: str, after: str | None, room: asyncio.Semaphore
) -> IngestOutputs | None:
    """One run; waits while another one has the supplier."""
    given_up = threading.Event()  # the thread outlives whoever stops waiting for it, but not for long

    def should_stop() -> bool:
        return step.cancelled.is_set() or given_up.is_set()

    try:
        while True:
            try:
                async with room:
                    return await run_in_thread(
                        partial(suppliers.run, supplier, requester(step), after, should_stop), KIND
                    )
            except Conflict as error:
                if error.code != "LOCKED":
                    raise
            await pause(step)
    finally:
        given_up.set()


def _outputs(run: IngestOutputs) -> Outputs:
    told = {"runId": run.run_id, "status": run.status, "file": run.input_filename}
    if run.status == IngestRunStatus.PASS:
        return {**told, "published": run.good_rows, "rejected": run.bad_rows}
    code = run.failure_code or FailureCode.INTERNAL.value
    said = f"run {run.run_id}: {run.failure}"
    raise StepFailed(code, said, told, retryable=code in _MAY_GO_LATER)
