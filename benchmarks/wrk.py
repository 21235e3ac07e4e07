"""wrk on a core of its own, and what it found: requests a second, p50 and p99, without a single error."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.servers import CLIENT_CORE, children_seconds, pinned, processor_seconds, tool

CONNECTIONS = 64
SECONDS = float(os.environ.get("PENSTOCK_BENCH_SECONDS", "5"))
# It is not called for a request, so it costs nothing while that is measured.
_DONE = """
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('\\n{"requests": %d, "seconds": %f, "p50": %f, "p99": %f, "errors": %d}\\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""
# One head and one tail are made once, and no table of keys: the generator's own garbage collector would stop it for
# 30 ms to look through a million of them, and that would be measured as the server's.
_RANDOM = """
local head, tail
init = function(args)
  math.randomseed(os.time())
  local whole = wrk.format("GET", wrk.path .. "@")
  head, tail = whole:match("^(.-)@(.*)$")
end
request = function()
  return head .. string.format("%%08d", math.random(%d) - 1) .. tail
end
"""


@dataclass(frozen=True)
class Load:
    """What a server did under load, how busy its processes were, and how busy whoever asked; 1.0 is a whole core."""

    rate: float
    p50: float
    p99: float
    busy: float
    client_busy: float

    def __str__(self) -> str:
        said = f"{self.rate:,.0f}/s, p50 {self.p50:.2f} ms, p99 {self.p99:.2f} ms, server busy {self.busy:.0%}"
        return f"{said}, load {self.client_busy:.0%}"

    @property
    def per_processor_second(self) -> float:
        """Requests for a second of the server's own processor time, whoever else needed the core."""
        return self.rate / self.busy if self.busy else 0.0


@dataclass(frozen=True)
class Target:
    """Where to ask, with which headers; over *keys* of them at random, when the URL ends where a key begins."""

    url: str
    headers: Mapping[str, str]
    pids: Sequence[int]  # those who answer
    keys: int = 0


async def press(target: Target, folder: Path, *, core: int | None = CLIENT_CORE) -> Load:
    """Ask as fast as it goes over kept connections; it ends the run when a single answer is not a good one."""
    script = folder / f"load-{target.keys}.lua"
    script.write_text((_RANDOM % target.keys if target.keys else "") + _DONE)
    command = [tool("wrk"), "-t1", f"-c{CONNECTIONS}", f"-d{SECONDS:g}s", "--latency", "-s", str(script)]
    for name, value in target.headers.items():
        command += ["-H", f"{name}: {value}"]
    command.append(target.url)
    before, asked = processor_seconds(target.pids), children_seconds()
    process = await asyncio.create_subprocess_exec(
        *(command if core is None else pinned(core, *command)), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    told = _last_document(output)
    if not told or told["errors"]:
        raise SystemExit(f"wrk did not get good answers only from {target.url}:\n{output.decode()}")
    load = Load(
        rate=told["requests"] / told["seconds"],
        p50=told["p50"],
        p99=told["p99"],
        busy=(processor_seconds(target.pids) - before) / told["seconds"],
        client_busy=(children_seconds() - asked) / told["seconds"],
    )
    print(f"  {load}", file=sys.stderr)
    return load


def _last_document(output: bytes) -> dict[str, float]:
    lines = [line for line in output.decode().splitlines() if line.startswith("{")]
    found: dict[str, float] = json.loads(lines[-1]) if lines else {}
    return found
