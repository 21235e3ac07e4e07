"""Poll for a condition that another process brings about and that no event reports."""

import asyncio
import time
from collections.abc import Awaitable, Callable

WITHIN = 40.0  # seconds; only a broken promise takes so long
_LOOK_AGAIN = 0.02


async def _nothing() -> str:
    return ""


def until(holds: Callable[[], bool], what: str, within: float = WITHIN) -> None:
    """Return as soon as *holds* is true; fail after *within* seconds."""
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, f"waited {within} s: {what}"
        time.sleep(_LOOK_AGAIN)


async def becomes(
    holds: Callable[[], Awaitable[bool]],
    what: str,
    within: float = WITHIN,
    explain: Callable[[], Awaitable[str]] = _nothing,
) -> None:
    """Return as soon as the awaited *holds* is true; fail after *within* seconds, with what *explain* returns."""
    try:
        async with asyncio.timeout(within):
            while not await holds():  # noqa: ASYNC110 - it is another process that makes it so
                await asyncio.sleep(_LOOK_AGAIN)
    except TimeoutError:
        raise AssertionError(f"waited {within} s: {what} {await explain()}") from None
