"""Calls of one thread that run in the event loop of another."""

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from penstock.ingest.tree.async_bridge import AsyncBridge


def test_a_bridge_ends_with_what_is_under_way() -> None:
    """A call that waits when the bridge is closed is stopped; a call after that is refused; closing twice is fine."""
    bridge = AsyncBridge()
    waiting = threading.Event()

    async def wait() -> None:
        waiting.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as callers:
        call = callers.submit(bridge.call, wait())
        waiting.wait(10)
        bridge.close()
        with pytest.raises(CancelledError):
            call.result(10)
    bridge.close()
    with pytest.raises(RuntimeError):
        bridge.call(wait())
