"""R19: one dictionary of one tenant, and when it is loaded: one load at a time, never too often, never too late."""

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

_NOTHING = -1
_FIRST_RETRY, _LAST_RETRY = timedelta(milliseconds=100), timedelta(seconds=5)


@dataclass(frozen=True)
class LoadPace:
    """How often, and how many at once."""

    debounce: float
    jitter: float
    slots: asyncio.Semaphore


class LoadTask(Protocol):
    """Loads what is wanted: what changed, or *anew* all of it; returns what is held then, or raises PenstockError."""

    def __call__(self, holding: "DictionaryState", *, anew: bool) -> Awaitable[VersionStamp]: ...


class DictionaryState:
    """Knows the version that is held and the one that is wanted, and loads as long as they differ."""

    def __init__(self, target: DictionaryKey, pace: LoadPace, load: "LoadTask") -> None:
        self.target = target
        self.mark: VersionStamp | None = None
        self.wanted = 0
        self.error: PenstockError | None = None  # of the last load
        self._is_anew = True  # whether what is held cannot be built upon
        self._pace = pace
        self._load = load
        self._wishes = 0  # so many times a version was wanted that was not held
        self._is_hurried = False  # whether somebody waited already when the load began
        self._hurry = asyncio.Event()
        self._again = asyncio.Event()
        self._changed = asyncio.Event()
        self._has_slot = False
        self.behind_since = 0.0  # monotonic; while a version is wanted that is not held
        self._began = -pace.debounce
        self._backoff = Backoff(_FIRST_RETRY, _LAST_RETRY)
        self._task: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """The version that is held; below every version before the first load."""
        return _NOTHING if self.mark is None else self.mark.version

    @property
    def lag(self) -> int:
        return max(self.wanted - max(self.version, 0), 0)

    def want(self, version: int, *, at_once: bool = False, anew: bool = False) -> None:
        """Have *version* or a later one loaded; *anew* whatever is held."""
        self.wanted = max(self.wanted, version)
        self._is_anew |= anew
        self._wishes += version > self.version
        if self._is_behind and self._task is None:
            self.behind_since = monotonic()
            self._task = asyncio.create_task(self._refresh(), name=f"load {'/'.join(self.target)}")
        if at_once:
            self.hurry()

    def hurry(self) -> None:
        """Somebody waits: no debounce, no jitter, no back-off for what is about to be loaded."""
        if self._task is not None:
            self._hurry.set()
            self._again.set()

    def try_again(self) -> None:
        """The primary is there: what failed need not wait for its turn."""
        self._again.set()

    async def reaches(self, version: int) -> None:
        """Return when *version* or a later one is held."""
        while self.version < version:
            await self._changed.wait()

    async def settles(self) -> None:
        """Return when it is held, or cannot be for another reason than the moment's."""
        while self.mark is None and not (self.error is not None and is_lasting(self.error)):
            await self._changed.wait()

    async def jitter(self) -> None:
        """Let the pods part, unless somebody waits or nothing is held yet."""
        if self.mark is not None and not self._is_hurried:
            self._leave_slot()  # for others who need not wait
            await wait_event(self._hurry, uniform(0, self._pace.jitter))  # noqa: S311 - chance, not secrecy
            await self._take_slot()

    async def end(self) -> None:
        """Load no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._tell(NotFound("UNKNOWN_DICTIONARY", f"{self.target.dict_code} is held no more"))

    @property
    def _is_behind(self) -> bool:
        return self._is_anew or self.wanted > self.version

    async def _refresh(self) -> None:
        try:
            while self._is_behind:
                await self._step()
        finally:
            self._task, self.behind_since = None, 0.0
            self._hurry.clear()

    async def _step(self) -> None:
        await wait_event(self._hurry, self._began + self._pace.debounce - monotonic())
        await self._take_slot()
        try:
            wishes, anew = self._wishes, self._is_anew
            self._began, self._is_anew, self._is_hurried = monotonic(), False, self._hurry.is_set()
            self._hurry.clear()
            self._again.clear()
            try:
                mark = await self._load(self, anew=anew)
            except PenstockError as error:
                failure = error
            else:
                self._held(mark, wishes)
                return
        finally:
            self._leave_slot()
        self._is_anew |= anew
        self._tell(failure)
        await wait_event(self._again, self._backoff.next().total_seconds())

    async def _take_slot(self) -> None:
        await self._pace.slots.acquire()
        self._has_slot = True

    def _leave_slot(self) -> None:
        if self._has_slot:
            self._pace.slots.release()
            self._has_slot = False

    def _held(self, mark: VersionStamp, wishes: int) -> None:
        self.mark = mark
        if self._wishes == wishes:  # else one was wanted that was committed since this load began
            # The primary has the last word: a version that it does not have is not waited for.
            self.wanted = mark.version
        self._backoff.reset()
        self._tell(None)

    def _tell(self, error: PenstockError | None) -> None:
        self.error = error
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def is_lasting(error: PenstockError) -> bool:
    """Whether only a person can mend it."""
    return error.status != 503 or error.code == "MEMORY_FULL"
