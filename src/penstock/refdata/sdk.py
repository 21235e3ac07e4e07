"""R31: the Python client of dictionaries: reads see the writes before them, because it sends the version barrier."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import uuid4

import msgspec
import orjson
from msgspec import Raw

from penstock.kernel.errors import NotFound, PenstockError, TimedOut, Transient
from penstock.kernel.http.client import HttpResponse
from penstock.kernel.tasks.backoff import Backoff
from penstock.refdata import item_files
from penstock.refdata.client import PodClient, RefdataClient, read_version
from penstock.refdata.contract import Command, CommandItem, EventType, Op

T = TypeVar("T")
_MISSING = object()


class Dictionaries:
    """The dictionaries of one tenant. A read never returns an older version than an earlier write or read.

    `versions` contains the latest version that was written or read, by dictionary. Pass it to a client in another
    process, and that client reads no older version either. If the primary is restored from a backup and loses such a
    version, reads are refused until its entry is removed from `versions`.
    """

    def __init__(
        self,
        url: str,
        query_url: str,
        tenant: str,
        *,
        token: str | None = None,
        timeout: float = 30,
        versions: Mapping[str, int] | None = None,
    ) -> None:
        self.versions: dict[str, int] = dict(versions or {})
        self._commands = RefdataClient(url, token=token, timeout=timeout)
        self._pod = PodClient(query_url, token=token, timeout=timeout)
        self._tenant = tenant
        self._timeout = timeout
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._commands)
        await self._stack.enter_async_context(self._pod)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def put(self, dict_code: str, items: Mapping[str, Any], *, deletes: Iterable[str] = ()) -> int:
        """Insert or replace *items*, delete the keys *deletes*, and return the committed version."""
        puts = [CommandItem(key, payload=Raw(msgspec.json.encode(value))) for key, value in items.items()]
        deletions = [CommandItem(key, Op.DELETE) for key in deletes]
        command = Command(dict_code=dict_code, event_type=EventType.DELTA, items=[*puts, *deletions])
        return await self._commit(dict_code, [command])

    async def replace(self, dict_code: str, items: Mapping[str, Any]) -> int:
        """Replace all items of a dictionary by *items*, and return the committed version."""
        puts = [CommandItem(key, payload=Raw(msgspec.json.encode(value))) for key, value in items.items()]
        return await self._commit(dict_code, item_files.make_snapshot_commands(dict_code, puts, uuid4(), None))

    async def get(self, dict_code: str, key: str, default: Any = _MISSING) -> Any:
        """Return the payload of *key*; if there is none, return *default* or raise NotFound."""
        try:
            return orjson.loads((await self._read(dict_code, "item", key)).body)
        except NotFound as error:
            if error.code != "UNKNOWN_KEY" or default is _MISSING:
                raise
            return default

    async def get_many(self, dict_code: str, keys: Iterable[str]) -> dict[str, Any]:
        """Return the existing items of *keys*, all of one version."""
        items: dict[str, Any] = orjson.loads((await self._read(dict_code, "items", list(keys))).body)["items"]
        return items

    async def all(self, dict_code: str) -> AsyncIterator[tuple[str, Any]]:
        """Yield the key and the payload of every item of one version."""
        cursor = None
        while True:
            page = orjson.loads((await self._read(dict_code, "page", cursor=cursor)).body)
            for item in page["items"]:
                yield item["key"], item["value"]
            cursor = page["next"]
            if cursor is None:
                return

    async def version(self, dict_code: str) -> int:
        """Return the version that reads return."""
        return read_version(await self._read(dict_code, "version"))

    async def changes(self, dict_code: str) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield every change from now on, and `reset` if some were missed. The stream ends when the pod stops."""
        async with self._pod.changes(self._tenant, dict_code, self.versions.get(dict_code)) as events:
            async for event in events:
                self._record_version(dict_code, event["version"])
                yield event

    async def _read(self, dict_code: str, method: str, *args: Any, **options: Any) -> HttpResponse:
        async def send() -> HttpResponse:
            min_version = self.versions.get(dict_code)
            read = getattr(self._pod, method)
            response: HttpResponse = await read(self._tenant, dict_code, *args, min_version=min_version, **options)
            return response

        response = await self._retry(send)
        if not options.get("cursor"):  # later pages have the version of the first
            self._record_version(dict_code, read_version(response))
        return response

    async def _commit(self, dict_code: str, commands: list[Command]) -> int:
        for command in commands:
            command.event_id = uuid4()  # a repeated command is applied once
            waits = command is commands[-1]
            await self._retry(partial(self._commands.submit, self._tenant, command, waits=waits))
        return self._record_version(dict_code, await self._wait_for_commit(commands[-1]))

    async def _retry(self, send: Callable[[], Awaitable[T]]) -> T:
        """Call *send* until it succeeds; raise a Transient error after the timeout."""
        deadline, backoff = monotonic() + self._timeout, Backoff()
        while True:
            try:
                return await send()
            except Transient:
                if monotonic() > deadline:
                    raise
            await asyncio.sleep(backoff.compute_next().total_seconds())

    async def _wait_for_commit(self, command: Command) -> int:
        deadline, event_id = monotonic() + self._timeout, str(command.event_id)
        while True:
            update = await self._retry(partial(self._commands.update, self._tenant, event_id))
            if update["status"] == "COMMITTED":
                return int(update["committedVersion"])
            if update["status"] == "FAILED":
                raise PenstockError(update["errorCode"], f"the update failed: {update['error']}", eventId=event_id)
            if monotonic() > deadline:
                raise TimedOut(
                    "NOT_YET_COMMITTED", f"the update was not committed within {self._timeout:g} s", eventId=event_id
                )
            await asyncio.sleep(0.1)

    def _record_version(self, dict_code: str, version: int) -> int:
        self.versions[dict_code] = max(self.versions.get(dict_code, 0), version)
        return version
