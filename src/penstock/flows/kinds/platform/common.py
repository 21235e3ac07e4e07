"""F14: what steps have in common that leave the work to another part of Penstock, and wait for it.

Each may be tried again after its worker died: what the attempt before began is found again, and not begun twice.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar
from uuid import UUID, uuid5

from penstock.flows.step import FlowStep, StepFailed
from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.wait import wait_event

T = TypeVar("T")
LOOK = 0.5  # seconds between two looks at what goes on elsewhere
_NAMES = UUID("5b1f7f0e-6a3c-4d52-9a38-1f0c6f2f9d11")


def derive_id(step: FlowStep, *parts: object) -> UUID:
    """What a step calls something elsewhere: the same at every attempt."""
    return uuid5(_NAMES, "/".join(map(str, (step.run_id, step.step_id, *parts))))


def requester(step: FlowStep) -> str:
    """Who wants it, for those who look at it there."""
    return f"flows:{step.run_id}/{step.step_id}"


async def pause(step: FlowStep, seconds: float = LOOK) -> None:
    """Let some time pass; StepFailed CANCELLED as soon as the step is to stop."""
    if await wait_event(step.cancelled, seconds):
        raise stopped()


async def call_until_available(step: FlowStep, ask: Callable[[], Awaitable[T]]) -> T:
    """What *ask* gives; asked again while the other part is away, StepFailed under its code when it refuses."""
    while True:
        try:
            return await ask()
        except Transient:
            await pause(step)
        except PenstockError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise StepFailed(error.code, f"{error.message}{hint}", retryable=False) from error


def stopped() -> StepFailed:
    """What becomes of a step that was told to stop, and did."""
    return StepFailed("CANCELLED", "the step was told to stop", retryable=False)
