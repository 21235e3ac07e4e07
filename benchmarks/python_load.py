"""A load generator in Python: too slow to measure a server with, and there on every machine."""

import asyncio
import itertools
import random
import statistics
import sys
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmarks.load import Load, Target
from benchmarks.servers import CLIENT_CORE, processor_seconds

CONNECTIONS = 4
_GOOD = b"HTTP/1.1 200 "


@dataclass(frozen=True)
class PythonLoad:
    """Requests over a few kept connections for so many seconds, from this very process."""

    seconds: float

    async def press(self, target: Target, *, core: int | None = CLIENT_CORE) -> Load:  # noqa: ARG002 - runs on any core
        """Put load on *target*; SystemExit when a single answer is not a good one."""
        before, asked, began = processor_seconds(target.pids), time.process_time(), time.perf_counter()
        answered = await asyncio.gather(*(_ask(target, began + self.seconds) for _ in range(CONNECTIONS)))
        seconds = time.perf_counter() - began
        delays = list(itertools.chain.from_iterable(answered))
        cuts = statistics.quantiles(delays, n=100)
        load = Load(
            rate=len(delays) / seconds,
            p50=1000 * cuts[49],
            p99=1000 * cuts[98],
            busy=(processor_seconds(target.pids) - before) / seconds,
            client_busy=(time.process_time() - asked) / seconds,
        )
        print(f"  {load}", file=sys.stderr)
        return load


async def _ask(target: Target, until: float) -> list[float]:
    """Return how long each answer took, of those asked for one after another over one connection."""
    parts, delays = urlsplit(target.url), list[float]()
    headers = "".join(f"{name}: {value}\r\n" for name, value in {"Host": parts.netloc, **target.headers}.items())
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        while (began := time.perf_counter()) < until:
            key = f"{random.randrange(target.keys):08}" if target.keys else ""
            writer.write(f"GET {parts.path}{key} HTTP/1.1\r\n{headers}\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(_GOOD):
                raise SystemExit(f"{target.url}{key} gives {head.decode()}")
            fields = dict(line.lower().split(b": ", 1) for line in head.splitlines()[1:-1])
            await reader.readexactly(int(fields[b"content-length"]))
            delays.append(time.perf_counter() - began)
    finally:
        writer.close()
    return delays
