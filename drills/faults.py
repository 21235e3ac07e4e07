"""Faults, one after the other, each only when everything is well."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from drills.recorder import Recorder, Struck
from penstock.kernel.errors import PenstockError, TimedOut

QUIET = 1.0  # so long without any trouble is well
UNFELT = 3.0  # a fault without any trouble is looked at for so long
PATIENCE = 0.5  # an answer, or a version, that takes longer than this is trouble
_LOOK_AGAIN = 0.05


@dataclass(frozen=True)
class Fault:
    """Something that breaks and is mended by the time *strike* returns, or is mended by the cluster itself."""

    name: str
    what: str
    strike: Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Schedule:
    """*settle* is the calm before the first fault and after each; *within* is how long recovery may take."""

    settle: float
    within: float


async def strike_all(
    faults: Sequence[Fault],
    schedule: Schedule,
    recorder: Recorder,
    tell: Callable[[str], None],
) -> None:
    """Every fault in turn, as long as all is well before it. One that cannot be done is recorded as such."""
    for fault in faults:
        await asyncio.sleep(schedule.settle)
        if await until_well(recorder, 0.0, schedule.within) is None:
            tell(f"{recorder.now():6.1f} s  all is not well: neither {fault.name} nor any other is struck")
            return
        struck = Struck(fault.name, fault.what, recorder.now())
        recorder.faults.append(struck)
        tell(f"{struck.began:6.1f} s  {fault.name}: {fault.what}")
        await _strike(fault, struck, recorder)
        struck.well = await until_well(recorder, struck.began, schedule.within, unfelt=UNFELT)
        struck.is_judged = True
        tell(f"{recorder.now():6.1f} s  {fault.name}: {outcome_of(struck)}")
        if struck.well is None:
            return  # whoever breaks what is broken learns nothing
    await asyncio.sleep(schedule.settle)


def outcome_of(struck: Struck) -> str:
    """What became of a fault, in words."""
    if struck.failure:
        return f"could not be done: {struck.failure}"
    if not struck.is_judged:
        return "the drill was stopped before it was well again"
    if struck.seconds is None:
        return "not well again in time"
    return f"well again after {struck.seconds:.1f} s" if struck.seconds else "not felt"


async def _strike(fault: Fault, struck: Struck, recorder: Recorder) -> None:
    striking = asyncio.create_task(fault.strike())
    try:
        await asyncio.shield(striking)
    except PenstockError as error:
        struck.failure = error.message
    except asyncio.CancelledError:  # what was broken is mended first
        await asyncio.gather(striking, return_exceptions=True)
        raise
    finally:
        struck.over = recorder.now()


async def until_well(recorder: Recorder, since: float, within: float, *, unfelt: float = QUIET) -> float | None:
    """The moment since which all is well: reads, writes, and every pod at the last version; None when it is not.

    Where there was no trouble at all, that is known after *unfelt* seconds.
    """
    began, last = recorder.now(), since
    while max(last, began) - began <= within and recorder.now() - began <= within + unfelt:
        last = max(recorder.last_trouble, since)
        quiet = QUIET if last > since else unfelt
        if recorder.now() - max(last, began) >= quiet and recorder.last_acknowledged > last:
            return last
        await asyncio.sleep(_LOOK_AGAIN)
    return None


async def run_shell(command: str, within: float) -> None:
    """Run somebody's own command; TimedOut or PenstockError with its last words when it fails."""
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
        words = output.decode(errors="replace").strip().splitlines()[-1:]
        raise PenstockError("FAULT_FAILED", f"`{command}` ended with {process.returncode}: {' '.join(words)}")
