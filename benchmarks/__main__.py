"""`make bench`: measure a part and print a table, or JSON."""

import argparse
import asyncio
import tempfile
from pathlib import Path

import uvloop

from benchmarks import (
    capacity,
    flows,
    flows_large,
    freshness,
    harness,
    harvest,
    ingest,
    kernel,
    refdata_read,
    refdata_write,
    tracking,
)
from penstock.kernel.telemetry import configure_logging

GROUPS = {
    "capacity": capacity.benches,
    "kernel": kernel.benches,
    "tracking": tracking.benches,
    "tracking-large": tracking.large_benches,
    "refdata-write": refdata_write.benches,
    "refdata-read": refdata_read.benches,
    "freshness": freshness.benches,
    "ingest": ingest.benches,
    "ingest-large": ingest.large_benches,
    "harvest": harvest.benches,
    "harvest-large": harvest.large_benches,
    "flows": flows.benches,
    "flows-large": flows_large.benches,
}
CONCLUSIONS: dict[str, harness.Conclude] = {
    "refdata-read": refdata_read.conclusions,
    "freshness": freshness.conclusions,
    "ingest": ingest.conclusions,
    "ingest-large": ingest.conclusions,
    "harvest": harvest.conclusions,
    "harvest-large": harvest.conclusions,
    "flows": flows.conclusions,
    "flows-large": flows_large.conclusions,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("group", nargs="?", choices=GROUPS, default="kernel", help="what to measure")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured; the median counts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    args = parser.parse_args()
    configure_logging("WARNING")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(runner.run(_measure(args.group, args.rounds, args.only, as_json=args.json)))


async def _measure(group: str, rounds: int, only: str, *, as_json: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        async with GROUPS[group](Path(folder) / "postgres") as found:
            chosen = [bench for bench in found if only in bench.name]
            figures = await harness.run(chosen, rounds)
    notes = CONCLUSIONS[group](figures) if group in CONCLUSIONS else []
    return harness.report(figures, as_json=as_json, notes=notes)


if __name__ == "__main__":
    main()
