"""What a query pod takes: processor time for its reads, memory for its items, and both while it loads."""

import asyncio
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jwt

from benchmarks.capacity_place import MB, TENANT, Measurements, Place, code_of, figures
from benchmarks.harness import Bench
from benchmarks.load import Target
from benchmarks.pods import Dictionaries, Pod, query_api, settings_for
from benchmarks.servers import SERVER_CORE, pin

_SECRET, _KEPT_SECRET = "PENSTOCK_BENCH_SECRET", "a secret of the benchmarks, of no use to anybody"
_GUARD = {"auth": {"jwt": {"algorithms": ["HS256"], "secret": f"env:{_SECRET}"}}}
_LOOK = 0.01
_PER_READS = "ms for 100,000"
_COLUMNS = {
    "metric": "bytes an item",
    "/dev/shm": "bytes an item",
    "peak of a full load": "bytes an item",
    "peak of a second within a minute": "bytes an item",
    "loader alone": "MB",
    "serving process alone": "MB",
    "full load": "s a million",
}


def read_benches(place: Place) -> list[Bench]:
    """Return reads of random keys, with and without token and version."""
    return [
        bench
        for payload in place.sizes.read
        for guarded in place.sizes.guarded
        for bench in figures(partial(_read, place, payload, guarded), _read_units(payload, guarded))
    ]


def memory_benches(place: Place) -> list[Bench]:
    """Return the memory of pods of several sizes, each loaded once, and twice again."""
    points = [(payload, count) for payload in place.sizes.kept for count in place.sizes.items[payload]]
    return [
        bench
        for payload, count in points
        for bench in figures(partial(_remember, place, payload, count), _memory_units(payload, count), once=True)
    ]


def read_name(payload: int, *, guarded: bool) -> str:
    return f"reads: {payload:,} B, {'token and version' if guarded else 'neither'}: "


def memory_name(payload: int, count: int) -> str:
    return f"memory: {count:,} items of {payload:,} B: "


def _read_units(payload: int, guarded: bool) -> dict[str, str]:
    name = read_name(payload, guarded=guarded)
    return {f"{name}processor time": _PER_READS, f"{name}seen": "requests/s", f"{name}p99": "ms"}


def _memory_units(payload: int, count: int) -> dict[str, str]:
    return {memory_name(payload, count) + column: unit for column, unit in _COLUMNS.items()}


async def _read(place: Place, payload: int, guarded: bool) -> Measurements:
    largest = place.sizes.items[payload][-1]
    held = Dictionaries(TENANT, [code_of(largest)], largest)
    settings = settings_for(await place.dictionaries(payload), held, **(_GUARD if guarded else {}))
    claims = {"sub": "bench", "tenant_id": TENANT, "exp": int(time.time()) + 86_400}
    token = jwt.encode(claims, _KEPT_SECRET, algorithm="HS256")
    headers = {"Authorization": f"Bearer {token}", "X-Min-Version": "1"} if guarded else {}
    async with query_api(settings, env={_SECRET: _KEPT_SECRET}) as pod:
        pin(pod.serving_pids, SERVER_CORE)
        url = f"{pod.url(TENANT, held.codes[0])}/items/"
        load = await place.generator.press(Target(url, headers, pod.serving_pids, held.items))
    name = read_name(payload, guarded=guarded)
    spent = 100_000 * 1000 / load.per_processor_second
    return {f"{name}processor time": spent, f"{name}seen": load.rate, f"{name}p99": load.p99}


async def _remember(place: Place, payload: int, count: int) -> Measurements:
    url = await place.dictionaries(payload)
    # It looks often, so that the load begins when it is asked for: that changes nothing of what is loaded.
    often: dict[str, Any] = {"query": {"reconcileEvery": 0.2}}
    held = Dictionaries(TENANT, [code_of(count)], count)
    async with query_api(settings_for(url, held, refdata=often)) as pod, httpx.AsyncClient() as client:
        metrics = (await client.get(f"{pod.served.api}/actuator/prometheus")).text
        loaded = pod.memory_bytes
        peaks = [await _measure_full_load(place, url, pod, held.codes[0]) for _ in range(2)]
        found = {
            "metric": _metric(metrics, "penstock_refdata_memory_bytes") / count,
            "/dev/shm": loaded / count,
            "peak of a full load": peaks[0] / count,
            "peak of a second within a minute": peaks[1] / count,
            "loader alone": _private(pod.served.pid) / MB,
            "serving process alone": _private(pod.serving_pids[0]) / MB,
            "full load": _metric(metrics, "cache_reload_duration_seconds_sum", 'kind="full"') * MB / count,
        }
    print(f"  {found}", file=sys.stderr)
    return {memory_name(payload, count) + column: value for column, value in found.items()}


async def _measure_full_load(place: Place, url: str, pod: Pod, code: str) -> float:
    """Return the peak memory of loading a version without known changes."""
    query = """
        UPDATE dictionary_meta SET version = version + 1, updated_at = now()
        WHERE tenant_id = $1 AND dict_code = $2 RETURNING version"""
    wanted, most = await place.ask(url, query, TENANT, code), 0
    async with httpx.AsyncClient() as client:
        while (await client.get(f"{pod.url(TENANT, code)}/version")).json()["version"] < wanted:
            most = max(most, pod.memory_bytes)
            await asyncio.sleep(_LOOK)
    return max(most, pod.memory_bytes)


def _metric(text: str, name: str, label: str = "") -> float:
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")) and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _private(pid: int) -> int:
    """Bytes that are of this process alone: without the items, which all processes map."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
