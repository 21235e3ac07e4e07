"""F17: the work source of remote workers: they claim and report over the HTTP API."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from penstock.flows.client import FlowClient
from penstock.flows.contract import HeartbeatState, StepReportAnswer, StepReportKind
from penstock.flows.model import ClaimedStep, StepError, StepReport
from penstock.flows.worker.loop import EndedAttempt, StepName
from penstock.kernel.errors import Invalid
from penstock.kernel.http.client import Json

LEASE = timedelta(seconds=60)


class HttpWorkSource:
    """F17: a source of steps that calls the HTTP API of a server."""

    def __init__(self, client: FlowClient, lease_for: timedelta = LEASE) -> None:
        self._client = client
        self._lease = lease_for.total_seconds()

    async def claim(self, worker: str, capacities: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        items = await self._client.claim(worker, list(capacities), limit=limit, lease=self._lease, wait=wait)
        return [_decode_claim(item) for item in items]

    def wake(self) -> None:
        """Do nothing: a waiting request ends after its wait time."""

    async def settle(
        self, worker: str, done: Sequence[EndedAttempt], kinds: Sequence[str], capacity: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
        """Return the answer to each report. The API returns no further steps: *kinds* and *capacity* are not used."""
        del kinds, capacity
        reports = [report for _, report in done]
        try:
            return await self._send(worker, reports), ()
        except Invalid as error:
            if len(reports) > 1:  # an invalid report must not fail the other reports of its batch
                answers = [(await self.settle(worker, [attempt], (), 0))[0][0] for attempt in done]
                return answers, ()
            [report] = reports
            refused = StepError("BAD_REPORT", f"the server refused the report of the worker: {error.message}"[:2_000])
            failed = StepReport(
                report.run_id, report.step_id, report.fence, StepReportKind.FAILED, error=refused, is_retryable=False
            )
            return await self._send(worker, [failed]), ()

    async def _send(self, worker: str, reports: Sequence[StepReport]) -> list[StepReportAnswer]:
        results = await self._client.report([_encode_report(report) for report in reports], worker)
        return [StepReportAnswer(result["result"]) for result in results]

    async def heartbeat(self, claims: Sequence[StepName]) -> Mapping[StepName, bool]:
        items = await self._client.heartbeat(claims, lease=self._lease)
        return {
            (item["runId"], item["stepId"], item["fence"]): item["state"] == HeartbeatState.CANCELLED
            for item in items
            if item["state"] != HeartbeatState.LOST
        }

    async def log(self, claimed: ClaimedStep, level: str, message: str) -> None:
        await self._client.log(claimed.run_id, claimed.step_id, claimed.fence, [(level, message)])

    async def write(self, claimed: ClaimedStep, name: str, data: bytes) -> None:
        await self._client.write(claimed.run_id, claimed.step_id, claimed.fence, name, data)

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        return await self._client.read(run_id, step_id, name)


def _decode_claim(item: Json) -> ClaimedStep:
    limit = item["timeoutSeconds"]
    return ClaimedStep(
        run=0,  # the number is known only to the server
        n=0,
        run_id=item["runId"],
        step_id=item["stepId"],
        kind=item["kind"],
        fence=item["fence"],
        attempt=item["attempt"],
        inputs=item["inputs"],
        scope=item["scope"],
        lease_until=datetime.fromisoformat(item["leaseUntil"]),
        time_limit=None if limit is None else timedelta(seconds=limit),
        trace=item["trace"],
        is_plain=False,
    )


def _encode_report(report: StepReport) -> Json:
    body: Json = {
        "runId": report.run_id,
        "stepId": report.step_id,
        "fence": report.fence,
        "status": report.outcome,
        "outputs": dict(report.outputs),
        "artifacts": list(report.artifacts),
    }
    if report.error is not None:
        body["error"] = report.error.as_dict()
    if report.is_retryable is not None:
        body["retryable"] = report.is_retryable
    return body
