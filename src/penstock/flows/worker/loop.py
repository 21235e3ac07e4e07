"""F17: the work loop of steps: claim, execute concurrently, report in batches, and execute prefetched steps."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from time import monotonic, time_ns
from typing import Any, Protocol

import structlog

from penstock.flows.contract import BATCH_LIMIT, StepReportAnswer, StepReportKind
from penstock.flows.metrics import FlowMetrics
from penstock.flows.model import ClaimedStep, StepError, StepReport
from penstock.flows.step import FlowStep, Handler, StepFailed, StepIO, Workers
from penstock.flows.worker.reports import check_outputs, defer, fail, make_report, release
from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.wait import cancel_and_wait, wait_event
from penstock.kernel.telemetry.telemetry import Telemetry

EndedAttempt = tuple[ClaimedStep, StepReport]
StepName = tuple[str, str, int]  # run, step, fence
_WAIT = 1.0  # seconds that a claim waits
_BATCHES = 2  # concurrent batches of reports: while the database settles one, the worker fills the next
_SMALL_BATCH = 10  # steps; fewer are not split into two batches
CANCELLED = "CANCELLED"  # the error code of a handler that stopped on request


class StepWorkSource(StepIO, Protocol):
    """A source of steps, which also takes the reports on them: the database, or the API."""

    async def claim(self, worker: str, capacities: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        """F4: claim steps for *worker*; wait up to *wait* seconds for the first one, or until `wake`."""

    def wake(self) -> None:
        """End the wait of all claims."""

    async def settle(
        self, worker: str, done: Sequence[EndedAttempt], kinds: Sequence[str], capacity: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
        """F5: return the answer to each report, and up to *capacity* steps of *kinds* that the reports made ready."""

    async def heartbeat(self, claims: Sequence[StepName]) -> Mapping[StepName, bool]:
        """F9: return the steps that are still claimed, and whether each must stop."""


class StepWorker:
    """A worker that executes steps of some kinds, up to *concurrency* at a time."""

    def __init__(
        self,
        source: StepWorkSource,
        workers: Workers,
        telemetry: Telemetry,
        metrics: FlowMetrics | None = None,
        *,
        name: str,
        concurrency: int,
        lease_for: timedelta,
    ) -> None:
        self._source = source
        self._handlers = workers.handlers
        self._telemetry = telemetry
        self._metrics = metrics
        self._name = name
        self._concurrency = concurrency
        self._lease_for = lease_for.total_seconds()
        self._running: dict[StepName, tuple[FlowStep, asyncio.Task[None]]] = {}
        self._done: list[EndedAttempt] = []
        self._finished, self._freed, self._stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._settled, self._settling = asyncio.Event(), 0  # steps whose reports are being sent
        self._log = structlog.get_logger().bind(worker=name)

    @asynccontextmanager
    async def run(self, drain: timedelta = timedelta(seconds=20)) -> AsyncIterator[None]:
        """Execute steps until the end of the context; then wait up to *drain* for running steps; release the rest."""
        loops = [
            asyncio.create_task(self._claim_steps(), name=f"claim {self._name}"),
            *(asyncio.create_task(self._send_reports(), name=f"settle {self._name} {n}") for n in range(_BATCHES)),
            asyncio.create_task(self._send_heartbeats(), name=f"heartbeat {self._name}"),
        ]
        try:
            yield
        finally:
            self._stopping.set()
            self._freed.set()
            # A cancelled claim may have claimed steps: wait for it, and release its steps.
            self._source.wake()
            await asyncio.wait(loops[:1], timeout=_WAIT + 4)
            await self._drain(drain.total_seconds())
            for loop in loops:
                await cancel_and_wait(loop)

    async def _drain(self, seconds: float) -> None:
        """Wait for running steps, cancel the rest, and send all reports."""
        deadline = monotonic() + seconds
        tasks = [task for _, task in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while (self._done or self._settling) and monotonic() < deadline + _WAIT + 4:
            self._settled.clear()
            self._finished.set()
            await wait_event(self._settled, _WAIT)

    async def _claim_steps(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            free = min(self._concurrency - self._count_occupied(), BATCH_LIMIT)
            if free <= 0:
                self._freed.clear()
                await self._freed.wait()
                continue
            try:
                claimed = await self._source.claim(self._name, dict.fromkeys(self._handlers, free), free, _WAIT)
                backoff.reset()
            except Exception as error:  # noqa: BLE001 - the edge of the loop: a worker outlives errors of its source
                self._log_error("flow_claim_failed", error)
                await asyncio.sleep(backoff.compute_next().total_seconds())
                continue
            self._start_or_release(claimed)

    def _count_occupied(self) -> int:
        """Return the occupied capacity: an unreported step occupies a slot, for a step that its report may prefetch."""
        return len(self._running) + len(self._done) + self._settling

    async def _send_reports(self) -> None:
        while True:
            await self._finished.wait()
            self._finished.clear()
            while self._done:
                await self._settle_done()

    async def _settle_done(self) -> None:
        """Send a batch of reports, and start the prefetched steps."""
        # A part of all steps: otherwise all steps wait for the database at the same time, and then it waits for them.
        size = min(max(self._count_occupied() // _BATCHES, _SMALL_BATCH), BATCH_LIMIT)
        done, self._done = self._done[:size], self._done[size:]
        self._settling += len(done)
        try:
            self._start_or_release(await self._settle(done))
        finally:
            self._settling -= len(done)
            self._settled.set()
            self._freed.set()

    async def _settle(self, done: Sequence[EndedAttempt]) -> Sequence[ClaimedStep]:
        """Send reports, and return the prefetched steps; retry for the length of a lease while the source is down."""
        capacity = 0 if self._stopping.is_set() else len(done)
        backoff, deadline = Backoff(), monotonic() + self._lease_for
        while True:
            try:
                answers, prefetched = await self._source.settle(self._name, done, list(self._handlers), capacity)
                break
            except Exception as error:  # noqa: BLE001 - as above
                self._log_error("flow_report_failed", error)
                if not isinstance(error, Transient) or monotonic() > deadline:
                    return []  # the leases expire, and other workers claim the steps
            await asyncio.sleep(backoff.compute_next().total_seconds())
        for (claimed, _), answer in zip(done, answers, strict=True):
            if answer not in (StepReportAnswer.SETTLED, StepReportAnswer.UNCHANGED):
                self._log.warning("flow_step_superseded", run=claimed.run_id, step=claimed.step_id, answer=answer)
        return prefetched

    def _start_or_release(self, claimed: Sequence[ClaimedStep]) -> None:
        """Start claimed steps; release them if the worker is stopping."""
        if self._stopping.is_set():
            self._done += [(step, release(step)) for step in claimed]
        else:
            self._start(claimed)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._lease_for / 3)
            names = list(self._running)
            for first in range(0, len(names), BATCH_LIMIT):
                batch = names[first : first + BATCH_LIMIT]
                try:
                    self._apply_heartbeat(batch, await self._source.heartbeat(batch))
                except Exception as error:  # noqa: BLE001 - the next heartbeat may succeed
                    self._log_error("flow_heartbeat_failed", error)

    def _apply_heartbeat(self, names: Sequence[StepName], claims: Mapping[StepName, bool]) -> None:
        """F9: stop steps that must stop, and steps whose claim is lost."""
        for name in names:
            if name in self._running and claims.get(name, True):
                step, task = self._running[name]
                step.is_lost = name not in claims
                step.cancelled.set()
                if inspect.iscoroutinefunction(self._handlers[step.kind]):
                    task.cancel()

    def _start(self, claimed: Sequence[ClaimedStep]) -> None:
        for claim in claimed:
            name = (claim.run_id, claim.step_id, claim.fence)
            step = FlowStep(claim, self._source)
            self._running[name] = (step, asyncio.create_task(self._execute(name, step)))

    async def _execute(self, name: StepName, step: FlowStep) -> None:
        started = time_ns()
        try:
            report = await self._call_handler(step)
        finally:
            del self._running[name]
        if report is None:
            self._freed.set()
            return
        error = report.error.code if report.error else None
        claimed = step.claimed
        attributes = {"run": claimed.run_id, "step": claimed.step_id, "kind": claimed.kind, "attempt": claimed.attempt}
        self._telemetry.trace("flow.step", claimed.trace, started, error, **attributes)
        if self._metrics is not None:
            self._metrics.count_step(claimed.kind, report.outcome, (time_ns() - started) / 1e9)
        self._done.append((claimed, report))
        self._finished.set()

    async def _call_handler(self, step: FlowStep) -> StepReport | None:
        """Execute a step and return its report; None if the claim is lost."""
        seconds = step.claimed.time_limit.total_seconds() if step.claimed.time_limit else None
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                outputs = await _call(self._handlers[step.kind], step)
            return make_report(step, StepReportKind.SUCCEEDED, check_outputs(outputs))
        except asyncio.CancelledError:
            return self._report_cancellation(step)
        except TimeoutError as error:
            if limit.expired():
                return fail(step, StepError("STEP_TIMEOUT", f"the step exceeded its timeout of {seconds:g} s"))
            return self._report_crash(step, error)
        except StepFailed as error:
            if step.is_lost or (step.cancelled.is_set() and error.error.code == CANCELLED):
                return None if step.is_lost else make_report(step, StepReportKind.CANCELLED)
            return fail(step, error.error, error.retryable)
        except Exception as error:  # noqa: BLE001 - the edge: an error in a handler is the failure of its step
            return self._report_crash(step, error)

    def _report_cancellation(self, step: FlowStep) -> StepReport | None:
        if step.is_lost:
            return None
        if step.cancelled.is_set() or self._stopping.is_set():
            return make_report(step, StepReportKind.CANCELLED if step.cancelled.is_set() else StepReportKind.RELEASED)
        return fail(step, StepError("WORKER_ERROR", "a task that the handler waited for was cancelled"))

    def _report_crash(self, step: FlowStep, error: Exception) -> StepReport:
        if isinstance(error, PenstockError):
            step_error = StepError(error.code, error.message, {"hint": error.hint} if error.hint else None)
            # A service that Penstock depends on is unavailable: not a failure of the step, and retried without limit.
            return defer(step, step_error) if isinstance(error, Transient) else fail(step, step_error)
        self._log.error("flow_step_crashed", run=step.run_id, step=step.step_id, exc_info=error)
        return fail(step, StepError("WORKER_ERROR", f"{type(error).__name__}: {error}"))

    def _log_error(self, event: str, error: Exception) -> None:
        if isinstance(error, PenstockError):
            self._log.warning(event, code=error.code, error=error.message)
        else:
            self._log.error(event, exc_info=error)


async def _call(handler: Handler, step: FlowStep) -> Any:
    if inspect.iscoroutinefunction(handler):
        return await handler(step)
    # A thread cannot be stopped: a synchronous handler must check `step.cancelled` itself.
    return await asyncio.to_thread(handler, step)
