"""F15, F17: the SDK for flows and workers in Python. Workers use the API of a server, and need no database.

from penstock.flows.sdk import FlowStep, run, worker

@worker("GREET")
async def greet(step: FlowStep) -> dict[str, str]:
    return {"greeting": f"hello {step.inputs['name']}"}

if __name__ == "__main__":
    run(url="http://127.0.0.1:8080")
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from penstock.flows.client import FlowClient
from penstock.flows.definition.python_dsl import Flow, StepReference, index, item
from penstock.flows.definition.spec import FailurePolicy, FlowSpec, RetryPolicy, ScheduleSpec, StepSpec, WorkSpec
from penstock.flows.metrics import FlowMetrics
from penstock.flows.model import StepError
from penstock.flows.step import FlowStep, KindContext, ReportCheck, StepFailed, Workers
from penstock.flows.worker.loop import StepWorker
from penstock.flows.worker.remote import LEASE, HttpWorkSource
from penstock.kernel.ids import make_worker_name
from penstock.kernel.telemetry.telemetry import Telemetry

__all__ = [
    "FailurePolicy",
    "Flow",
    "FlowClient",
    "FlowSpec",
    "FlowStep",
    "KindContext",
    "ReportCheck",
    "RetryPolicy",
    "ScheduleSpec",
    "StepError",
    "StepFailed",
    "StepReference",
    "StepSpec",
    "WorkSpec",
    "Workers",
    "index",
    "item",
    "run",
    "serve",
    "worker",
    "workers",
]

URL = "http://127.0.0.1:8080"
DRAIN = timedelta(seconds=20)
workers = Workers()
worker = workers.worker  # registers in `workers`, the default of `run` and `serve`


def run(
    workers: Workers = workers,
    *,
    url: str | None = None,
    token: str | None = None,
    concurrency: int = 4,
    lease_for: timedelta = LEASE,
    name: str | None = None,
) -> None:
    """Execute steps of the server at *url* until SIGTERM or SIGINT; running steps may end, others are released.

    The defaults of *url* and *token* are PENSTOCK_URL and PENSTOCK_TOKEN.
    """

    async def serve_until_signal() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(workers, stop, url=url, token=token, concurrency=concurrency, lease_for=lease_for, name=name)

    asyncio.run(serve_until_signal())


async def serve(
    workers: Workers,
    stop: asyncio.Event,
    *,
    url: str | None = None,
    token: str | None = None,
    concurrency: int = 4,
    lease_for: timedelta = LEASE,
    drain: timedelta = DRAIN,
    name: str | None = None,
) -> None:
    """Execute steps of the server at *url* until *stop* is set."""
    async with run_worker(
        workers, url=url, token=token, concurrency=concurrency, lease_for=lease_for, drain=drain, name=name
    ):
        await stop.wait()


@asynccontextmanager
async def run_worker(
    workers: Workers,
    *,
    url: str | None = None,
    token: str | None = None,
    concurrency: int = 4,
    lease_for: timedelta = LEASE,
    drain: timedelta = DRAIN,
    name: str | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[None]:
    """Execute steps of the server at *url* in the background; *telemetry* gets their metrics and traces."""
    address = url or os.environ.get("PENSTOCK_URL", URL)
    used = telemetry or Telemetry()
    async with FlowClient(address, token=token or os.environ.get("PENSTOCK_TOKEN")) as client:
        worker = StepWorker(
            HttpWorkSource(client, lease_for),
            workers,
            used,
            FlowMetrics(used.registry),
            name=name or make_worker_name("flows"),
            concurrency=concurrency,
            lease_for=lease_for,
        )
        async with worker.run(drain):
            yield
