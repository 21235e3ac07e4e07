"""What Penstock takes of processors, memory, disks and connections, for whoever says how much of each there shall be.

Processor time is that of the processes themselves: that the load comes from the same machine does not count.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from benchmarks import capacity_commits, capacity_pods, capacity_primary, capacity_roles, capacity_signals
from benchmarks.capacity_place import Place
from benchmarks.harness import Bench
from benchmarks.servers import need_two_cores, tool


@asynccontextmanager
async def benches(folder: Path) -> AsyncIterator[list[Bench]]:
    """All of it; what is measured with is started when it is first needed."""
    need_two_cores()
    for name in ("wrk", "redis-server"):
        tool(name)
    async with AsyncExitStack() as stack:
        place = Place(folder, stack)
        yield [
            *capacity_pods.read_benches(place),
            *capacity_pods.memory_benches(place),
            *capacity_signals.benches(place),
            *capacity_primary.benches(place),
            *capacity_roles.benches(place),
            *capacity_commits.benches(place),
        ]
