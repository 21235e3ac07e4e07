"""Redis, which keeps nothing on disk; asked by its own redis-benchmark, since wrk does not speak its protocol."""

import csv
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis

from benchmarks.load import Load
from benchmarks.programs import read_output
from benchmarks.servers import (
    CLIENT_CORE,
    SERVER_CORE,
    children_seconds,
    free_port,
    listening,
    pinned,
    processor_seconds,
)
from benchmarks.wrk import CONNECTIONS

_A_SECOND = 100_000  # about what one core answers
_AT_ONCE = 1_000


class RedisPeer:
    """One server on loopback."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.pid = pid

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def get(self, program: str, key: str, value: str, seconds: float) -> Load:
        """Put load on GET of one value by redis-benchmark, with as many clients as wrk has connections."""
        with redis.Redis(port=self.port) as client:
            client.set(key, value)
        times = int(_A_SECOND * seconds)
        command = [program, "-p", str(self.port), "-c", str(CONNECTIONS), "-n", str(times), "--csv"]
        before, asked = processor_seconds([self.pid]), children_seconds()
        output = await read_output(*pinned(CLIENT_CORE, *command, "GET", key))
        (row,) = csv.DictReader(output.decode().splitlines())
        taken = times / float(row["rps"])
        load = Load(
            rate=float(row["rps"]),
            p50=float(row["p50_latency_ms"]),
            p99=float(row["p99_latency_ms"]),
            busy=(processor_seconds([self.pid]) - before) / taken,
            client_busy=(children_seconds() - asked) / taken,
        )
        print(f"  {load}", file=sys.stderr)
        return load

    def memory_of(self, items: int, value: str) -> float:
        """Bytes it takes for each of so many items; they are gone afterwards."""
        with redis.Redis(port=self.port, decode_responses=True) as client:
            client.flushall()
            before = int(client.info("memory")["used_memory"])
            for start in range(0, items, _AT_ONCE):
                client.mset({f"{number:08}": value for number in range(start, min(start + _AT_ONCE, items))})
            taken = int(client.info("memory")["used_memory"]) - before
            client.flushall()
            return taken / items


@asynccontextmanager
async def redis_peer(program: str, *, core: int | None = SERVER_CORE) -> AsyncIterator[RedisPeer]:
    """Start a Redis on loopback, on one core or on any, and yield it."""
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    async with listening(*(command if core is None else pinned(core, *command)), port=port) as pid:
        yield RedisPeer(port, pid)
