"""The injection of faults, one after the other, each in a healthy state."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from drills.recorder import InjectedFault, Recorder
from penstock.kernel.errors import PenstockError, TimedOut

HEALTHY_AFTER = 1.0  # seconds without an incident until the state is healthy
OBSERVED_FOR = 3.0  # seconds of observation after a fault without an effect
RESPONSE_LIMIT = 0.5  # seconds; a response or a version that takes longer is an incident
_POLL_INTERVAL = 0.05


@dataclass(frozen=True)
class Fault:
    """A fault that is repaired when *inject* returns, or later by the cluster itself."""

    name: str
    what: str
    inject: Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Schedule:
    """The seconds before the first fault and after each (*settle*), and the time limit of a recovery (*within*)."""

    settle: float
    within: float


async def inject_faults(
    faults: Sequence[Fault],
    schedule: Schedule,
    recorder: Recorder,
    print_status: Callable[[str], None],
) -> None:
    """Inject the faults in turn, each in a healthy state; a failed injection is recorded."""
    for fault in faults:
        await asyncio.sleep(schedule.settle)
        if await wait_until_healthy(recorder, 0.0, schedule.within) is None:
            print_status(f"{recorder.now():6.1f} s  not healthy: {fault.name} and later faults are not injected")
            return
        injected = InjectedFault(fault.name, fault.what, recorder.now())
        recorder.faults.append(injected)
        print_status(f"{injected.started_at:6.1f} s  {fault.name}: {fault.what}")
        await _inject(fault, injected, recorder)
        injected.recovered_at = await wait_until_healthy(
            recorder, injected.started_at, schedule.within, observed_for=OBSERVED_FOR
        )
        injected.is_judged = True
        print_status(f"{recorder.now():6.1f} s  {fault.name}: {describe_outcome(injected)}")
        if injected.recovered_at is None:
            return  # a fault in an unhealthy state cannot be judged
    await asyncio.sleep(schedule.settle)


def describe_outcome(injected: InjectedFault) -> str:
    """Return the outcome of a fault in words."""
    if injected.failure:
        return f"could not be injected: {injected.failure}"
    if not injected.is_judged:
        return "the drill was stopped before the recovery"
    if injected.seconds is None:
        return "not recovered in time"
    return f"recovered after {injected.seconds:.1f} s" if injected.seconds else "no effect"


async def _inject(fault: Fault, injected: InjectedFault, recorder: Recorder) -> None:
    injection = asyncio.create_task(fault.inject())
    try:
        await asyncio.shield(injection)
    except PenstockError as error:
        injected.failure = error.message
    except asyncio.CancelledError:  # wait until the fault is repaired
        await asyncio.gather(injection, return_exceptions=True)
        raise
    finally:
        injected.ended_at = recorder.now()


async def wait_until_healthy(
    recorder: Recorder, since: float, within: float, *, observed_for: float = HEALTHY_AFTER
) -> float | None:
    """Return the time since which reads, writes and the versions of all pods are healthy; None after the time limit.

    Without an incident, the result is known after *observed_for* seconds.
    """
    started_at, last = recorder.now(), since
    while max(last, started_at) - started_at <= within and recorder.now() - started_at <= within + observed_for:
        last = max(recorder.last_incident_at, since)
        quiet = HEALTHY_AFTER if last > since else observed_for
        if recorder.now() - max(last, started_at) >= quiet and recorder.last_acknowledged > last:
            return last
        await asyncio.sleep(_POLL_INTERVAL)
    return None


async def run_shell(command: str, within: float) -> None:
    """Run a command of the user; TimedOut or PenstockError with its last line of output if it fails."""
    process = await asyncio.create_subprocess_shell(
        command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(within):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise TimedOut("FAULT_TIMED_OUT", f"`{command}` did not end within {within:g} s") from None
    if process.returncode:
        last_line = output.decode(errors="replace").strip().splitlines()[-1:]
        raise PenstockError("FAULT_FAILED", f"`{command}` ended with {process.returncode}: {' '.join(last_line)}")
