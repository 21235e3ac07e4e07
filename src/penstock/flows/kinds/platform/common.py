"""F14: common functions of the steps that start work in another part of Penstock, and wait for its end.

A step may be retried after its worker died: it finds the work of the earlier attempt, and does not start it twice.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar
from uuid import UUID, uuid5

from penstock.flows.step import FlowStep, StepFailed
from penstock.kernel.errors import PenstockError, Transient
from penstock.kernel.tasks.wait import wait_event

T = TypeVar("T")
POLL = 0.5  # seconds between two requests to another part
_NAMESPACE = UUID("5b1f7f0e-6a3c-4d52-9a38-1f0c6f2f9d11")


def derive_id(step: FlowStep, *parts: object) -> UUID:
    """Return an id for the work of a step in another part: the same id at every attempt."""
    return uuid5(_NAMESPACE, "/".join(map(str, (step.run_id, step.step_id, *parts))))


def describe_requester(step: FlowStep) -> str:
    """Return the name of the step that other parts record as the requester."""
    return f"flows:{step.run_id}/{step.step_id}"


async def pause(step: FlowStep, seconds: float = POLL) -> None:
    """Wait; raise StepFailed CANCELLED as soon as the step must stop."""
    if await wait_event(step.cancelled, seconds):
        raise make_cancelled_error()


async def call_until_available(step: FlowStep, call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of *call*; retry while the other part is unavailable, and raise StepFailed if it refuses."""
    while True:
        try:
            return await call()
        except Transient:
            await pause(step)
        except PenstockError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise StepFailed(error.code, f"{error.message}{hint}", retryable=False) from error


def make_cancelled_error() -> StepFailed:
    """Return the error of a step that stopped on request."""
    return StepFailed("CANCELLED", "the step was cancelled", retryable=False)
