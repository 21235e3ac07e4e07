"""The processor time, memory, disk space and connections that Penstock uses, for capacity planning.

Processor time is that of the processes themselves: that the load comes from the same machine does not count.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks import capacity_commits, capacity_pods, capacity_primary, capacity_roles, capacity_signals
from benchmarks.capacity_place import Place, Sizes
from benchmarks.harness import Bench, Group
from benchmarks.session import Session
from benchmarks.wrk import SECONDS


@asynccontextmanager
async def benches(session: Session, sizes: Sizes) -> AsyncIterator[list[Bench]]:
    """Open all of it; a server is started when it is first needed."""
    async with AsyncExitStack() as stack:
        place = Place(session, sizes, stack)
        yield [
            *capacity_pods.read_benches(place),
            *capacity_pods.memory_benches(place),
            *capacity_signals.benches(place),
            *capacity_primary.benches(place),
            *capacity_roles.benches(place),
            *capacity_commits.benches(place),
        ]


GROUP = Group(
    benches,
    full=Sizes(
        items={
            50: (100_000, 300_000, 1_000_000),
            200: (100_000, 300_000),
            1_000: (100_000, 300_000),
            10_000: (10_000,),
        },
        read=(50, 1_000, 10_000),
        guarded=(True, False),
        kept=(50, 200, 1_000),
        loaders=10,
        events=10_000,
        rows=20_000,
        chains=250,
        records=10_000,
        roles=tuple(capacity_roles.ROLES),
        watched=3.0,
        seconds=SECONDS,
    ),
    smoke=Sizes(
        items={50: (1_000,)},
        read=(50,),
        guarded=(True,),
        kept=(50,),
        loaders=2,
        events=200,
        rows=500,
        chains=5,
        records=100,
        roles=("work relay",),
        watched=0.2,
        seconds=0.1,
    ),
    needs_two_cores=True,
)
