"""Poll for a condition that another process brings about and that no event reports."""

import asyncio
import time
from collections.abc import Awaitable, Callable

WITHIN = 40.0  # seconds; only a violated guarantee takes so long
_POLL_INTERVAL = 0.02


async def _explain_nothing() -> str:
    return ""


def until(holds: Callable[[], bool], description: str, within: float = WITHIN) -> None:
    """Return as soon as *holds* is true; fail after *within* seconds."""
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, f"waited {within} s: {description}"
        time.sleep(_POLL_INTERVAL)


async def becomes(
    holds: Callable[[], Awaitable[bool]],
    description: str,
    within: float = WITHIN,
    explain: Callable[[], Awaitable[str]] = _explain_nothing,
) -> None:
    """Return as soon as the awaited *holds* is true; fail after *within* seconds, with what *explain* returns."""
    try:
        async with asyncio.timeout(within):
            while not await holds():  # noqa: ASYNC110 - another process changes the state
                await asyncio.sleep(_POLL_INTERVAL)
    except TimeoutError:
        raise AssertionError(f"waited {within} s: {description} {await explain()}") from None
