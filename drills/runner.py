"""The run of a drill: prepare, generate load, inject faults, judge."""

import asyncio
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drills import evidence, report
from drills.checker import GuaranteeResult, judge
from drills.faults import Schedule, inject_faults
from drills.figures import late_percent, quantile
from drills.limits import MAX_FAILED, MAX_LATE, judge_failover, judge_load
from drills.load import Keys, Load
from drills.recorder import Recorder
from drills.target import Rates, Target

SETTLE_TIMEOUT = 60.0
RAMP_FACTOR = 1.5
RAMP_STEPS = 20


@dataclass(frozen=True)
class Ramp:
    """An increase of the read rate step by step, until p99 (in ms) or the errors exceed their limit."""

    step: float
    p99: float


@dataclass(frozen=True)
class Plan:
    """The plan of a drill: a load of constant rate, a ramp, or a load with faults."""

    rates: Rates
    seconds: float | None = None
    ramp: Ramp | None = None
    schedule: Schedule | None = None

    @property
    def kind(self) -> str:
        return "failover" if self.schedule else "load"

    @property
    def timeout(self) -> float:
        """Return the time limit for pending writes at the end."""
        return self.schedule.within if self.schedule else SETTLE_TIMEOUT

    def description(self) -> dict[str, object]:
        share = f"{self.rates.barrier:.0%} of the reads require the last acknowledged version"
        return {
            "load": f"{self.rates.reads:g} reads/s, {self.rates.writes:g} writes/s, {self.rates.keys:,} keys; {share}"
        }


def new_run() -> str:
    """Return a unique name of a drill."""
    return secrets.token_hex(4)


async def run(
    opening: AbstractAsyncContextManager[Target],
    plan: Plan,
    run_name: str,
    folder: Path,
    print_status: Callable[[str], None],
) -> dict[str, Any]:
    """Run a drill, write its report to *folder*, and return the summary."""
    keys, started_at = Keys(run_name, plan.rates.keys), datetime.now(UTC)
    async with opening as target, evidence.open_inspector(target) as inspector:
        await inspector.check()
        recorder = Recorder(list(target.query_urls))
        load_run = _LoadRun(target, plan, keys, recorder, print_status)
        try:
            print_status("writing every key for the first time")
            base = await inspector.seed(keys)
            recorder.record_acknowledged(base)
            await load_run.run()
            print_status("checking the guarantees")
            found = await inspector.evidence(keys, base, recorder, plan.timeout)
        finally:
            left = [] if target.is_ours else [await _remove_keys(inspector, keys, recorder, plan, print_status)]
    selected = [fault.name for fault in target.faults] if plan.schedule else []
    results = [*judge(replace(found, selected=selected)), *_judge_load(plan, recorder), *left]
    description = {**target.description, **plan.description()}
    drill = report.Drill(plan.kind, started_at, description, recorder, results, load_run.steps, load_run.was_stopped)
    return await asyncio.to_thread(report.write_report, drill, folder)


async def _remove_keys(
    inspector: evidence.Inspector, keys: Keys, recorder: Recorder, plan: Plan, print_status: Callable[[str], None]
) -> GuaranteeResult:
    left = await inspector.remove(keys, recorder.writes, plan.timeout)
    if left:
        print_status(left)
    return GuaranteeResult("the keys of the drill are deleted", not left, left or f"{keys.count:,} keys deleted")


def _judge_load(plan: Plan, recorder: Recorder) -> list[GuaranteeResult]:
    if plan.ramp:
        return []  # a ramp exceeds the limits on purpose
    return judge_failover(recorder) if plan.schedule else judge_load(recorder)


