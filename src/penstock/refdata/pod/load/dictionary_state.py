"""R19: the state of one dictionary of one tenant: loaded and requested version, and the schedule of its loads."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import timedelta
from random import uniform
from time import monotonic
from typing import Protocol

from penstock.kernel.errors import NotFound, PenstockError
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.wait import wait_event
from penstock.refdata.model import DictionaryKey, VersionStamp

_NOT_LOADED = -1
_FIRST_RETRY, _LAST_RETRY = timedelta(milliseconds=100), timedelta(seconds=5)


@dataclass(frozen=True)
class LoadLimits:
    """Limits of the loads of a pod: delays in seconds, and slots for simultaneous loads."""

    debounce: float
    jitter: float
    slots: asyncio.Semaphore


class LoadTask(Protocol):
    """A function that loads the changes of a dictionary, or with *full* all items.

    It returns the loaded version or raises PenstockError.
    """

    def __call__(self, state: "DictionaryState", *, full: bool) -> Awaitable[VersionStamp]: ...


class DictionaryState:
    """The loaded and the requested version of a dictionary; a task loads it while they differ."""

    def __init__(self, target: DictionaryKey, limits: LoadLimits, load: "LoadTask") -> None:
        self.target = target
        self.mark: VersionStamp | None = None
        self.requested = 0
        self.error: PenstockError | None = None  # of the last load
        self._needs_full_load = True
        self._limits = limits
        self._load = load
        self._request_count = 0  # requests for versions that were not loaded
        self._has_waiters = False  # whether a reader was already waiting when the load started
        self._immediately = asyncio.Event()
        self._retry = asyncio.Event()
        self._changed = asyncio.Event()
        self._has_slot = False
        self.behind_since = 0.0  # monotonic; 0 unless a requested version is not loaded
        self._started_at = -limits.debounce
        self._backoff = Backoff(_FIRST_RETRY, _LAST_RETRY)
        self._task: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Return the loaded version; before the first load a number below every version."""
        return _NOT_LOADED if self.mark is None else self.mark.version

    @property
    def lag(self) -> int:
        """Return the number of versions between the loaded and the requested version."""
        return max(self.requested - max(self.version, 0), 0)

    def request_version(self, version: int, *, immediately: bool = False, full: bool = False) -> None:
        """Load *version* or a later one in the background; with *full* load all items even if it is loaded."""
        self.requested = max(self.requested, version)
        self._needs_full_load |= full
        self._request_count += version > self.version
        if self._is_behind and self._task is None:
            self.behind_since = monotonic()
            self._task = asyncio.create_task(self._refresh(), name=f"load {'/'.join(self.target)}")
        if immediately:
            self.load_now()

    def load_now(self) -> None:
        """Skip debounce, jitter and back-off of the pending load, because a reader waits for it."""
        if self._task is not None:
            self._immediately.set()
            self._retry.set()

    def retry_now(self) -> None:
        """End the back-off after a failed load, because the primary is reachable."""
        self._retry.set()

    async def wait_for_version(self, version: int) -> None:
        """Return when *version* or a later one is loaded."""
        while self.version < version:
            await self._changed.wait()

    async def wait_until_loaded(self) -> None:
        """Return when any version is loaded, or the load failed with a permanent error."""
        while self.mark is None and not (self.error is not None and is_permanent(self.error)):
            await self._changed.wait()

    async def wait_jitter(self) -> None:
        """Wait a random time, so that pods do not load simultaneously; not for waiting readers or the first load."""
        if self.mark is not None and not self._has_waiters:
            self._release_slot()  # other dictionaries can load meanwhile
            await wait_event(self._immediately, uniform(0, self._limits.jitter))  # noqa: S311 - chance, not secrecy
            await self._acquire_slot()

    async def stop(self) -> None:
        """Cancel the running load and start no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._notify(NotFound("UNKNOWN_DICTIONARY", f"{self.target.dict_code} was removed from the configuration"))

    @property
    def _is_behind(self) -> bool:
        return self._needs_full_load or self.requested > self.version

    async def _refresh(self) -> None:
        try:
            while self._is_behind:
                await self._load_once()
        finally:
            self._task, self.behind_since = None, 0.0
            self._immediately.clear()

    async def _load_once(self) -> None:
        await wait_event(self._immediately, self._started_at + self._limits.debounce - monotonic())
        await self._acquire_slot()
        try:
            requests_seen, full = self._request_count, self._needs_full_load
            self._started_at, self._needs_full_load = monotonic(), False
            self._has_waiters = self._immediately.is_set()
            self._immediately.clear()
            self._retry.clear()
            try:
                mark = await self._load(self, full=full)
            except PenstockError as error:
                failure = error
            else:
                self._set_loaded(mark, requests_seen)
                return
        finally:
            self._release_slot()
        self._needs_full_load |= full
        self._notify(failure)
        await wait_event(self._retry, self._backoff.compute_next().total_seconds())

    async def _acquire_slot(self) -> None:
        await self._limits.slots.acquire()
        self._has_slot = True

    def _release_slot(self) -> None:
        if self._has_slot:
            self._limits.slots.release()
            self._has_slot = False

    def _set_loaded(self, mark: VersionStamp, requests_seen: int) -> None:
        self.mark = mark
        if self._request_count == requests_seen:  # no version was requested since this load started
            # The primary decides: a requested version that it does not have is not waited for.
            self.requested = mark.version
        self._backoff.reset()
        self._notify(None)

    def _notify(self, error: PenstockError | None) -> None:
        self.error = error
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def is_permanent(error: PenstockError) -> bool:
    """Return whether a retry cannot succeed before a person has fixed the cause."""
    return error.status != 503 or error.code == "MEMORY_FULL"
