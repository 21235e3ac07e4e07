"""SIGINT and SIGTERM: work is cancelled, so that it stops its servers, and what it has found so far is kept."""

import asyncio
import signal
import sys
import traceback
from collections.abc import Coroutine

SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def run_interruptibly(work: Coroutine[None, None, None]) -> signal.Signals | None:
    """Run *work* to its end, or cancel it on SIGINT or SIGTERM; return the signal once everything is stopped."""
    task, received = asyncio.create_task(work), list[signal.Signals]()

    def stop(number: signal.Signals) -> None:
        if not received:  # a second signal would cancel the stopping of servers
            print(f"{number.name}: stopping", file=sys.stderr)
            task.cancel()
        received.append(number)

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await asyncio.wait([task])
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    if not received:
        task.result()
        return None
    if not task.cancelled() and (error := task.exception()) is not None:
        traceback.print_exception(error)  # the figures are not lost to a server that did not stop well
    return received[0]
