"""F17: the work loop of steps: claims, runs many side by side, reports in batches, and takes what its reports free."""

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
from penstock.flows.worker.reports import checked_outputs, failed, given_back, said, set_aside
from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.wait import cancel_and_wait, wait_event
from penstock.kernel.telemetry.telemetry import Telemetry

Ended = tuple[ClaimedStep, StepReport]
Name = tuple[str, str, int]  # run, step, fence
_WAIT = 1.0  # seconds a claim waits
_BATCHES = 2  # that are handed in at once: while the database works on one, the next is being done
_FEW = 10  # steps are not worth two batches
CANCELLED = "CANCELLED"  # the code of a handler that stopped because it was told to


class StepWorkSource(StepIO, Protocol):
    """Where a worker gets its steps and hands in what became of them: the database, or the API."""

    async def claim(self, worker: str, rooms: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        """F4: steps that are now *worker*'s alone; waits up to *wait* seconds for one, or until it is to hurry."""

    def hurry(self) -> None:
        """Whoever waits for a step need not wait any longer."""

    async def settle(
        self, worker: str, done: Sequence[Ended], kinds: Sequence[str], room: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
        """F5: what became of each report; and up to *room* steps of *kinds* whose turn came by them."""

    async def heartbeat(self, held: Sequence[Name]) -> Mapping[Name, bool]:
        """F9: the steps still held, and whether they are to stop."""


class StepWorker:
    """Does the steps of some kinds, up to so many at a time."""

    def __init__(
        self,
        counter: StepWorkSource,
        workers: Workers,
        telemetry: Telemetry,
        metrics: FlowMetrics | None = None,
        *,
        name: str,
        concurrency: int,
        lease_for: timedelta,
    ) -> None:
        self._counter = counter
        self._handlers = workers.handlers
        self._telemetry = telemetry
        self._metrics = metrics
        self._name = name
        self._concurrency = concurrency
        self._lease_for = lease_for.total_seconds()
        self._running: dict[Name, tuple[FlowStep, asyncio.Task[None]]] = {}
        self._done: list[Ended] = []
        self._finished, self._freed, self._stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._settled, self._settling = asyncio.Event(), 0  # steps that are being handed in
        self._log = structlog.get_logger().bind(worker=name)

    @asynccontextmanager
    async def working(self, drain: timedelta = timedelta(seconds=20)) -> AsyncIterator[None]:
        """Work until the end; what is under way then may end within *drain*, the rest is given back."""
        loops = [
            asyncio.create_task(self._keep_claiming(), name=f"claim {self._name}"),
            *(asyncio.create_task(self._keep_settling(), name=f"settle {self._name} {n}") for n in range(_BATCHES)),
            asyncio.create_task(self._keep_beating(), name=f"heartbeat {self._name}"),
        ]
        try:
            yield
        finally:
            self._stopping.set()
            self._freed.set()
            # A claim that is cancelled may have been granted: it is waited for, and what it brings is given back.
            self._counter.hurry()
            await asyncio.wait(loops[:1], timeout=_WAIT + 4)
            await self._drain(drain.total_seconds())
            for loop in loops:
                await cancel_and_wait(loop)

    async def _drain(self, seconds: float) -> None:
        """Let what is under way end, give back the rest, and hand in all of it."""
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

    async def _keep_claiming(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            free = min(self._concurrency - self._taken(), BATCH_LIMIT)
            if free <= 0:
                self._freed.clear()
                await self._freed.wait()
                continue
            try:
                held = await self._counter.claim(self._name, dict.fromkeys(self._handlers, free), free, _WAIT)
                backoff.reset()
            except Exception as error:  # noqa: BLE001 - the edge of the loop: a worker outlives its queue's trouble
                self._complain("claim_failed", error)
                await asyncio.sleep(backoff.next().total_seconds())
                continue
            self._begin(held)

    def _taken(self) -> int:
        """Places that are not free: what is done keeps its place for the step it may be answered with."""
        return len(self._running) + len(self._done) + self._settling

    async def _keep_settling(self) -> None:
        while True:
            await self._finished.wait()
            self._finished.clear()
            while self._done:
                await self._settle_done()

    async def _settle_done(self) -> None:
        """Hand in all that is done, and begin what comes back."""
        # A share of all there is, lest all steps of a worker wait for the database at once, and then it for them.
        size = min(max(self._taken() // _BATCHES, _FEW), BATCH_LIMIT)
        done, self._done = self._done[:size], self._done[size:]
        self._settling += len(done)
        try:
            self._begin(await self._settle(done))
        finally:
            self._settling -= len(done)
            self._settled.set()
            self._freed.set()

    async def _settle(self, done: Sequence[Ended]) -> Sequence[ClaimedStep]:
        """What comes back for *done*; a queue that is down is asked for as long as a lease."""
        room = 0 if self._stopping.is_set() else len(done)
        backoff, deadline = Backoff(), monotonic() + self._lease_for
        while True:
            try:
                answers, handed = await self._counter.settle(self._name, done, list(self._handlers), room)
                break
            except Exception as error:  # noqa: BLE001 - as above
                self._complain("report_failed", error)
                if not isinstance(error, Transient) or monotonic() > deadline:
                    return []  # the leases run out, and the steps are handed out again
            await asyncio.sleep(backoff.next().total_seconds())
        for (held, _), answer in zip(done, answers, strict=True):
            if answer not in (StepReportAnswer.SETTLED, StepReportAnswer.UNCHANGED):
                self._log.warning("step_superseded", run=held.run_id, step=held.step_id, answer=answer)
        return handed

    def _begin(self, held: Sequence[ClaimedStep]) -> None:
        """Start what was claimed or handed over; a worker that is going gives it back."""
        if self._stopping.is_set():
            self._done += [(one, given_back(one)) for one in held]
        else:
            self._start(held)

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._lease_for / 3)
            names = list(self._running)
            for first in range(0, len(names), BATCH_LIMIT):
                some = names[first : first + BATCH_LIMIT]
                try:
                    self._heed(some, await self._counter.heartbeat(some))
                except Exception as error:  # noqa: BLE001 - one missed heartbeat is no reason to miss the next
                    self._complain("heartbeat_failed", error)

    def _heed(self, asked: Sequence[Name], told: Mapping[Name, bool]) -> None:
        """F9: stop what is to stop, and what is somebody else's."""
        for name in asked:
            if name in self._running and told.get(name, True):
                step, task = self._running[name]
                step.is_lost = name not in told
                step.cancelled.set()
                if inspect.iscoroutinefunction(self._handlers[step.kind]):
                    task.cancel()

    def _start(self, held: Sequence[ClaimedStep]) -> None:
        for one in held:
            name = (one.run_id, one.step_id, one.fence)
            step = FlowStep(one, self._counter)
            self._running[name] = (step, asyncio.create_task(self._work(name, step)))

    async def _work(self, name: Name, step: FlowStep) -> None:
        began = time_ns()
        try:
            report = await self._reported(step)
        finally:
            del self._running[name]
        if report is None:
            self._freed.set()
            return
        error = report.error.code if report.error else None
        held = step.held
        about = {"run": held.run_id, "step": held.step_id, "kind": held.kind, "attempt": held.attempt}
        self._telemetry.trace("flow.step", held.trace, began, error, **about)
        if self._metrics is not None:
            self._metrics.step_ended(held.kind, report.outcome, (time_ns() - began) / 1e9)
        self._done.append((held, report))
        self._finished.set()

    async def _reported(self, step: FlowStep) -> StepReport | None:
        """What is to be said of a step; nothing, when it is somebody else's."""
        seconds = step.held.time_limit.total_seconds() if step.held.time_limit else None
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                outputs = await _called(self._handlers[step.kind], step)
            return said(step, StepReportKind.SUCCEEDED, checked_outputs(outputs))
        except asyncio.CancelledError:
            return self._stopped(step)
        except TimeoutError as error:
            if limit.expired():
                return failed(step, StepError("STEP_TIMEOUT", f"the step took longer than {seconds:g} s"))
            return self._crashed(step, error)
        except StepFailed as error:
            if step.is_lost or (step.cancelled.is_set() and error.error.code == CANCELLED):
                return None if step.is_lost else said(step, StepReportKind.CANCELLED)
            return failed(step, error.error, error.retryable)
        except Exception as error:  # noqa: BLE001 - the edge: a handler's bug is its step's failure
            return self._crashed(step, error)

    def _stopped(self, step: FlowStep) -> StepReport | None:
        if step.is_lost:
            return None
        if step.cancelled.is_set() or self._stopping.is_set():
            return said(step, StepReportKind.CANCELLED if step.cancelled.is_set() else StepReportKind.RELEASED)
        return failed(step, StepError("WORKER_ERROR", "something the handler waited for was cancelled"))

    def _crashed(self, step: FlowStep, error: Exception) -> StepReport:
        if isinstance(error, PenstockError):
            told = StepError(error.code, error.message, {"hint": error.hint} if error.hint else None)
            # What the step stands on is away: not its fault, and tried again for as long as it takes.
            return set_aside(step, told) if isinstance(error, Transient) else failed(step, told)
        self._log.error("step_crashed", run=step.run_id, step=step.step_id, exc_info=error)
        return failed(step, StepError("WORKER_ERROR", f"{type(error).__name__}: {error}"))

    def _complain(self, event: str, error: Exception) -> None:
        if isinstance(error, PenstockError):
            self._log.warning(event, code=error.code, error=error.message)
        else:
            self._log.error(event, exc_info=error)


async def _called(handler: Handler, step: FlowStep) -> Any:
    if inspect.iscoroutinefunction(handler):
        return await handler(step)
    # In a thread, which nobody can stop: a sync handler looks at `step.cancelled` itself.
    return await asyncio.to_thread(handler, step)
