"""Tests of calls from a thread into the event loop of another thread."""

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from penstock.ingest.tree.async_bridge import AsyncBridge


def test_close_cancels_running_calls() -> None:
    """Closing the bridge cancels waiting calls and rejects later calls; it can be closed twice."""
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
