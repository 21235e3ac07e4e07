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
from benchmarks.capacity_place import PER_THOUSAND, Measurements, Place, figures
from benchmarks.harness import Bench
from benchmarks.harvest_ours import harvest, opened, settings_of
from benchmarks.harvest_place import SEED, fresh_database
from benchmarks.peers.flows_env import LENGTH
from benchmarks.servers import served
from benchmarks.tracking import _fill, _in_process, _tracking

DELTA, ROW, STEP, RECORD = "DELTA of one item", "tracking row, one stage", "flow step", "harvested record"
# The tables in which the work of each leaves something, and how many rows for one of it.
TABLES: Mapping[str, Mapping[str, str]] = {
    DELTA: {"outbox_event": "its history", "processed_event": "its id"},
    ROW: {"pipeline_tracking": "the row", "journal": "its moves, two a stage"},
    STEP: {"flow_step": "the step", "flow_run": "its share of the run", "journal": "its moves"},
    RECORD: {"raw_record": "as the source returned it", "canonical_record": "as it is mapped and priced"},
}
_WORK = {"PostgreSQL": "ms for 1,000", "WAL": "bytes each"}
_FOR_A_THOUSAND = "ms for 1,000"


def benches(place: Place) -> list[Bench]:
    """Items at rest, and one run of each part's work."""
    runs = {DELTA: partial(_deltas, place), ROW: partial(_rows, place)}
    runs |= {STEP: partial(_steps, place), RECORD: partial(_records, place)}
    found = figures(partial(_items, place), {_item(payload): "bytes each" for payload in place.sizes.kept}, once=True)
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


async def _items(place: Place) -> Measurements:
    found = {}
    for payload in place.sizes.kept:
        url = await place.dictionaries(payload)
        count = sum(place.sizes.items[payload])
        found[_item(payload)] = (await place.disk(url, dictionary_item=count))["dictionary_item"]
    return found


async def _deltas(place: Place) -> Measurements:
    async with fresh_database(await place.url()) as url:
        result = await deltas(place, url, place.sizes.events)
        sizes = await place.disk(url, outbox_event=result.events, processed_event=result.events)
    return _combine(
        DELTA, {**result.spent.for_each(result.events), "apply": result.apply, "relay": result.relay}, sizes
    )


async def _rows(place: Place) -> Measurements:
    """Measure one stage of each row, claimed and reported in hundreds."""
    rows = place.sizes.rows
    async with fresh_database(await place.url()) as url:
        async with _tracking(url) as (db, service):
            await _fill(db, rows)
            async with place.spending(url) as spent:
                await _in_process(service)(100, 0)
        sizes = await place.disk(url, pipeline_tracking=rows, journal=rows)
    return _combine(ROW, spent.for_each(rows), sizes)


async def _steps(place: Place) -> Measurements:
    """Measure chains of steps that do nothing, with the making of their runs."""
    chains = place.sizes.chains
    steps = chains * LENGTH
    with tempfile.TemporaryDirectory(dir=place.folder) as folder:
        async with fresh_database(await place.url()) as url:
            async with (
                flows_ours.opened(url, folder) as platform,
                flows_ours.working(platform, flows_ours.CONCURRENCY),
                place.spending(url) as spent,
            ):
                await flows_ours.make_runs(platform, "chain", range(chains))
                while await platform.db.fetchval(flows_ours.UNDER_WAY):  # noqa: ASYNC110 - a worker does it
                    await asyncio.sleep(flows_ours.LOOK)
            sizes = await place.disk(url, flow_step=steps, flow_run=steps, journal=steps)
    flows_defined.ticks.clear()
    return _combine(STEP, spent.for_each(steps), sizes)


async def _records(place: Place) -> Measurements:
    """Measure a full run over a source in a process of its own."""
    records = place.sizes.records
    program = ("-m", "penstock.cli.main", "harvest", "source", "--port", "0", "--json")
    folder = Path(tempfile.mkdtemp(dir=place.folder))
    try:
        async with (
            fresh_database(await place.url()) as url,
            served(*program, "--records", str(records), "--seed", str(SEED)) as source,
        ):
            async with opened(settings_of(url, source, folder)):
                pass  # the schema is there before it is measured
            async with place.spending(url) as spent:
                result = await harvest(url, source, folder, records)
            sizes = await place.disk(url, raw_record=records, canonical_record=records)
    finally:
        shutil.rmtree(folder)
    worker = result.worker * PER_THOUSAND / records
    return _combine(RECORD, {**spent.for_each(records), "worker": worker}, sizes)


def _combine(what: str, work: Measurements, sizes: Measurements) -> Measurements:
    found = {f"work: {what}: {name}": value for name, value in work.items()}
    found |= {_kept(what, table): size for table, size in sizes.items()}
    print(f"  {found}", file=sys.stderr)
    return found
