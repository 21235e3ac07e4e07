"""What PostgreSQL takes for the work of each part: processor time, log, and disk for what stays."""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks import flows_defined, flows_ours
from benchmarks.capacity_commits import deltas
from benchmarks.capacity_place import PER_THOUSAND, Place, Told, figures
from benchmarks.capacity_pods import KEPT_IN_MEMORY, SIZES
from benchmarks.harness import Bench
from benchmarks.harvest_ours import harvest, opened, settings_of
from benchmarks.harvest_place import SEED, fresh_database
from benchmarks.peers.flows_env import LENGTH
from benchmarks.servers import served
from benchmarks.tracking import _fill, _in_process, _tracking

EVENTS, ROWS, CHAINS, RECORDS = 10_000, 20_000, 250, 10_000
DELTA, ROW, STEP, RECORD = "DELTA of one item", "tracking row, one stage", "flow step", "harvested record"
# The tables in which the work of each leaves something, and how many rows for one of it.
TABLES: Mapping[str, Mapping[str, str]] = {
    DELTA: {"outbox_event": "its history", "processed_event": "its id"},
    ROW: {"pipeline_tracking": "the row", "journal": "its moves, two a stage"},
    STEP: {"flow_step": "the step", "flow_run": "its share of the run", "journal": "its moves"},
    RECORD: {"raw_record": "as the source told it", "canonical_record": "as it is mapped and priced"},
}
_WORK = {"PostgreSQL": "ms for 1,000", "WAL": "bytes each"}
_FOR_A_THOUSAND = "ms for 1,000"


def benches(place: Place) -> list[Bench]:
    """Items at rest, and one run of each part's work."""
    runs = {DELTA: partial(_deltas, place), ROW: partial(_rows, place)}
    runs |= {STEP: partial(_steps, place), RECORD: partial(_records, place)}
    found = figures(partial(_items, place), {_item(payload): "bytes each" for payload in KEPT_IN_MEMORY}, once=True)
    for what, run in runs.items():
        workers = {"apply": _FOR_A_THOUSAND, "relay": _FOR_A_THOUSAND} if what == DELTA else {}
        workers |= {"worker": _FOR_A_THOUSAND} if what == RECORD else {}
        units = {f"work: {what}: {name}": unit for name, unit in {**_WORK, **workers}.items()}
        units |= {_kept(what, table): "bytes each" for table in TABLES[what]}
        found += figures(run, units)
    return found


def _item(payload: int) -> str:
    return f"disk: item of {payload:,} B, dictionary_item: on disk"


def _kept(what: str, table: str) -> str:
    return f"disk: {what}, {table}: on disk"


async def _items(place: Place) -> Told:
    found = {}
    for payload in KEPT_IN_MEMORY:
        url = await place.dictionaries(payload, SIZES[payload])
        found[_item(payload)] = (await place.sizes(url, dictionary_item=sum(SIZES[payload])))["dictionary_item"]
    return found


async def _deltas(place: Place) -> Told:
    async with fresh_database(await place.url()) as url:
        told = await deltas(place, url, EVENTS)
        sizes = await place.sizes(url, outbox_event=told.events, processed_event=told.events)
    return _told(DELTA, {**told.spent.for_each(told.events), "apply": told.apply, "relay": told.relay}, sizes)


async def _rows(place: Place) -> Told:
    """One stage of each row, claimed and reported in hundreds."""
    async with fresh_database(await place.url()) as url:
        async with _tracking(url) as (db, service):
            await _fill(db, ROWS)
            async with place.spending(url) as spent:
                await _in_process(service)(100, 0)
        sizes = await place.sizes(url, pipeline_tracking=ROWS, journal=ROWS)
    return _told(ROW, spent.for_each(ROWS), sizes)


async def _steps(place: Place) -> Told:
    """Chains of steps that do nothing, with the making of their runs."""
    steps = CHAINS * LENGTH
    with tempfile.TemporaryDirectory(dir=place.folder) as folder:
        async with fresh_database(await place.url()) as url:
            async with (
                flows_ours.opened(url, folder) as platform,
                flows_ours.working(platform, flows_ours.CONCURRENCY),
                place.spending(url) as spent,
            ):
                await flows_ours.make_runs(platform, "chain", range(CHAINS))
                while await platform.db.fetchval(flows_ours.UNDER_WAY):  # noqa: ASYNC110 - a worker does it
                    await asyncio.sleep(flows_ours.LOOK)
            sizes = await place.sizes(url, flow_step=steps, flow_run=steps, journal=steps)
    flows_defined.ticks.clear()
    return _told(STEP, spent.for_each(steps), sizes)


async def _records(place: Place) -> Told:
    """A full run over a source in a process of its own."""
    program = ("-m", "penstock.cli.main", "harvest", "source", "--port", "0", "--json")
    folder = Path(tempfile.mkdtemp(dir=place.folder))
    try:
        async with (
            fresh_database(await place.url()) as url,
            served(*program, "--records", str(RECORDS), "--seed", str(SEED)) as source,
        ):
            async with opened(settings_of(url, source, folder)):
                pass  # the schema is there before it is measured
            async with place.spending(url) as spent:
                told = await harvest(url, source, folder, RECORDS)
            sizes = await place.sizes(url, raw_record=RECORDS, canonical_record=RECORDS)
    finally:
        shutil.rmtree(folder)
    worker = told.worker * PER_THOUSAND / RECORDS
    return _told(RECORD, {**spent.for_each(RECORDS), "worker": worker}, sizes)


def _told(what: str, work: Told, sizes: Told) -> Told:
    found = {f"work: {what}: {name}": value for name, value in work.items()}
    found |= {_kept(what, table): size for table, size in sizes.items()}
    print(f"  {found}", file=sys.stderr)
    return found
