"""A drill from beginning to end: prepare, press, break, judge."""

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
from drills.checker import Finding, judge
from drills.faults import Schedule, strike_all
from drills.figures import late_percent, quantile
from drills.limits import FAILED_AT_MOST, LATE_AT_MOST, judge_calm, judge_load
from drills.load import Keys, Load
from drills.recorder import Recorder
from drills.target import Rates, Target

SETTLED_WITHIN = 60.0
RAMP_FACTOR = 1.5
RAMP_STEPS = 20


@dataclass(frozen=True)
class Ramp:
    """Raise the rate of reads step by step until p99 (ms) or errors do not hold any more."""

    step: float
    p99: float


@dataclass(frozen=True)
class Plan:
    """What is to be done: so many seconds of load, a ramp, or faults on a schedule."""

    rates: Rates
    seconds: float | None = None
    ramp: Ramp | None = None
    schedule: Schedule | None = None

    @property
    def kind(self) -> str:
        return "failover" if self.schedule else "load"

    @property
    def patience(self) -> float:
        """How long what is under way at the end may take to be settled."""
        return self.schedule.within if self.schedule else SETTLED_WITHIN

    def about(self) -> dict[str, object]:
        share = f"{self.rates.barrier:.0%} of the reads name the last acknowledged version"
        return {
            "load": f"{self.rates.reads:g} reads/s, {self.rates.writes:g} writes/s, {self.rates.keys:,} keys; {share}"
        }


def new_run() -> str:
    """A name no other drill has."""
    return secrets.token_hex(4)


async def run(
    opening: AbstractAsyncContextManager[Target], plan: Plan, run_name: str, folder: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The whole drill; the summary of what it found, which is in *folder* too."""
    keys, began = Keys(run_name, plan.rates.keys), datetime.now(UTC)
    async with opening as target, evidence.opened(target) as inspector:
        await inspector.check()
        recorder = Recorder(list(target.query_urls))
        pressing = _Pressing(target, plan, keys, recorder, tell)
        try:
            tell("writing every key for the first time")
            base = await inspector.seed(keys)
            recorder.acknowledged(base)
            await pressing.run()
            tell("comparing what was promised with what is there")
            found = await inspector.evidence(keys, base, recorder, plan.patience)
        finally:
            left = [] if target.is_ours else [await _removed(inspector, keys, recorder, plan, tell)]
    chosen = [fault.name for fault in target.faults] if plan.schedule else []
    findings = [*judge(replace(found, chosen=chosen)), *_of_the_load(plan, recorder), *left]
    about = {**target.about, **plan.about()}
    drill = report.Drill(plan.kind, began, about, recorder, findings, pressing.steps, pressing.was_stopped)
    return await asyncio.to_thread(report.written, drill, folder)


async def _removed(
    inspector: evidence.Inspector, keys: Keys, recorder: Recorder, plan: Plan, tell: Callable[[str], None]
) -> Finding:
    left = await inspector.remove(keys, recorder.writes, plan.patience)
    if left:
        tell(left)
    return Finding("nothing of the drill is left in the dictionary", not left, left or f"{keys.count:,} keys removed")


def _of_the_load(plan: Plan, recorder: Recorder) -> list[Finding]:
    if plan.ramp:
        return []  # it seeks what cannot be held
    return judge_calm(recorder) if plan.schedule else judge_load(recorder)


class _Pressing:
    """The load while it runs, until it is done or somebody presses Ctrl-C."""

    def __init__(self, target: Target, plan: Plan, keys: Keys, recorder: Recorder, tell: Callable[[str], None]) -> None:
        patience = plan.schedule.within if plan.schedule else 10.0
        self._load = Load(target, plan.rates, keys, recorder, patience)
        self._target = target
        self._plan = plan
        self._recorder = recorder
        self._tell = tell
        self.steps: list[dict[str, object]] = []
        self.was_stopped = False

    async def run(self) -> None:
        telling = asyncio.create_task(_progress(self._recorder))
        work = asyncio.create_task(self._work())
        try:
            async with _interruptible(work) as interrupted:
                self._tell("reading and writing")
                with suppress(asyncio.CancelledError):
                    await work
            self.was_stopped = interrupted.is_set()
        finally:
            telling.cancel()
            await asyncio.gather(telling, work, return_exceptions=True)
            self._load.close()

    async def _work(self) -> None:
        if self._plan.schedule:
            await self._break(self._plan.schedule)
        elif self._plan.ramp:
            await self._climb(self._plan.ramp)
        else:
            await self._load.run(self._plan.seconds)

    async def _break(self, schedule: Schedule) -> None:
        load = asyncio.create_task(self._load.run())
        try:
            await strike_all(self._target.faults, schedule, self._recorder, self._tell)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)

    async def _climb(self, ramp: Ramp) -> None:
        rate = self._plan.rates.reads
        for _ in range(RAMP_STEPS):
            step = await self._step(ramp, rate)
            self.steps.append(step)
            self._tell(f"{rate:8,.0f} reads/s: p99 {step['p99']} ms, held: {step['held']}")
            if step["held"] != "yes":
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
        held = _held(ramp, p99, failed, late)
        shown = None if p99 is None else round(p99, 2)
        return {"reads": rate, "p99": shown, "failed_percent": round(failed, 3), "late_percent": late, "held": held}


def _held(ramp: Ramp, p99: float | None, failed: float, late: float) -> str:
    """Whether a step held, and if not, why."""
    if late > LATE_AT_MOST:
        return "no: this client could not keep up"
    if failed > FAILED_AT_MOST:
        return "no: errors"
    if p99 is None or p99 > ramp.p99:
        return f"no: p99 above {ramp.p99:g} ms"
    return "yes"


@asynccontextmanager
async def _interruptible(work: "asyncio.Task[None]") -> AsyncIterator[asyncio.Event]:
    """The first Ctrl-C, or SIGTERM, ends the load and leaves a report; the second ends everything."""
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
    """A line per second for whoever looks at a terminal."""
    seen_reads = seen_writes = seen_troubles = 0
    while sys.stderr.isatty():
        await asyncio.sleep(1)
        reads, writes = recorder.reads[seen_reads:], recorder.writes[seen_writes:]
        errors = sum(trouble.is_error for trouble in recorder.troubles[seen_troubles:])
        seen_reads, seen_writes, seen_troubles = len(recorder.reads), len(recorder.writes), len(recorder.troubles)
        sys.stderr.write(
            f"{recorder.now():6.1f} s  {_last_second([r.ended - r.due for r in reads], len(writes), errors)}\n"
        )


def _last_second(times: Sequence[float], writes: int, errors: int) -> str:
    ordered = sorted(1000 * seconds for seconds in times)
    p50, p99 = quantile(ordered, 0.5) or 0.0, quantile(ordered, 0.99) or 0.0
    return f"reads {len(times):5,}  p50 {p50:7.1f} ms  p99 {p99:7.1f} ms  writes {writes:4,}  errors {errors:4,}"
