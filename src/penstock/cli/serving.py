"""How the commands that serve begin and end."""

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from penstock.cli.output import say

if TYPE_CHECKING:
    from penstock.settings import Settings

A = TypeVar("A")
Role = Callable[["Settings", asyncio.Event, Callable[[A], None]], Awaitable[None]]


@contextmanager
def loading() -> Iterator[None]:
    """Modules that are loaded meanwhile stay for good: nobody looks for garbage among them, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def serve(settings: "Settings", role: Role[A], on_ready: Callable[[A], None]) -> None:
    """Run *role* until SIGINT or SIGTERM; *on_ready* tells where it listens."""
    import uvloop

    from penstock.kernel.telemetry.build import code_commit
    from penstock.kernel.telemetry.telemetry import configure_logging

    code_commit()  # a checkout asks git; later that would be on the event loop
    configure_logging(settings.telemetry.log_level, settings.telemetry.log_format)
    if settings.auth.jwt is None:
        say(f"no authentication is set, so only this machine can connect ({settings.server.host})")
    uvloop.run(_main(settings, role, on_ready))


async def _main(settings: "Settings", role: Role[A], on_ready: Callable[[A], None]) -> None:
    from penstock.kernel.telemetry.log_level import LOG_LEVEL

    ending = _Ending()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, LOG_LEVEL.toggle_debugging)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # until somebody looks at the configuration

    def ready(addresses: A) -> None:
        ending.is_ready = True
        on_ready(addresses)

    try:
        await role(settings, ending.asked, ready)
    except asyncio.CancelledError:
        if not ending.asked.is_set():
            raise


class _Ending:
    """What SIGINT and SIGTERM mean: stop once it runs, give up while it starts, leave at once when asked twice."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.is_ready = False
        self._task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.asked.is_set():
            os._exit(130)  # the database recovers by itself
        self.asked.set()
        if self._task is not None and not self.is_ready:  # perhaps it waits for somebody's lock
            self._task.cancel()
