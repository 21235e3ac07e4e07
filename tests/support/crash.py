"""Simulate the death of a process: raise `Killed` in this process, or kill a forked process at a chosen call."""

import functools
import os
import signal
from collections.abc import Awaitable, Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from tests.support.fork_server import FORKED

_TIMEOUT = 30.0  # seconds until a process that was killed or asked to stop has ended
Step = TypeVar("Step")


class Killed(BaseException):
    """End a run at the point where it is raised: the product catches no BaseException."""


def raise_killed() -> None:
    raise Killed


def call_at(step: Step | None, act: Callable[[], None] = raise_killed) -> Callable[[Step], None]:
    """Return a step hook that calls *act*, by default a simulated kill, when the run reaches *step*."""

    def on_step(reached: Step) -> None:
        if reached is step:
            act()

    return on_step


def kill_self() -> None:
    """Kill the current process, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


class KillAtCall:
    """Kill the current process at the *nth* call of this object."""

    def __init__(self, nth: int) -> None:
        self._left = iter(range(nth, 0, -1))

    def __call__(self) -> None:
        if next(self._left, 0) == 1:
            kill_self()


def call_before(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Replace an asynchronous method of *owner* by one that calls *act* first."""
    method: Callable[..., Awaitable[Any]] = getattr(owner, name)

    @functools.wraps(method)
    async def wrapped(*args: Any, **options: Any) -> Any:
        act()
        return await method(*args, **options)

    setattr(owner, name, wrapped)


def redirect_output(log: Path) -> None:
    """Append standard output and standard error of the current process to *log*."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)


class CrashingProcess:
    """Run a function in a forked process that is killed, by the test or by itself."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        self._process: ForkServerProcess = FORKED.Process(target=target, args=args, daemon=True)
        self._process.start()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """Kill the process without notice and wait for its end."""
        self._process.kill()
        self.join_killed()

    def stop(self) -> None:
        """Ask the process to stop (SIGTERM); does not wait."""
        self._process.terminate()

    def join_killed(self) -> None:
        """Wait for the end of the process, which must have been killed."""
        self._join(-signal.SIGKILL)

    def join_stopped(self) -> None:
        """Wait for the end of the process, which must have exited without an error."""
        self._join(0)

    def _join(self, exit_code: int) -> None:
        self._process.join(_TIMEOUT)
        assert self._process.exitcode == exit_code, self._process.exitcode
