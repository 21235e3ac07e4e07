"""F15, F17: for those who write flows and workers in Python: what they need, and how workers run beside no database.

from penstock.flows.sdk import Step, run, worker

@worker("GREET")
async def greet(step: Step) -> dict[str, str]:
    return {"greeting": f"hello {step.inputs['name']}"}

if __name__ == "__main__":
    run(url="http://127.0.0.1:8080")
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

from penstock.flows.client import FlowClient
from penstock.flows.contract import Answer, Hold, Said
from penstock.flows.definition.python_dsl import Built, Flow, index, item
from penstock.flows.definition.spec import FlowSpec, Policy, Retry, Schedule, StepSpec, Work
from penstock.flows.metrics import FlowMetrics
from penstock.flows.model import Claimed, Report, StepError
from penstock.flows.step import KindContext, ReportCheck, Step, StepFailed, Workers
from penstock.flows.worker.loop import Ended, Name, StepWorker
from penstock.kernel.errors import Invalid
from penstock.kernel.http.client import Json
from penstock.kernel.ids import worker_name
from penstock.kernel.telemetry.telemetry import Telemetry

__all__ = [
    "Built",
    "Flow",
    "FlowClient",
    "FlowSpec",
    "HttpCounter",
    "KindContext",
    "Policy",
    "ReportCheck",
    "Retry",
    "Schedule",
    "Step",
    "StepError",
    "StepFailed",
    "StepSpec",
    "Work",
    "Workers",
    "index",
    "item",
    "run",
    "serve",
    "worker",
    "workers",
]

URL = "http://127.0.0.1:8080"
LEASE = timedelta(seconds=60)
DRAIN = timedelta(seconds=20)
workers = Workers()
worker = workers.worker  # registers with those above, which `run` and `serve` take unless told otherwise


class HttpCounter:
    """F17: steps from a server, by its API."""

    def __init__(self, client: FlowClient, lease_for: timedelta = LEASE) -> None:
        self._client = client
        self._lease = lease_for.total_seconds()

    async def claim(self, worker: str, rooms: Mapping[str, int], limit: int, wait: float) -> Sequence[Claimed]:
        found = await self._client.claim(worker, list(rooms), limit=limit, lease=self._lease, wait=wait)
        return [_claimed(one) for one in found]

    def hurry(self) -> None:
        """A request that waits is answered soon."""

    async def settle(
        self, worker: str, done: Sequence[Ended], kinds: Sequence[str], room: int
    ) -> tuple[Sequence[Answer], Sequence[Claimed]]:
        """What became of each report. The server hands nothing out along with it: *kinds* and *room* are not used."""
        del kinds, room
        reports = [report for _, report in done]
        try:
            return await self._reported(worker, reports), ()
        except Invalid as error:
            if len(reports) > 1:  # one that makes no sense must not take the others with it
                alone = [(await self.settle(worker, [one], (), 0))[0][0] for one in done]
                return alone, ()
            [told] = reports
            refused = StepError("BAD_REPORT", f"the server refused what the worker said: {error.message}"[:2_000])
            failed = Report(told.run_id, told.step_id, told.fence, Said.FAILED, error=refused, is_retryable=False)
            return await self._reported(worker, [failed]), ()

    async def _reported(self, worker: str, reports: Sequence[Report]) -> list[Answer]:
        results = await self._client.report([_said(one) for one in reports], worker)
        return [Answer(one["result"]) for one in results]

    async def heartbeat(self, held: Sequence[Name]) -> Mapping[Name, bool]:
        found = await self._client.heartbeat(held, lease=self._lease)
        return {
            (one["runId"], one["stepId"], one["fence"]): one["state"] == Hold.CANCELLED
            for one in found
            if one["state"] != Hold.LOST
        }

    async def log(self, held: Claimed, level: str, message: str) -> None:
        await self._client.log(held.run_id, held.step_id, held.fence, [(level, message)])

    async def write(self, held: Claimed, name: str, data: bytes) -> None:
        await self._client.write(held.run_id, held.step_id, held.fence, name, data)

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        return await self._client.read(run_id, step_id, name)


def run(
    workers: Workers = workers,
    *,
    url: str | None = None,
    token: str | None = None,
    concurrency: int = 4,
    lease_for: timedelta = LEASE,
    name: str | None = None,
) -> None:
    """Work for the server at *url* until SIGTERM or SIGINT; what is under way then may end, the rest is given back.

    Without *url* and *token* those of PENSTOCK_URL and PENSTOCK_TOKEN are taken.
    """

    async def until_signalled() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(workers, stop, url=url, token=token, concurrency=concurrency, lease_for=lease_for, name=name)

    asyncio.run(until_signalled())


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
    """Work for the server at *url* until *stop*."""
    async with working(
        workers, url=url, token=token, concurrency=concurrency, lease_for=lease_for, drain=drain, name=name
    ):
        await stop.wait()


@asynccontextmanager
async def working(
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
    """Work for the server at *url* meanwhile; steps are counted and traced where *telemetry* says."""
    address = url or os.environ.get("PENSTOCK_URL", URL)
    told = telemetry or Telemetry()
    async with FlowClient(address, token=token or os.environ.get("PENSTOCK_TOKEN")) as client:
        worker = StepWorker(
            HttpCounter(client, lease_for),
            workers,
            told,
            FlowMetrics(told.registry),
            name=name or worker_name("flows"),
            concurrency=concurrency,
            lease_for=lease_for,
        )
        async with worker.working(drain):
            yield


def _claimed(told: Json) -> Claimed:
    limit = told["timeoutSeconds"]
    return Claimed(
        run=0,  # known to the server alone
        n=0,
        run_id=told["runId"],
        step_id=told["stepId"],
        kind=told["kind"],
        fence=told["fence"],
        attempt=told["attempt"],
        inputs=told["inputs"],
        scope=told["scope"],
        lease_until=datetime.fromisoformat(told["leaseUntil"]),
        time_limit=None if limit is None else timedelta(seconds=limit),
        trace=told["trace"],
        is_plain=False,
    )


def _said(report: Report) -> Json:
    told: Json = {
        "runId": report.run_id,
        "stepId": report.step_id,
        "fence": report.fence,
        "status": report.said,
        "outputs": dict(report.outputs),
        "artifacts": list(report.artifacts),
    }
    if report.error is not None:
        told["error"] = report.error.as_dict()
    if report.is_retryable is not None:
        told["retryable"] = report.is_retryable
    return told
