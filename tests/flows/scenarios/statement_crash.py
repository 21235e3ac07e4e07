"""Simulate, in this process, a process that dies before the nth statement or storage call."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
import pytest

from penstock.kernel.errors import Transient
from penstock.kernel.storage.folder import FolderStorage
from tests.flows.stepper import ProcessDied


class StatementCrasher:
    """Count statements and storage calls; from the chosen one on, end the session and raise `ProcessDied`."""

    def __init__(self) -> None:
        self._left: int | None = None
        self.calls = 0

    async def run_until_crash(self, act: Callable[[], Awaitable[Any]], nth: int) -> bool:
        """Run *act* until the *nth* call; return whether it crashed before its end."""
        self._left, self.calls = nth, 0
        try:
            await act()
        except (ProcessDied, Transient, asyncpg.InterfaceError):
            assert self._left == 0, "it failed of something else"
        is_dead, self._left = self._left == 0, None
        return is_dead

    def pass_call(self, session: Any = None) -> None:
        if self._left is None:
            return
        self.calls += 1
        self._left = max(0, self._left - 1)
        if self._left == 0:
            if session is not None:
                session.terminate()  # its transaction is rolled back
            raise ProcessDied


@contextmanager
def statement_crasher(patch: pytest.MonkeyPatch) -> Iterator[StatementCrasher]:
    """Open a crasher through which all statements and storage calls pass."""
    crasher = StatementCrasher()
    with patch.context() as patched:
        for name in ("execute", "fetch", "fetchrow", "fetchval"):
            patched.setattr(
                asyncpg.Connection, name, _before(getattr(asyncpg.Connection, name), crasher, is_session=True)
            )
        for name in ("put", "put_file", "get", "read_info", "delete"):
            patched.setattr(FolderStorage, name, _before(getattr(FolderStorage, name), crasher))
        for name in ("stream", "list"):
            patched.setattr(FolderStorage, name, _before_each(getattr(FolderStorage, name), crasher))
        yield crasher


def _before(act: Any, crasher: StatementCrasher, *, is_session: bool = False) -> Any:
    @functools.wraps(act)
    async def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        crasher.pass_call(owner if is_session else None)
        return await act(owner, *args, **kwargs)

    return call


def _before_each(act: Any, crasher: StatementCrasher) -> Any:
    @functools.wraps(act)
    async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        crasher.pass_call()
        async for item in act(*args, **kwargs):
            yield item

    return call
