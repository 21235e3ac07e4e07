"""R21: the version barrier: a read of at least a given version, from memory or from the primary, or an error."""

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
from penstock.refdata.pod.ipc import BarrierRequest, ItemsReply, LoadedReply, LoaderReply, check_size
from penstock.refdata.pod.load.dictionary_state import DictionaryState
from penstock.refdata.pod.load.loader import PodLoader
from penstock.refdata.pod.load.metrics import PodMetrics

T = TypeVar("T")
_QUERY_INTERVAL = 0.02  # seconds between two queries for the version of one dictionary, for any number of readers


class VersionBarrier:
    """The readers that wait for versions which this pod has not loaded yet."""

    def __init__(self, loader: PodLoader, section: QuerySection, metrics: PodMetrics) -> None:
        self._loader = loader
        self._metrics = metrics
        self._wait = section.barrier_wait_ms / 1000
        self._primary_timeout = section.fallback_timeout_ms / 1000
        self._waiter_limit = section.barrier_waiters
        self._fallbacks = asyncio.Semaphore(section.fallbacks)
        self._committed: dict[DictionaryKey, _CommittedVersion] = {}
        self._waiting = 0

    async def reach(self, request: BarrierRequest) -> LoaderReply:
        """Wait until *request* can be served from memory, or return the items of the primary; Conflict or Transient.

        A version that the primary returned before the request is not used: a newer one may have been committed since.
        """
        state = self._loader.ensure_state(DictionaryKey(request.tenant_id, request.dict_code))
        start = monotonic()
        async with self._count_waiter():
            if await self._wait_for_memory(state, request, start):
                return LoadedReply()
            await self._require_committed(state, request, start)
            if request.resource == "all":  # to read all items is a load: do it once, for all readers
                return await self._wait_for_load(state, request)
            reply = await self._run_in_time(self._read(state.target, request))
            self._metrics.fallbacks.labels(request.dict_code).inc()
            return reply

    async def _wait_for_memory(self, state: DictionaryState, request: BarrierRequest, start: float) -> bool:
        """Return whether the version is loaded within `barrierWaitMs`; the load skips debounce and jitter."""
        state.load_now()
        try:
            await run_with_timeout(self._wait, self._catch_up(state, request, start))
        except (TimeoutError, Transient):
            return state.version >= request.version
        return True

    async def _catch_up(self, state: DictionaryState, request: BarrierRequest, start: float) -> None:
        # The signal may have been lost, so query the primary; simultaneous readers share one query.
        await self._require_committed(state, request, start)
        await state.wait_for_version(request.version)

    async def _require_committed(self, state: DictionaryState, request: BarrierRequest, start: float) -> None:
        """Raise Conflict unless the primary has the requested version and readers may see it; request its load."""
        query = self._committed.setdefault(
            state.target, _CommittedVersion(self._loader.db, state.target, self._primary_timeout)
        )
        committed, pinned = await self._run_in_time(query.read_after(start))
        if committed < request.version:
            raise _make_not_committed_error(request, committed)
        if pinned is not None and pinned < request.version:
            raise _make_pinned_error(request, pinned)
        state.request_version(committed if pinned is None else pinned, immediately=True)

    async def _wait_for_load(self, state: DictionaryState, request: BarrierRequest) -> LoaderReply:
        try:
            await run_with_timeout(self._primary_timeout, state.wait_for_version(request.version))
        except TimeoutError as error:
            problem = f"version {request.version} of {request.dict_code} is committed, and this pod is loading it"
            raise Transient("NOT_LOADED", problem, hint="try again") from error
        return LoadedReply()

    async def _read(self, target: DictionaryKey, request: BarrierRequest) -> LoaderReply:
        provider = self._loader.catalogue.get(target).provider
        async with self._fallbacks, provider.open_snapshot(self._loader.db, target) as snapshot:
            if snapshot.mark.version < request.version:
                raise (_make_pinned_error if snapshot.mark.is_pinned else _make_not_committed_error)(
                    request, snapshot.mark.version
                )
            items = dict(await snapshot.read_existing(request.keys)) if request.keys else {}
        check_size(sum(map(len, items.values())))
        return ItemsReply(snapshot.mark, {key: items[key] for key in request.keys if key in items})

    async def _run_in_time(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await run_with_timeout(self._primary_timeout, work)
        except TimeoutError as error:
            raise _make_slow_error() from error

    @asynccontextmanager
    async def _count_waiter(self) -> AsyncIterator[None]:
        if self._waiting >= self._waiter_limit:
            problem = f"{self._waiter_limit} readers are already waiting for versions"
            raise Transient("TOO_MANY_WAITERS", problem, hint="try again in a moment")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1


class _CommittedVersion:
    """The version of a dictionary in the primary, or the error of the last query; all readers share one query."""

    def __init__(self, db: Database, target: DictionaryKey, timeout: float) -> None:
        self._db, self._target, self._timeout = db, target, timeout
        self._queried_at = -_QUERY_INTERVAL
        self._result: tuple[int, int | None] | PenstockError = (0, None)
        self._query: asyncio.Task[None] | None = None

    async def read_after(self, since: float) -> tuple[int, int | None]:
        """Return the committed and the pinned version, from a query that started after *since*."""
        while self._queried_at <= since:
            if self._query is None:
                self._query = asyncio.create_task(self._run_query(), name="read a version")
            await asyncio.shield(self._query)  # a reader that gives up must not cancel the query of the others
        if isinstance(self._result, PenstockError):
            raise Transient(self._result.code, self._result.message, hint=self._result.hint)
        return self._result

    async def _run_query(self) -> None:
        await asyncio.sleep(max(self._queried_at + _QUERY_INTERVAL - monotonic(), 0))
        queried_at = monotonic()
        try:
            self._result = await run_with_timeout(self._timeout, self._read())
        except TimeoutError:  # possibly only this connection is stuck: the next query uses another
            self._result = _make_slow_error()
        except PenstockError as error:
            self._result = error
        except Exception as error:  # noqa: BLE001 - the edge of the task: the readers get the error
            structlog.get_logger().exception(
                "version_read_failed", tenantId=self._target.tenant_id, dictCode=self._target.dict_code
            )
            self._result = Transient("PRIMARY_SLOW", f"the query for the version failed: {error}", hint="try again")
        finally:
            self._queried_at, self._query = queried_at, None

    async def _read(self) -> tuple[int, int | None]:
        async with self._db.connection() as connection:
            return await store.read_visible_version(connection, self._target)


def _make_slow_error() -> Transient:
    return Transient("PRIMARY_SLOW", "the primary does not answer in time", hint="try again")


def _make_not_committed_error(request: BarrierRequest, committed: int) -> Conflict:
    return Conflict(
        "VERSION_NOT_COMMITTED",
        f"{request.dict_code} is at version {committed}, not yet at {request.version}",
        hint="request a version that a write returned as committedVersion",
        version=committed,
    )


def _make_pinned_error(request: BarrierRequest, version: int) -> Conflict:
    problem = f"{request.dict_code} is pinned to version {version}: readers get no other version until it is unpinned"
    hint = f"omit X-Min-Version, or run `penstock dict unpin {request.tenant_id} {request.dict_code}`"
    return Conflict("VERSION_PINNED", problem, hint=hint, version=version)
