"""Measure a group of benchmarks and print a table, or JSON; Ctrl-C prints the rounds that are finished."""

import argparse
import asyncio
import os
import pkgutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import harness
from benchmarks.harness import Group, Results
from benchmarks.interruption import run_interruptibly
from benchmarks.servers import has_two_cores
from benchmarks.session import FULL, SMOKE, Session
from penstock.kernel.telemetry.telemetry import configure_logging

# Named rather than imported: a group must not wait for the modules of all the others.
GROUPS = {
    "capacity": "benchmarks.capacity:GROUP",
    "kernel": "benchmarks.kernel:GROUP",
    "tracking": "benchmarks.tracking:GROUP",
    "tracking-large": "benchmarks.tracking:LARGE_GROUP",
    "refdata-write": "benchmarks.refdata_write:GROUP",
    "refdata-read": "benchmarks.refdata_read:GROUP",
    "freshness": "benchmarks.freshness:GROUP",
    "ingest": "benchmarks.ingest:GROUP",
    "ingest-large": "benchmarks.ingest:LARGE_GROUP",
    "harvest": "benchmarks.harvest:GROUP",
    "harvest-large": "benchmarks.harvest:LARGE_GROUP",
    "flows": "benchmarks.flows:GROUP",
    "flows-large": "benchmarks.flows_large:GROUP",
}
_SIGNALLED = 128  # a shell's exit code for a program that a signal ended, less the signal's number


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("group", nargs="?", choices=GROUPS, default="kernel", help="group of benchmarks")
    parser.add_argument("--rounds", type=int, help="number of rounds; the median counts (default 5, with --smoke 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", default="", help="measure only benchmarks whose name contains this text")
    parser.add_argument(
        "--smoke", action="store_true", help="run the benchmarks on tiny data, in seconds, to check that they work"
    )
    args = parser.parse_args()
    configure_logging("WARNING")
    group = load_group(args.group)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        os.environ["TMPDIR"] = folder  # programs that are killed leave nothing elsewhere
        session = Session(SMOKE if args.smoke else FULL, Path(folder))
        results = Results(args.rounds or session.form.rounds)
        code = runner.run(_run(group, session, results, args.only))
    notes = group.notes(session, results.figures) if results.rounds else []
    print(harness.report(session, results, as_json=args.json, notes=notes))
    sys.exit(code)


def load_group(name: str) -> Group[Any]:
    """Return the group of that name."""
    found: Group[Any] = pkgutil.resolve_name(GROUPS[name])
    return found


async def _run(group: Group[Any], session: Session, results: Results, only: str) -> int:
    """Measure until the end or a signal; return the exit code."""
    if group.needs_two_cores and not has_two_cores():
        raise SystemExit("this group pins the server to core 0 and the load to core 1: it needs Linux and two cores")
    received = await run_interruptibly(_measure(group, session, results, only))
    if received is None:
        return 0
    results.interruption = received.name
    return _SIGNALLED + received


async def _measure(group: Group[Any], session: Session, results: Results, only: str) -> None:
    async with group.open(session) as found:
        chosen = [bench for bench in found if only in bench.name]
        await harness.run(chosen, results, warms_up=session.form.warms_up)


if __name__ == "__main__":
    main()
