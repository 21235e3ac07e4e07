"""A process that executes steps until it is killed or stopped, and its handlers.

Each handler appends a line to a file that all processes share, as its last action: the file has every attempt that got
so far. `penstock up` executes the same steps with this module in its configuration.
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from penstock.flows import maintenance
from penstock.flows.config import FlowsSection
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.engine import engine as reports
from penstock.flows.engine.engine import FlowEngine
from penstock.flows.maintenance import FlowMaintenance
from penstock.flows.step import FlowStep, StepFailed, Workers
from penstock.flows.worker.local import LocalWorkSource
from penstock.flows.worker.loop import StepWorker
from penstock.kernel.db.database import Database
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.telemetry.telemetry import Telemetry
from tests.support.crash import CrashingProcess, redirect_output
from tests.support.wait import becomes

DONE = "FLOWS_DONE"  # names the file of all that was done
ARTIFACT = "who.txt"
FOREVER = 3_600.0
_SECOND = timedelta(seconds=1)
workers = Workers()


@dataclass(frozen=True)
class WorkerSetup:
    """Database, folder and settings of a worker process."""

    url: str
    folder: Path
    section: Mapping[str, Any]
    drain: timedelta = 20 * _SECOND
    concurrency: int = 8

    @property
    def done(self) -> Path:
        return self.folder / "done"

    @property
    def objects(self) -> Path:
        return self.folder / "objects"


class FlowWorkerProcess(CrashingProcess):
    """A worker of flows in a forked process."""

    def __init__(self, place: WorkerSetup) -> None:
        super().__init__(_run, place)


@workers.worker("noop")
async def noop(step: FlowStep) -> Mapping[str, Any]:
    """Return the token of the attempt."""
    return make_outputs(step)


@workers.worker("list")
async def give_list(step: FlowStep) -> Mapping[str, Any]:
    """Return a list with the requested number of items."""
    return {**make_outputs(step), "list": list(range(step.inputs["count"]))}


@workers.worker("flaky")
async def fail_at_first(step: FlowStep) -> Mapping[str, Any]:
    """Succeed after some failures, or never."""
    if step.attempt <= step.inputs["failures"]:
        raise StepFailed("FLAKY", f"attempt {step.attempt}")
    return make_outputs(step)


@workers.worker("leave")
async def leave_artifact(step: FlowStep) -> Mapping[str, Any]:
    """Write an artifact with the token of the attempt; first check the artifact of the step before."""
    if before := step.inputs.get("after"):
        assert (await step.read(before["step"], ARTIFACT)).decode() == before["token"]
    outputs = make_outputs(step, is_recorded=False)
    await step.write(ARTIFACT, outputs["token"])
    return record_attempt(step, outputs)


@workers.worker("wait")
async def wait_for_file(step: FlowStep) -> Mapping[str, Any]:
    """Run until a file exists."""
    Path(f"{step.inputs['file']}.started").touch()
    await becomes(exists_check(Path(step.inputs["file"])), "the file", within=FOREVER)
    return make_outputs(step)


def exists_check(file: Path) -> Any:
    async def is_there() -> bool:
        return file.exists()

    return is_there


def make_outputs(step: FlowStep, *, is_recorded: bool = True) -> dict[str, Any]:
    """Return outputs that identify the attempt."""
    outputs = {"fence": step.fence, "token": uuid4().hex}
    return record_attempt(step, outputs) if is_recorded else outputs


def record_attempt(step: FlowStep, outputs: dict[str, Any]) -> dict[str, Any]:
    line = f"{step.run_id} {step.step_id} {step.fence} {outputs['token']}\n"
    file = os.open(os.environ[DONE], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
    return outputs


def _run(place: WorkerSetup) -> None:
    os.environ[DONE] = str(place.done)
    redirect_output(place.folder / "workers.log")
    for module in (reports, maintenance):  # short, like the lease: a process that takes longer has died
        vars(module)["PUBLISH_TIMEOUT"] = _SECOND
    asyncio.run(_work(place))


async def _work(place: WorkerSetup) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    section, storage = FlowsSection.model_validate(place.section), FolderStorage(place.objects)
    catalogue = FlowCatalogue(section)
    async with AsyncExitStack() as stack:
        db = await stack.enter_async_context(Database.open(place.url, prefers_indexes=True))
        engine = await stack.enter_async_context(FlowEngine.open(db, storage, catalogue, {}, section))
        for name, task, every in FlowMaintenance(engine, catalogue, storage).list_periodic_tasks():
            await stack.enter_async_context(run_periodically(name, task, min(every, _SECOND)))
        worker = StepWorker(
            LocalWorkSource(engine, storage),
            workers,
            Telemetry(),
            name=f"child-{os.getpid()}",
            concurrency=place.concurrency,
            lease_for=section.lease,
        )
        await stack.enter_async_context(worker.run(place.drain))
        await stop.wait()
