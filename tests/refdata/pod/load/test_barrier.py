"""R21: the version barrier, and the bound on the load of the primary."""

import asyncio
import time

import pytest

from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Conflict
from penstock.kernel.tasks.wait import cancel_and_wait
from penstock.refdata import store
from penstock.refdata.dictionaries.reader import DictionarySnapshot, Rows
from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.ipc import BarrierRequest
from penstock.refdata.pod.load import barrier
from penstock.refdata.pod.load.dictionary_state import DictionaryState
from penstock.refdata.pod.load.loader import DictionaryLoader
from tests.refdata.pod.conftest import Pods
from tests.refdata.pod.harness import PodHarness, PodResponse
from tests.support.wait import becomes

ABSURD = 10**12
COUNTRY = {"name": "Ruritania"}


@pytest.fixture
def may_load(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event; loads are blocked while it is not set."""
    is_open, load = asyncio.Event(), DictionaryLoader.__call__

    async def held_up(self: DictionaryLoader, state: DictionaryState, *, full: bool) -> VersionStamp:
        await is_open.wait()
        return await load(self, state, full=full)

    is_open.set()
    monkeypatch.setattr(DictionaryLoader, "__call__", held_up)
    return is_open


class BlockedQueries:
    """Counts the queries for a version in the primary, and blocks them while *may_answer* is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._ask = store.read_visible_version
        monkeypatch.setattr(store, "read_visible_version", self)

    async def __call__(self, connection: Connection, target: DictionaryKey) -> tuple[int, int | None]:
        self.count += 1
        await self.may_answer.wait()
        return await self._ask(connection, target)


def fallbacks(pod: PodHarness, code: str) -> float:
    registry = pod.pod._telemetry.registry
    return registry.get_sample_value("postgres_fallback_reads_total", {"dict_code": code}) or 0.0


def refusal(answer: PodResponse) -> tuple[int, str, int]:
    return answer.status, answer.json["code"], answer.version


async def test_readers_of_absurd_versions_share_queries(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: hundreds of readers get 409 from a few queries for the version."""
    version = await pod.put("LOOSE", {"a": 1})
    asked, began = BlockedQueries(monkeypatch), time.monotonic()
    readers = [pod.get("LOOSE/items/a", min_version=ABSURD + number) for number in range(400)]
    found = [refusal(answer) for answer in await asyncio.gather(*readers)]
    assert found == [(409, "VERSION_NOT_COMMITTED", version)] * 400
    assert asked.count <= (time.monotonic() - began) / barrier._QUERY_INTERVAL + 1
    assert asked.count <= 100


@pytest.mark.parametrize("min_version", [2**63 - 1, 2**63, 2**64, 10**30, 10**400])
async def test_a_version_beyond_all_numbers_is_refused(pod: PodHarness, min_version: int) -> None:
    """R21: a version beyond 64 bits is refused with 400 or 409, never with 500."""
    version = await pod.put("LOOSE", {"a": 1})
    for path in ("LOOSE/items/a", "LOOSE/items?keys=a", "LOOSE/all", "LOOSE/version"):
        answer = await pod.get(path, min_version=min_version)
        assert answer.status in (400, 409)
        assert answer.status == 400 or answer.version == version
    assert (await pod.get("LOOSE/items/a", min_version=version)).json == 1


async def test_the_number_of_waiters_is_limited(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: readers above the limit get 503 at once; waiting readers are answered and free their places."""
    async with pods(barrierWaiters=3, barrierWaitMs=1000, fallbackTimeoutMs=60_000) as pod:
        version = await pod.put_and_load("LOOSE", {"a": 1})
        asked = BlockedQueries(monkeypatch)
        asked.may_answer.clear()
        readers = [asyncio.create_task(pod.get("LOOSE/items/a", min_version=ABSURD)) for _ in range(3)]
        await pod.wait_for_readers(3)
        for path in ("LOOSE/items/a", "LOOSE/all", "CURRENCY/version"):
            answer = await pod.get(path, min_version=ABSURD)
            assert (answer.status, answer.json["code"]) == (503, "TOO_MANY_WAITERS")
            assert {"X-Dict-Version", "X-Data-Source", "Retry-After"} <= set(answer.headers)
        assert (await pod.get("LOOSE/items/a", min_version=version)).json == 1  # a loaded version is served
        asked.may_answer.set()
        for reader in readers:
            assert refusal(await reader) == (409, "VERSION_NOT_COMMITTED", version)
        assert refusal(await pod.get("LOOSE/items/a", min_version=ABSURD)) == (409, "VERSION_NOT_COMMITTED", version)


async def test_a_version_committed_before_the_read_is_never_refused(pod: PodHarness) -> None:
    """R21: a committed version is found, even if an earlier query did not find it and no notification was sent."""
    is_over = asyncio.Event()

    async def ask_for_too_much() -> None:
        while not is_over.is_set():
            assert (await pod.get("LOOSE/items/a", min_version=ABSURD)).status == 409

    crowd = [asyncio.create_task(ask_for_too_much()) for _ in range(5)]
    for number in range(30):
        version = await pod.put("LOOSE", {"a": number})
        readers = [pod.get("LOOSE/items/a", min_version=version) for _ in range(3)]
        for answer in await asyncio.gather(*readers):
            assert (answer.status, answer.version, answer.json) == (200, version, number)
        ahead = await pod.get("LOOSE/items/a", min_version=version + 1)
        assert refusal(ahead) == (409, "VERSION_NOT_COMMITTED", version)
    is_over.set()
    await asyncio.gather(*crowd)


@pytest.mark.parametrize("code", ["LOOSE", "COUNTRY"])
async def test_the_primary_answers_during_a_blocked_load(pod: PodHarness, may_load: asyncio.Event, code: str) -> None:
    """R21: a fallback has the version and content that memory has after the load, and is marked as a fallback."""
    before = await pod.put_and_load(code, {"a": COUNTRY, "b": COUNTRY})
    assert (await pod.get(f"{code}/items/a", min_version=before)).source == "memory"
    may_load.clear()
    await pod.put(code, {"a": COUNTRY | {"name": "Syldavia"}})
    version = await pod.put(code, {"c": COUNTRY})
    paths = [f"{code}/items/a", f"{code}/items/c", f"{code}/items?keys=c,x,b", f"{code}/items?key=x", f"{code}/items/x"]
    found = [await pod.get(path, min_version=before + 1) for path in paths]
    version_response = await pod.get(f"{code}/version", min_version=version)
    assert [(response.version, response.source) for response in [*found, version_response]] == [
        (version, "postgres_fallback")
    ] * 6
    assert [response.status for response in [*found, version_response]] == [200, 200, 200, 200, 404, 200]
    assert (found[0].json["name"], found[2].json["missing"], version_response.json["version"]) == (
        "Syldavia",
        ["x"],
        version,
    )
    assert found[4].json["code"] == "UNKNOWN_KEY"
    assert fallbacks(pod, code) == 6
    unhurried = await pod.get(f"{code}/items/a")
    assert (unhurried.version, unhurried.source, unhurried.json["name"]) == (before, "memory", "Ruritania")
    may_load.set()

    async def has_loaded() -> bool:
        return (await pod.get(f"{code}/version")).version == version

    await becomes(has_loaded, "the load that the fallback forced")
    for path, fallback in zip(paths, found, strict=True):
        answer = await pod.get(path, min_version=version)
        assert (answer.source, answer.version, answer.status) == ("memory", version, fallback.status)
        assert answer.headers.get("ETag") == fallback.headers.get("ETag")
        assert answer.status == 404 or answer.body == fallback.body


async def test_all_items_wait_for_the_load(pods: Pods, may_load: asyncio.Event) -> None:
    """R21: `all` is not read from the primary: it waits for the load, or gets 503."""
    async with pods(fallbackTimeoutMs=1000, barrierWaitMs=50) as pod:
        before = await pod.put_and_load("LOOSE", {"a": 1})
        may_load.clear()
        version = await pod.put("LOOSE", {"b": 2})
        late = await pod.get("LOOSE/all", min_version=version)
        assert (*refusal(late), late.source) == (503, "NOT_LOADED", before, "memory")
        assert fallbacks(pod, "LOOSE") == 0
    may_load.set()
    async with pods(fallbackTimeoutMs=60_000, barrierWaitMs=0) as pod:
        may_load.clear()
        version = await pod.put("LOOSE", {"c": 3})
        reader = asyncio.create_task(pod.get("LOOSE/all", min_version=version))
        await pod.wait_for_readers(1)
        may_load.set()
        answer = await reader
        assert (answer.status, answer.version, answer.source) == (200, version, "memory")
        assert [item["key"] for item in answer.json["items"]] == ["a", "b", "c"]


async def test_simultaneous_fallbacks_are_limited(
    pods: Pods, may_load: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R21: only a limited number of fallbacks reads from the primary; the others wait, and all are answered."""
    running: list[int] = [0]
    may_read, only = asyncio.Event(), DictionarySnapshot.read_keys

    async def held_up(self: DictionarySnapshot, keys: list[str]) -> Rows | None:
        running.append(running[-1] + 1)
        await may_read.wait()
        try:
            return await only(self, keys)
        finally:
            running.append(running[-1] - 1)

    async def are_reading() -> bool:
        return running[-1] == 2

    async with pods(fallbacks=2, barrierWaitMs=0, fallbackTimeoutMs=60_000) as pod:
        may_load.clear()
        version = await pod.put("LOOSE", {"a": 2})
        monkeypatch.setattr(DictionarySnapshot, "read_keys", held_up)
        readers = [asyncio.create_task(pod.get("LOOSE/items/a", min_version=version)) for _ in range(20)]
        await pod.wait_for_readers(20)
        await becomes(are_reading, "two of them to read")
        may_read.set()
        for answer in await asyncio.gather(*readers):
            assert (answer.status, answer.json, answer.version, answer.source) == (200, 2, version, "postgres_fallback")
        assert (max(running), fallbacks(pod, "LOOSE")) == (2, 20)


async def test_a_dictionary_that_the_primary_lost(pod: PodHarness, may_load: asyncio.Event) -> None:
    """R21, R24: without its row a dictionary has version 0: higher versions are refused, and the pod follows."""
    version = await pod.put_and_load("LOOSE", {"a": 1})
    assert (await pod.get("LOOSE/items/a", min_version=version)).json == 1
    may_load.clear()
    await pod.harness.db.execute("DELETE FROM dictionary_meta WHERE tenant_id = 'acme' AND dict_code = 'LOOSE'")
    refused = await pod.get("LOOSE/items/a", min_version=version + 1)
    assert (*refusal(refused), refused.source) == (409, "VERSION_NOT_COMMITTED", 0, "postgres_fallback")
    may_load.set()

    async def has_noticed() -> bool:
        return (await pod.get("LOOSE/version")).version == 0

    await becomes(has_noticed, "the pod to notice")
    assert refusal(await pod.get("LOOSE/items/a", min_version=version)) == (409, "VERSION_NOT_COMMITTED", 0)


async def test_a_fallback_with_an_older_version_is_refused(
    pod: PodHarness, may_load: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R21, R24: if the primary is restored between the query for the version and the read, the read is refused."""
    version = await pod.put_and_load("LOOSE", {"a": 1})
    may_load.clear()

    async def was_there(connection: Connection, target: DictionaryKey) -> tuple[int, int | None]:
        return version + 5, None

    monkeypatch.setattr(store, "read_visible_version", was_there)
    refused = await pod.get("LOOSE/items/a", min_version=version + 5)
    assert (*refusal(refused), refused.source) == (409, "VERSION_NOT_COMMITTED", version, "postgres_fallback")
    assert fallbacks(pod, "LOOSE") == 0


async def test_a_cancelled_reader_frees_its_place(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: the shared query continues for the other readers."""
    async with pods(barrierWaiters=2, barrierWaitMs=1000, fallbackTimeoutMs=60_000) as pod:
        version = await pod.put("LOOSE", {"a": 1})
        asked = BlockedQueries(monkeypatch)
        asked.may_answer.clear()
        first, second = (asyncio.create_task(barrier_read(pod)) for _ in range(2))
        await pod.wait_for_readers(2)
        await cancel_and_wait(first)
        await pod.wait_for_readers(1)
        asked.may_answer.set()
        await second
        assert (await pod.get("LOOSE/items/a", min_version=version)).json == 1


async def barrier_read(pod: PodHarness) -> None:
    """Wait at the barrier for a version that is never committed."""
    assert pod.pod.request_handler._services is not None
    with pytest.raises(Conflict):
        await pod.pod.request_handler._services[1].reach(BarrierRequest("acme", "LOOSE", ABSURD, "items", ["a"]))
