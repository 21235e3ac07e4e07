"""F17: the steps of a server, claimed and reported over its HTTP API."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from penstock.flows.client import FlowClient
from penstock.flows.contract import HeartbeatState, StepReportAnswer, StepReportKind
from penstock.flows.model import ClaimedStep, StepError, StepReport
from penstock.flows.worker.loop import Ended, Name
from penstock.kernel.errors import Invalid
from penstock.kernel.http.client import Json

LEASE = timedelta(seconds=60)


class HttpWorkSource:
    """F17: steps from a server, by its API."""

    def __init__(self, client: FlowClient, lease_for: timedelta = LEASE) -> None:
        self._client = client
        self._lease = lease_for.total_seconds()

    async def claim(self, worker: str, rooms: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        found = await self._client.claim(worker, list(rooms), limit=limit, lease=self._lease, wait=wait)
        return [_claimed(one) for one in found]

    def hurry(self) -> None:
        """A request that waits is answered soon."""

    async def settle(
        self, worker: str, done: Sequence[Ended], kinds: Sequence[str], room: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
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
            failed = StepReport(
                told.run_id, told.step_id, told.fence, StepReportKind.FAILED, error=refused, is_retryable=False
            )
            return await self._reported(worker, [failed]), ()

    async def _reported(self, worker: str, reports: Sequence[StepReport]) -> list[StepReportAnswer]:
        results = await self._client.report([_said(report) for report in reports], worker)
        return [StepReportAnswer(result["result"]) for result in results]

    async def heartbeat(self, held: Sequence[Name]) -> Mapping[Name, bool]:
        found = await self._client.heartbeat(held, lease=self._lease)
        return {
            (one["runId"], one["stepId"], one["fence"]): one["state"] == HeartbeatState.CANCELLED
            for one in found
            if one["state"] != HeartbeatState.LOST
        }

    async def log(self, held: ClaimedStep, level: str, message: str) -> None:
        await self._client.log(held.run_id, held.step_id, held.fence, [(level, message)])

    async def write(self, held: ClaimedStep, name: str, data: bytes) -> None:
        await self._client.write(held.run_id, held.step_id, held.fence, name, data)

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        return await self._client.read(run_id, step_id, name)


def _claimed(told: Json) -> ClaimedStep:
    limit = told["timeoutSeconds"]
    return ClaimedStep(
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


def _said(report: StepReport) -> Json:
    told: Json = {
        "runId": report.run_id,
        "stepId": report.step_id,
        "fence": report.fence,
        "status": report.outcome,
        "outputs": dict(report.outputs),
        "artifacts": list(report.artifacts),
    }
    if report.error is not None:
        told["error"] = report.error.as_dict()
    if report.is_retryable is not None:
        told["retryable"] = report.is_retryable
    return told