class _LoadRun:
    """The load of a drill, until its end or Ctrl-C."""

    def __init__(
        self, target: Target, plan: Plan, keys: Keys, recorder: Recorder, print_status: Callable[[str], None]
    ) -> None:
        timeout = plan.schedule.within if plan.schedule else 10.0
        self._load = Load(target, plan.rates, keys, recorder, timeout)
        self._target = target
        self._plan = plan
        self._recorder = recorder
        self._print_status = print_status
        self.steps: list[dict[str, object]] = []
        self.was_stopped = False

    async def run(self) -> None:
        progress = asyncio.create_task(_progress(self._recorder))
        work = asyncio.create_task(self._work())
        try:
            async with _interruptible(work) as interrupted:
                self._print_status("reading and writing")
                with suppress(asyncio.CancelledError):
                    await work
            self.was_stopped = interrupted.is_set()
        finally:
            progress.cancel()
            await asyncio.gather(progress, work, return_exceptions=True)
            self._load.close()

    async def _work(self) -> None:
        if self._plan.schedule:
            await self._inject_faults(self._plan.schedule)
        elif self._plan.ramp:
            await self._ramp_up(self._plan.ramp)
        else:
            await self._load.run(self._plan.seconds)

    async def _inject_faults(self, schedule: Schedule) -> None:
        load = asyncio.create_task(self._load.run())
        try:
            await inject_faults(self._target.faults, schedule, self._recorder, self._print_status)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)

    async def _ramp_up(self, ramp: Ramp) -> None:
        rate = self._plan.rates.reads
        for _ in range(RAMP_STEPS):
            step = await self._step(ramp, rate)
            self.steps.append(step)
            self._print_status(f"{rate:8,.0f} reads/s: p99 {step['p99']} ms, within limits: {step['sustained']}")
            if step["sustained"] != "yes":
                return
            rate *= RAMP_FACTOR

    async def _step(self, ramp: Ramp, rate: float) -> dict[str, object]:
        recorder = self._recorder
        since, before = recorder.now(), len(recorder.unsent)
        await self._load.run(ramp.step, reads=rate)
        reads = [read for read in recorder.reads if read.due >= since]
        times = sorted(1000 * (read.ended - read.due) for read in reads if not read.error)
        p99, late = quantile(times, 0.99), late_percent(recorder, since)
        unsent = len(recorder.unsent) - before
        failed = 100 * (sum(bool(read.error) for read in reads) + unsent) / max(len(reads) + unsent, 1)
        verdict = _judge_step(ramp, p99, failed, late)
        measure_freshness = None if p99 is None else round(p99, 2)
        return {
            "reads": rate,
            "p99": measure_freshness,
            "failed_percent": round(failed, 3),
            "late_percent": late,
            "sustained": verdict,
        }


def _judge_step(ramp: Ramp, p99: float | None, failed: float, late: float) -> str:
    """Return whether a step stayed within the limits, and if not, the reason."""
    if late > MAX_LATE:
        return "no: the client was too slow"
    if failed > MAX_FAILED:
        return "no: errors"
    if p99 is None or p99 > ramp.p99:
        return f"no: p99 above {ramp.p99:g} ms"
    return "yes"


@asynccontextmanager
async def _interruptible(work: "asyncio.Task[None]") -> AsyncIterator[asyncio.Event]:
    """End the load at the first Ctrl-C or SIGTERM, with a report; the second one ends everything."""
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()
    handled = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in handled}

    def interrupt() -> None:
        interrupted.set()
        restore()
        work.cancel()

    def restore() -> None:
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, previous[number])

    for number in handled:
        loop.add_signal_handler(number, interrupt)
    try:
        yield interrupted
    finally:
        restore()


async def _progress(recorder: Recorder) -> None:
    """Print a line per second if standard error is a terminal."""
    seen_reads = seen_writes = seen_incidents = 0
    while sys.stderr.isatty():
        await asyncio.sleep(1)
        reads, writes = recorder.reads[seen_reads:], recorder.writes[seen_writes:]
        errors = sum(incident.is_error for incident in recorder.incidents[seen_incidents:])
        seen_reads, seen_writes, seen_incidents = len(recorder.reads), len(recorder.writes), len(recorder.incidents)
        sys.stderr.write(
            f"{recorder.now():6.1f} s  {_last_second([r.ended - r.due for r in reads], len(writes), errors)}\n"
        )


def _last_second(times: Sequence[float], writes: int, errors: int) -> str:
    ordered = sorted(1000 * seconds for seconds in times)
    p50, p99 = quantile(ordered, 0.5) or 0.0, quantile(ordered, 0.99) or 0.0
    return f"reads {len(times):5,}  p50 {p50:7.1f} ms  p99 {p99:7.1f} ms  writes {writes:4,}  errors {errors:4,}"
