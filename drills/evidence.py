"""What is asked when the load is over: the history of versions, what every pod holds, whether it agrees."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic

import orjson

from drills.checker import Evidence, Held
from drills.load import Keys
from drills.recorder import Outcome, Recorder, Write
from drills.target import Target
from penstock.kernel.errors import NotFound, PenstockError, Transient
from penstock.refdata.client import PodClient, RefdataClient, read_version
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

    async def remove(self, keys: Keys, writes: Sequence[Write], within: float) -> str:
        """Leave nothing behind in somebody's dictionary; what is left all the same, in words."""
        code = self._target.dict_code
        about = f"of keys {keys.prefix}… in {code} of {self._target.tenant}"
        try:
            pending = await self._settled(writes, within)
            async with self._dictionaries(within) as dictionaries:
                await dictionaries.put(code, {}, deletes=[keys.name(n) for n in range(keys.count)])
        except PenstockError as error:
            return f"all {keys.count:,} {about} may be left: {error.message}"
        return f"{len(pending):,} writes {about} are under way still and may come after the removal" if pending else ""

    async def evidence(self, keys: Keys, base: int, recorder: Recorder, within: float) -> Evidence:
        """All there is to judge, once what was sent is settled; what could not be asked is told, not raised."""
        try:
            await self._settled(recorder.writes, within)
            history = await self._history(base)
        except PenstockError as error:
            why = f"the history could not be asked: {error.message}"
            return Evidence(base, base, recorder.reads, recorder.writes, [], {}, {}, recorder.faults, no_history=why)
        settled = history[-1][0] if history else base
        finals: dict[str, dict[int, Held]] = {}
        audits: dict[str, str] = {}
        unreached = []
        for name, pod in self._pods.items():
            try:
                finals[name] = await self._held(pod, keys, settled)
                audits[name] = await self._audit(pod)
            except PenstockError as error:
                unreached.append(f"{name} could not be asked: {error.message}")
        answered = max((one.version for held in finals.values() for one in held.values()), default=settled)
        history, why = await self._history_up_to(answered, base, history, within)
        return Evidence(
            base,
            settled,
            recorder.reads,
            recorder.writes,
            history,
            finals,
            audits,
            recorder.faults,
            unreached=unreached,
            no_history=why,
        )

    async def _settled(self, writes: Sequence[Write], within: float) -> set[str]:
        """Which writes are under way still, though they were given time."""
        unheard = {write.event_id for write in writes if write.outcome is not Outcome.ACKNOWLEDGED}
        deadline = monotonic() + within
        while unheard:
            try:
                pending = unheard & await self._pending()
                if not pending or monotonic() > deadline:
                    return pending
            except Transient:
                if monotonic() > deadline:
                    raise
            await asyncio.sleep(_TRY_AGAIN)
        return set()

    async def _pending(self) -> set[str]:
        found: set[str] = set()
        cursor = None
        while True:
            asked = {"status": "PENDING", "dictCode": self._target.dict_code, "limit": _PAGE, "cursor": cursor}
            page = await self._commands.updates(self._target.tenant, **asked)
            found |= {one["eventId"] for one in page["updates"]}
            cursor = page["next"]
            if cursor is None:
                return found

    async def _history_up_to(
        self, version: int, base: int, history: list[tuple[int, str]], within: float
    ) -> tuple[list[tuple[int, str]], str]:
        """The history once it tells the version that a pod answered with, and why it is not known."""
        deadline = monotonic() + within
        while (history[-1][0] if history else base) < version and monotonic() < deadline:
            await asyncio.sleep(_TRY_AGAIN)
            try:
                history = await self._history(base)
            except PenstockError as error:
                if not isinstance(error, Transient) or monotonic() > deadline:
                    return history, f"the history could not be asked: {error.message}"
        return history, ""

    async def _history(self, base: int) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        cursor = None
        while True:
            page = await self._commands.history(self._target.tenant, self._target.dict_code, limit=_PAGE, cursor=cursor)
            found += [(one["version"], one["eventId"]) for one in page["versions"] if one["version"] > base]
            cursor = page["next"]
            if cursor is None or page["versions"][-1]["version"] <= base:
                return sorted(found)

    async def _held(self, pod: PodClient, keys: Keys, least: int) -> dict[int, Held]:
        held: dict[int, Held] = {}
        for first in range(0, keys.count, _KEYS_AT_ONCE):
            numbers = range(first, min(first + _KEYS_AT_ONCE, keys.count))
            names = [keys.name(number) for number in numbers]
            answer = await pod.items(self._target.tenant, self._target.dict_code, names, min_version=least)
            items, version = orjson.loads(answer.body)["items"], read_version(answer)
            for number, name in zip(numbers, names, strict=True):
                held[number] = Held(version, items.get(name, {}).get("sequence"))
        return held

    async def _audit(self, pod: PodClient) -> str:
        said = await pod.audit(self._target.tenant, self._target.dict_code)
        return "" if said["matches"] else f"{said}"

    def _dictionaries(self, timeout: float = _TIMEOUT) -> Dictionaries:
        target = self._target
        first = next(iter(target.query_urls.values()))
        return Dictionaries(target.command_url, first, target.tenant, token=target.token, timeout=timeout)


async def _patiently(pod: PodClient, target: Target, version: int) -> None:
    deadline = monotonic() + 30
    while True:
        try:
            await pod.version(target.tenant, target.dict_code, min_version=version)
        except Transient:
            if monotonic() > deadline:
                raise
        else:
            return
        await asyncio.sleep(_TRY_AGAIN)
