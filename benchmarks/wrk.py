"""wrk on a core of its own, and what it found: requests a second, p50 and p99, without a single error."""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import Load, LoadGenerator, Target
from benchmarks.programs import read_output
from benchmarks.python_load import PythonLoad
from benchmarks.servers import CLIENT_CORE, children_seconds, pinned, processor_seconds
from benchmarks.session import Session

CONNECTIONS = 64
SECONDS = float(os.environ.get("PENSTOCK_BENCH_SECONDS", "5"))  # of load, in the full form
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
class Wrk:
    """The program wrk, for so many whole seconds, with its scripts in a folder."""

    program: str
    folder: Path
    seconds: int

    async def press(self, target: Target, *, core: int | None = CLIENT_CORE) -> Load:
        """Put load on *target* from one core, or from any; SystemExit when a single answer is not a good one."""
        command = self._command(target)
        before, asked = processor_seconds(target.pids), children_seconds()
        output = await read_output(*(command if core is None else pinned(core, *command)))
        report = _last_document(output)
        if not report or report["errors"]:
            raise SystemExit(f"wrk did not get good answers only from {target.url}:\n{output.decode()}")
        load = Load(
            rate=report["requests"] / report["seconds"],
            p50=report["p50"],
            p99=report["p99"],
            busy=(processor_seconds(target.pids) - before) / report["seconds"],
            client_busy=(children_seconds() - asked) / report["seconds"],
        )
        print(f"  {load}", file=sys.stderr)
        return load

    def _command(self, target: Target) -> list[str]:
        script = self.folder / f"load-{target.keys}.lua"
        script.write_text((_RANDOM % target.keys if target.keys else "") + _DONE)
        headers = [word for name, value in target.headers.items() for word in ("-H", f"{name}: {value}")]
        options = ["-t1", f"-c{CONNECTIONS}", f"-d{self.seconds}s", "--latency", "-s", str(script)]
        return [self.program, *options, *headers, target.url]


def make_generator(session: Session, seconds: float) -> LoadGenerator:
    """Return wrk, or where a smoke run finds none, a client in Python."""
    program = session.find_tool("wrk")
    return Wrk(program, session.folder, math.ceil(seconds)) if program else PythonLoad(seconds)


def _last_document(output: bytes) -> dict[str, float]:
    lines = [line for line in output.decode().splitlines() if line.startswith("{")]
    found: dict[str, float] = json.loads(lines[-1]) if lines else {}
    return found
