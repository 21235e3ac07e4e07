"""The evidence after a load: the history of versions, the items of every pod, and the audits."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic

import orjson

from drills.checker import Evidence, PodItem
from drills.load import Keys
from drills.recorder import Outcome, Recorder, Write
from drills.target import Target
from penstock.kernel.errors import NotFound, PenstockError, Transient
from penstock.refdata.client import PodClient, RefdataClient, read_version
from penstock.refdata.sdk import Dictionaries

_PAGE = 1_000
_KEYS_AT_ONCE = 100
_RETRY_DELAY = 0.2
_TIMEOUT = 30.0


@asynccontextmanager
async def open_inspector(target: Target) -> AsyncIterator["Inspector"]:
    """Yield an inspector with a client for the command API and each pod."""
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
    """Reads the state of a target with long timeouts."""

    def __init__(self, target: Target, commands: RefdataClient, pods: dict[str, PodClient]) -> None:
        self._target = target
        self._commands = commands
        self._pods = pods

    async def check(self) -> None:
        """Raise NotFound or Transient if the dictionary does not exist or a server is not reachable."""
        tenant, code = self._target.tenant, self._target.dict_code
        try:
            await self._commands.history(tenant, code, limit=1)
            for pod in self._pods.values():
                await pod.version(tenant, code)
        except NotFound as error:
            hint = f"name a configured dictionary with --tenant and --dict instead of {tenant} and {code}"
            raise NotFound(error.code, error.message, hint=hint) from error
        except Transient as error:
            hint = "check that the server runs and that --command-url and --query-url point to it"
            raise Transient(error.code, error.message, hint=hint) from error

    async def seed(self, keys: Keys) -> int:
        """Write every key for the first time, and return the version when every pod has it."""
        async with self._dictionaries() as dictionaries:
            items = {keys.name(number): keys.payload(0) for number in range(keys.count)}
            version = await dictionaries.put(self._target.dict_code, items)
        for pod in self._pods.values():
            await _wait_for_version(pod, self._target, version)
        return version

    async def remove(self, keys: Keys, writes: Sequence[Write], within: float) -> str:
        """Delete the keys of the drill; return a description of keys that may remain, or an empty string."""
        code = self._target.dict_code
        description = f"of keys {keys.prefix}… in {code} of {self._target.tenant}"
        try:
            pending = await self._wait_until_settled(writes, within)
            async with self._dictionaries(within) as dictionaries:
                await dictionaries.put(code, {}, deletes=[keys.name(n) for n in range(keys.count)])
        except PenstockError as error:
            return f"all {keys.count:,} {description} may remain: {error.message}"
        pending_writes = f"{len(pending):,} writes {description} are still pending and may be committed later"
        return pending_writes if pending else ""

    async def evidence(self, keys: Keys, base: int, recorder: Recorder, within: float) -> Evidence:
        """Return the evidence when the sent writes are settled; unreachable servers are part of the evidence."""
        try:
            await self._wait_until_settled(recorder.writes, within)
            history = await self._history(base)
        except PenstockError as error:
            why = f"the history could not be read: {error.message}"
            return Evidence(base, base, recorder.reads, recorder.writes, [], {}, {}, recorder.faults, no_history=why)
        settled = history[-1][0] if history else base
        pod_items: dict[str, dict[int, PodItem]] = {}
        audits: dict[str, str] = {}
        unreached = []
        for name, pod in self._pods.items():
            try:
                pod_items[name] = await self._read_items(pod, keys, settled)
                audits[name] = await self._audit(pod)
            except PenstockError as error:
                unreached.append(f"{name} did not answer: {error.message}")
        answered = max((item.version for items in pod_items.values() for item in items.values()), default=settled)
        history, why = await self._history_up_to(answered, base, history, within)
        return Evidence(
            base,
            settled,
            recorder.reads,
            recorder.writes,
            history,
            pod_items,
            audits,
            recorder.faults,
            unreached=unreached,
            no_history=why,
        )

    async def _wait_until_settled(self, writes: Sequence[Write], within: float) -> set[str]:
        """Wait for the pending writes, and return the ids of those that are pending after the time limit."""
        unacknowledged = {write.event_id for write in writes if write.outcome is not Outcome.ACKNOWLEDGED}
        deadline = monotonic() + within
        while unacknowledged:
            try:
                pending = unacknowledged & await self._pending()
                if not pending or monotonic() > deadline:
                    return pending
            except Transient:
                if monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY_DELAY)
        return set()

    async def _pending(self) -> set[str]:
        event_ids: set[str] = set()
        cursor = None
        while True:
            query = {"status": "PENDING", "dictCode": self._target.dict_code, "limit": _PAGE, "cursor": cursor}
            page = await self._commands.updates(self._target.tenant, **query)
            event_ids |= {update["eventId"] for update in page["updates"]}
            cursor = page["next"]
            if cursor is None:
                return event_ids

    async def _history_up_to(
        self, version: int, base: int, history: list[tuple[int, str]], within: float
    ) -> tuple[list[tuple[int, str]], str]:
        """Return the history up to *version*, and the error if it cannot be read."""
        deadline = monotonic() + within
        while (history[-1][0] if history else base) < version and monotonic() < deadline:
            await asyncio.sleep(_RETRY_DELAY)
            try:
                history = await self._history(base)
            except PenstockError as error:
                if not isinstance(error, Transient) or monotonic() > deadline:
                    return history, f"the history could not be read: {error.message}"
        return history, ""

    async def _history(self, base: int) -> list[tuple[int, str]]:
        versions: list[tuple[int, str]] = []
        cursor = None
        while True:
            page = await self._commands.history(self._target.tenant, self._target.dict_code, limit=_PAGE, cursor=cursor)
            versions += [(row["version"], row["eventId"]) for row in page["versions"] if row["version"] > base]
            cursor = page["next"]
            if cursor is None or page["versions"][-1]["version"] <= base:
                return sorted(versions)

    async def _read_items(self, pod: PodClient, keys: Keys, min_version: int) -> dict[int, PodItem]:
        items_by_key: dict[int, PodItem] = {}
        for first in range(0, keys.count, _KEYS_AT_ONCE):
            numbers = range(first, min(first + _KEYS_AT_ONCE, keys.count))
            names = [keys.name(number) for number in numbers]
            response = await pod.items(self._target.tenant, self._target.dict_code, names, min_version=min_version)
            items, version = orjson.loads(response.body)["items"], read_version(response)
            for number, name in zip(numbers, names, strict=True):
                items_by_key[number] = PodItem(version, items.get(name, {}).get("sequence"))
        return items_by_key

    async def _audit(self, pod: PodClient) -> str:
        audit = await pod.audit(self._target.tenant, self._target.dict_code)
        return "" if audit["matches"] else f"{audit}"

    def _dictionaries(self, timeout: float = _TIMEOUT) -> Dictionaries:
        target = self._target
        first = next(iter(target.query_urls.values()))
        return Dictionaries(target.command_url, first, target.tenant, token=target.token, timeout=timeout)


async def _wait_for_version(pod: PodClient, target: Target, version: int) -> None:
    deadline = monotonic() + 30
    while True:
        try:
            await pod.version(target.tenant, target.dict_code, min_version=version)
        except Transient:
            if monotonic() > deadline:
                raise
        else:
            return
        await asyncio.sleep(_RETRY_DELAY)
