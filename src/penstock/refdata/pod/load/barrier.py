"""R21: whoever names a version never sees less: memory, else a short wait, else the primary, else a refusal."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, TypeVar

import structlog

from penstock.kernel.db.database import Database
from penstock.kernel.errors import Conflict, PenstockError, Transient
from penstock.kernel.tasks.wait import run_with_timeout
from penstock.refdata import store
from penstock.refdata.config import QuerySection
from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.ipc import Answer, ItemsReply, LoadedReply, ReachRequest, check_size
from penstock.refdata.pod.load.dictionary_state import DictionaryState
from penstock.refdata.pod.load.loader import PodLoader
from penstock.refdata.pod.load.metrics import PodMetrics

T = TypeVar("T")
_ASK_AGAIN = 0.02  # seconds between two questions for one version, however many want to know it


class VersionBarrier:
    """Those who wait for versions that this pod does not hold yet."""

    def __init__(self, loader: PodLoader, section: QuerySection, metrics: PodMetrics) -> None:
        self._loader = loader
        self._metrics = metrics
        self._wait = section.barrier_wait_ms / 1000
        self._patience = section.fallback_timeout_ms / 1000
        self._most_waiting = section.barrier_waiters
        self._fallbacks = asyncio.Semaphore(section.fallbacks)
        self._committed: dict[DictionaryKey, _CommittedVersion] = {}
        self._waiting = 0

    async def reach(self, asked: ReachRequest) -> Answer:
        """Let *asked* be answered from memory, or answer it from the primary; Conflict, Transient when neither can be.

        What a primary said before the question came is no answer to it: the version may have been committed since.
        """
        holding, began = self._loader.find(DictionaryKey(asked.tenant_id, asked.dict_code)), monotonic()
        async with self._among_the_waiting():
            if await self._comes(holding, asked, began):
                return LoadedReply()
            await self._must_be_committed(holding, asked, began)
            if asked.what == "all":  # all of it from the primary is a load: let it be the one that everybody gets
                return await self._loaded(holding, asked)
            found = await self._in_time(self._read(holding.target, asked))
            self._metrics.fallbacks.labels(asked.dict_code).inc()
            return found

    async def _comes(self, holding: DictionaryState, asked: ReachRequest, began: float) -> bool:
        """Whether memory gets there in the short time there is; nobody then waits for debounce or jitter."""
        holding.hurry()
        try:
            await run_with_timeout(self._wait, self._catch_up(holding, asked, began))
        except (TimeoutError, Transient):
            return holding.version >= asked.version
        return True

    async def _catch_up(self, holding: DictionaryState, asked: ReachRequest, began: float) -> None:
        # The signal may have been lost: look, as many as we are, with one question.
        await self._must_be_committed(holding, asked, began)
        await holding.reaches(asked.version)

    async def _must_be_committed(self, holding: DictionaryState, asked: ReachRequest, began: float) -> None:
        """Conflict unless the primary has the version that is asked for, and lets it be read; then it is loaded."""
        known = self._committed.setdefault(
            holding.target, _CommittedVersion(self._loader.db, holding.target, self._patience)
        )
        committed, pinned = await self._in_time(known.after(began))
        if committed < asked.version:
            raise _not_committed(asked, committed)
        if pinned is not None and pinned < asked.version:
            raise _pinned(asked, pinned)
        holding.want(committed if pinned is None else pinned, at_once=True)

    async def _loaded(self, holding: DictionaryState, asked: ReachRequest) -> Answer:
        try:
            await run_with_timeout(self._patience, holding.reaches(asked.version))
        except TimeoutError as error:
            said = f"version {asked.version} of {asked.dict_code} is committed, and still being loaded"
            raise Transient("NOT_LOADED", said, hint="try again") from error
        return LoadedReply()

    async def _read(self, target: DictionaryKey, asked: ReachRequest) -> Answer:
        provider = self._loader.catalogue.get(target).provider
        async with self._fallbacks, provider.open_snapshot(self._loader.db, target) as snapshot:
            if snapshot.mark.version < asked.version:
                raise (_pinned if snapshot.mark.is_pinned else _not_committed)(asked, snapshot.mark.version)
            found = dict(await snapshot.read_existing(asked.keys)) if asked.keys else {}
        check_size(sum(map(len, found.values())))
        return ItemsReply(snapshot.mark, {key: found[key] for key in asked.keys if key in found})

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await run_with_timeout(self._patience, work)
        except TimeoutError as error:
            raise _slow() from error

    @asynccontextmanager
    async def _among_the_waiting(self) -> AsyncIterator[None]:
        if self._waiting >= self._most_waiting:
            said = f"{self._most_waiting} readers wait for versions already"
            raise Transient("TOO_MANY_WAITERS", said, hint="try again in a moment")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1


class _CommittedVersion:
    """What the primary last said of one dictionary, or why it did not: one question at a time, for all who ask."""

    def __init__(self, db: Database, target: DictionaryKey, patience: float) -> None:
        self._db, self._target, self._patience = db, target, patience
        self._asked_at = -_ASK_AGAIN
        self._answer: tuple[int, int | None] | PenstockError = (0, None)
        self._asking: asyncio.Task[None] | None = None

    async def after(self, since: float) -> tuple[int, int | None]:
        """The version that is committed and the one that is pinned, asked after *since*."""
        while self._asked_at <= since:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask(), name="ask for a version")
            await asyncio.shield(self._asking)  # who waits no longer does not take it from the others
        if isinstance(self._answer, PenstockError):
            raise Transient(self._answer.code, self._answer.message, hint=self._answer.hint)
        return self._answer

    async def _ask(self) -> None:
        await asyncio.sleep(max(self._asked_at + _ASK_AGAIN - monotonic(), 0))
        asked_at = monotonic()
        try:
            self._answer = await run_with_timeout(self._patience, self._read())
        except TimeoutError:  # perhaps only this connection is stuck: the next question takes another
            self._answer = _slow()
        except PenstockError as error:
            self._answer = error
        except Exception as error:  # noqa: BLE001 - the edge of the task: those who wait are told
            structlog.get_logger().exception("version_not_asked")
            self._answer = Transient("PRIMARY_SLOW", f"the primary cannot be asked: {error}", hint="try again")
        finally:
            self._asked_at, self._asking = asked_at, None

    async def _read(self) -> tuple[int, int | None]:
        async with self._db.connection() as connection:
            return await store.read_visible_version(connection, self._target)


def _slow() -> Transient:
    return Transient("PRIMARY_SLOW", "the primary does not answer in time", hint="try again")


def _not_committed(asked: ReachRequest, committed: int) -> Conflict:
    return Conflict(
        "VERSION_NOT_COMMITTED",
        f"{asked.dict_code} is at version {committed}, not yet at {asked.version}",
        hint="ask for a version that a write was answered with",
        version=committed,
    )


def _pinned(asked: ReachRequest, version: int) -> Conflict:
    said = f"{asked.dict_code} is pinned to version {version}: readers get no other until it is unpinned"
    return Conflict("VERSION_PINNED", said, hint="ask for no version, or `penstock dict unpin`", version=version)
