"""R31: dictionaries from Python, read after they are written: the version barrier is carried along by itself."""

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
from penstock.refdata.client import PodClient, RefdataClient, version_of
from penstock.refdata.contract import Command, CommandItem, EventType, Op

T = TypeVar("T")
_MISSING = object()


class Dictionaries:
    """The dictionaries of one tenant. What was written or seen here is never read older here.

    `versions` is what has been seen, by dictionary: handed to another of its kind, in whatever process, that one reads
    no older either. Should the primary be restored from a backup and lose a version that was seen, reads are refused
    until it is taken out of there.
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
        """Add and change *items*, delete others; the version they are committed under."""
        changed = [CommandItem(key, payload=Raw(msgspec.json.encode(value))) for key, value in items.items()]
        gone = [CommandItem(key, Op.DELETE) for key in deletes]
        command = Command(dict_code=dict_code, event_type=EventType.DELTA, items=[*changed, *gone])
        return await self._committed(dict_code, [command])

    async def replace(self, dict_code: str, items: Mapping[str, Any]) -> int:
        """Make *items* all there is; the version they are committed under."""
        given = [CommandItem(key, payload=Raw(msgspec.json.encode(value))) for key, value in items.items()]
        return await self._committed(dict_code, item_files.snapshot_commands(dict_code, given, uuid4(), None))

    async def get(self, dict_code: str, key: str, default: Any = _MISSING) -> Any:
        """The item of *key*; without a *default*, NotFound when there is none."""
        try:
            return orjson.loads((await self._read(dict_code, "item", key)).body)
        except NotFound as error:
            if error.code != "UNKNOWN_KEY" or default is _MISSING:
                raise
            return default

    async def get_many(self, dict_code: str, keys: Iterable[str]) -> dict[str, Any]:
        """The items of *keys* that there are, all of one version."""
        found: dict[str, Any] = orjson.loads((await self._read(dict_code, "items", list(keys))).body)["items"]
        return found

    async def all(self, dict_code: str) -> AsyncIterator[tuple[str, Any]]:
        """Every item of one version."""
        cursor = None
        while True:
            page = orjson.loads((await self._read(dict_code, "page", cursor=cursor)).body)
            for item in page["items"]:
                yield item["key"], item["value"]
            cursor = page["next"]
            if cursor is None:
                return

    async def version(self, dict_code: str) -> int:
        """The version that is read."""
        return version_of(await self._read(dict_code, "version"))

    async def changes(self, dict_code: str) -> AsyncGenerator[Mapping[str, Any], None]:
        """Every change from now on; `reset` where some were missed. It ends when the pod does: then call again."""
        async with self._pod.changes(self._tenant, dict_code, self.versions.get(dict_code)) as events:
            async for event in events:
                self._seen(dict_code, event["version"])
                yield event

    async def _read(self, dict_code: str, what: str, *args: Any, **more: Any) -> HttpResponse:
        async def ask() -> HttpResponse:
            least = self.versions.get(dict_code)
            answer: HttpResponse = await getattr(self._pod, what)(self._tenant, dict_code, *args, least=least, **more)
            return answer

        answer = await self._patiently(ask)
        if not more.get("cursor"):  # later pages are of the first one's version
            self._seen(dict_code, version_of(answer))
        return answer

    async def _committed(self, dict_code: str, commands: list[Command]) -> int:
        for command in commands:
            command.event_id = uuid4()  # sent twice it counts once
            waits = command is commands[-1]
            await self._patiently(partial(self._commands.submit, self._tenant, command, waits=waits))
        return self._seen(dict_code, await self._version_of(commands[-1]))

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer, or time is up."""
        deadline, backoff = monotonic() + self._timeout, Backoff()
        while True:
            try:
                return await ask()
            except Transient:
                if monotonic() > deadline:
                    raise
            await asyncio.sleep(backoff.next().total_seconds())

    async def _version_of(self, command: Command) -> int:
        deadline, event_id = monotonic() + self._timeout, str(command.event_id)
        while True:
            told = await self._patiently(partial(self._commands.update, self._tenant, event_id))
            if told["status"] == "COMMITTED":
                return int(told["committedVersion"])
            if told["status"] == "FAILED":
                raise PenstockError(told["errorCode"], f"the update failed: {told['error']}", eventId=event_id)
            if monotonic() > deadline:
                raise TimedOut("NOT_YET_COMMITTED", "the commit takes longer", eventId=event_id)
            await asyncio.sleep(0.1)

    def _seen(self, dict_code: str, version: int) -> int:
        self.versions[dict_code] = max(self.versions.get(dict_code, 0), version)
        return version
