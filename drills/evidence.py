"""What is asked when the load is over: the history of versions, what every pod holds, whether it agrees."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic

import orjson

from drills.checker import Evidence
from drills.load import Keys
from drills.recorder import Outcome, Recorder, Write
from drills.target import Target
from penstock.kernel.errors import NotFound, PenstockError, Transient
from penstock.refdata.client import PodClient, RefdataClient
from penstock.refdata.sdk import Dictionaries

_PAGE = 1_000
_KEYS_AT_ONCE = 100
_TRY_AGAIN = 0.2
_TIMEOUT = 30.0


@asynccontextmanager
async def opened(target: Target) -> AsyncIterator["Inspector"]:
    """Whoever asks; everybody must answer at first, else Transient, or NotFound for the dictionary."""
    async with AsyncExitStack() as stack:
        commands = await stack.enter_async_context(
            RefdataClient(target.command_url, token=target.token, timeout=_TIMEOUT)
        )
        pods = {
            name: await stack.enter_async_context(PodClient(url, token=target.token, timeout=_TIMEOUT))
            for name, url in target.query_urls.items()
        }
        yield Inspector(target, commands, pods)


class Inspector:
    """Looks at a target from outside, with time."""

    def __init__(self, target: Target, commands: RefdataClient, pods: dict[str, PodClient]) -> None:
        self._target = target
        self._commands = commands
        self._pods = pods

    async def check(self) -> None:
        """Raise what is wrong with the target before anything is asked of it."""
        tenant, code = self._target.tenant, self._target.dict_code
        try:
            await self._commands.history(tenant, code, limit=1)
            for pod in self._pods.values():
                await pod.version(tenant, code)
        except NotFound as error:
            hint = f"name one with --tenant and --dict that is configured there, not {tenant} and {code}"
            raise NotFound(error.code, error.message, hint=hint) from error
        except Transient as error:
            hint = "is it up, and can it be reached from here? --command-url and --query-url tell where it is"
            raise Transient(error.code, error.message, hint=hint) from error

    async def seed(self, keys: Keys) -> int:
        """Write every key for the first time; the version, once every pod has it."""
        async with self._dictionaries() as dictionaries:
            items = {keys.name(number): keys.payload(0) for number in range(keys.count)}
            version = await dictionaries.put(self._target.dict_code, items)
        for pod in self._pods.values():
            await _patiently(pod, self._target, version)
        return version

    async def remove(self, keys: Keys) -> None:
        """Leave nothing behind in somebody's dictionary."""
        async with self._dictionaries() as dictionaries:
            await dictionaries.put(self._target.dict_code, {}, deletes=[keys.name(n) for n in range(keys.count)])

    async def evidence(self, keys: Keys, base: int, recorder: Recorder, within: float) -> Evidence:
        """All there is to judge, once what was accepted is settled."""
        history = await self._settled_history(base, recorder.writes, within)
        last = history[-1][0] if history else base
        finals: dict[str, dict[int, int | None]] = {}
        audits: dict[str, str] = {}
        unreached = []
        for name, pod in self._pods.items():
            try:
                finals[name] = await self._held(pod, keys, last)
                audits[name] = await self._audit(pod)
            except PenstockError as error:
                unreached.append(f"{name} could not be asked: {error.message}")
        return Evidence(base, recorder.reads, recorder.writes, history, finals, audits, recorder.faults, unreached)

    async def _settled_history(self, base: int, writes: Sequence[Write], within: float) -> list[tuple[int, str]]:
        expected = {write.event_id for write in writes if write.outcome is not Outcome.UNKNOWN}
        deadline = monotonic() + within
        while True:
            try:
                history = await self._history(base)
                if monotonic() > deadline or not expected - {event_id for _, event_id in history}:
                    return history
            except Transient:
                if monotonic() > deadline:
                    raise
            await asyncio.sleep(_TRY_AGAIN)

    async def _history(self, base: int) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        cursor = None
        while True:
            page = await self._commands.history(self._target.tenant, self._target.dict_code, limit=_PAGE, cursor=cursor)
            found += [(one["version"], one["eventId"]) for one in page["versions"] if one["version"] > base]
            cursor = page["next"]
            if cursor is None or page["versions"][-1]["version"] <= base:
                return sorted(found)

    async def _held(self, pod: PodClient, keys: Keys, least: int) -> dict[int, int | None]:
        held: dict[int, int | None] = {}
        for first in range(0, keys.count, _KEYS_AT_ONCE):
            numbers = range(first, min(first + _KEYS_AT_ONCE, keys.count))
            names = [keys.name(number) for number in numbers]
            answer = await pod.items(self._target.tenant, self._target.dict_code, names, least=least)
            items = orjson.loads(answer.body)["items"]
            held.update({n: items.get(name, {}).get("sequence") for n, name in zip(numbers, names, strict=True)})
        return held

    async def _audit(self, pod: PodClient) -> str:
        said = await pod.audit(self._target.tenant, self._target.dict_code)
        return "" if said["agrees"] else f"{said}"

    def _dictionaries(self) -> Dictionaries:
        target = self._target
        first = next(iter(target.query_urls.values()))
        return Dictionaries(target.command_url, first, target.tenant, token=target.token)


async def _patiently(pod: PodClient, target: Target, version: int) -> None:
    deadline = monotonic() + 30
    while True:
        try:
            await pod.version(target.tenant, target.dict_code, least=version)
        except Transient:
            if monotonic() > deadline:
                raise
        else:
            return
        await asyncio.sleep(_TRY_AGAIN)
