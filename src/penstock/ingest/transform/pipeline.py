"""From a file to facts: reading, validation and writing in parallel, in bounded memory."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import polars as pl

from penstock.ingest.contract import FailureCode, IngestReason
from penstock.ingest.extract.files import open_tables
from penstock.ingest.extract.tables import ReadProgress
from penstock.ingest.model import RunFailed, RunStats
from penstock.ingest.supplier import CATEGORY, Supplier
from penstock.ingest.transform import key_index as indexes
from penstock.ingest.transform.emit import EmittedRows, RecordEmitter
from penstock.ingest.transform.gate import bind_columns
from penstock.ingest.transform.key_index import KeyIndex
from penstock.ingest.transform.ndjson import (
    NdjsonLines,
    build_held_lines,
    build_repeated_lines,
    extract_payloads,
    format_line_start,
    hash_keys,
    parse_facts,
    read_lines,
    read_lines_at,
)
from penstock.ingest.tree import paths
from penstock.kernel.status import pluralize

_THREADS = 2
_AHEAD = 3  # batches in progress: more than threads, so that a thread does not wait for the writer
_SWITCH_SECONDS = 0.0002
A = TypeVar("A")
B = TypeVar("B")
Progress = Callable[[int, float | None], None]  # rows so far, and the share of the file


@dataclass(frozen=True)
class RunNames:
    """The id of a run and its supplier."""

    run_id: str
    supplier: str


class ProcessedFile:
    """The results of a file in a folder: facts, bad rows, statistics and keys."""

    def __init__(self, out: Path) -> None:
        self.stats = RunStats()
        self.index = KeyIndex(out / "index")
        self.held = KeyIndex(out / "held")
        with ExitStack() as opened:
            self.facts = opened.enter_context(closing(NdjsonLines(out / paths.FACTS)))
            self.bad = NdjsonLines(out / paths.BAD)
            opened.pop_all()

    def add(self, emitted: EmittedRows, category: str | None) -> None:
        self.facts.add(emitted.facts)
        self.bad.add(emitted.bad)
        self.index.add(emitted.index)
        self.held.add(emitted.held)
        self.stats.count(category, len(emitted.facts), emitted.reasons)
        self.stats.blank_rows += emitted.blank
        self.stats.skipped_rows += emitted.skipped

    def close(self) -> None:
        with closing(self.bad):  # the facts may not fit on the disk
            self.facts.close()


def process_file(file: Path, supplier: Supplier, names: RunNames, output: ProcessedFile, progress: Progress) -> None:
    """Write the facts and bad rows of *file* to *out*; RunFailed if the Gate rejects it."""
    position = ReadProgress(file.stat().st_size)
    # Of records only the mapped names are read, in all spellings; without a mapping all names are read.
    wanted = [str(reference) for column in supplier.columns.values() for reference in column.references] or None
    with ThreadPoolExecutor(_THREADS, "ingest-judge") as pool, _switch_threads_often():
        for table in open_tables(file, supplier.source, supplier.limits, wanted, position):
            emitter = RecordEmitter(names.run_id, names.supplier, supplier, bind_columns(table, supplier), table)
            if table.name:
                output.stats.count(table.name, 0, {})  # a sheet without rows is also a category
            prepared = (part for batch in table.batches for part in emitter.prepare(batch))
            for emitted in _map_ahead(pool, emitter.emit, prepared):
                output.add(emitted, table.name or None)
                progress(output.stats.good_rows + output.stats.bad_rows, position.fraction)


def _map_ahead(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterator[A]) -> Iterator[B]:
    """Yield the results of *work* for *items* in their order; several items are processed at the same time."""
    running: deque[Future[B]] = deque()
    try:
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) >= _AHEAD:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


@contextmanager
def _switch_threads_often() -> Iterator[None]:
    """Shorten the switch interval: threads often return from polars, and must not wait milliseconds for the GIL."""
    default = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(default)


def settle_repeated_keys(output: ProcessedFile, supplier: Supplier, names: RunNames, out: Path) -> None:
    """I18: apply `duplicate_keys`: of facts with the same key one stays, or the run fails."""
    if not supplier.key or supplier.duplicate_keys == "keep":
        return
    positions = indexes.find_repeated(output.index, keeps_last=supplier.duplicate_keys == "last")
    if not len(positions):
        return
    if supplier.duplicate_keys == "fail":
        rows = pluralize(len(positions), "row")
        message = f"the key ({', '.join(supplier.key)}) is not unique: {rows} repeat the key of another row"
        hint = "ask the supplier to fix the file, or set `duplicate_keys` to first or last to keep a row of each key"
        raise RunFailed(FailureCode.DQ_DUPLICATE_KEYS, message, hint)
    output.facts.close()
    all_facts = output.facts.path.rename(out / "all.ndjson")
    output.facts, output.index = NdjsonLines(out / paths.FACTS), KeyIndex(out / "index-unique")
    with all_facts.open("rb") as content:
        _drop_repeated(output, content, positions, supplier, names)
    all_facts.unlink()


def _drop_repeated(
    output: ProcessedFile, content: BinaryIO, positions: pl.Series, supplier: Supplier, names: RunNames
) -> None:
    start = 0
    for lines in read_lines(content):
        facts = parse_facts(lines, supplier)
        end = start + len(lines)
        here = positions.filter(positions.is_between(start, end, closed="left"))
        is_repeated = pl.int_range(start, end, eager=True).is_in(here.implode())
        start = end
        output.facts.add(lines.filter(~is_repeated))
        output.index.add(hash_keys(facts.filter(~is_repeated), supplier))
        for (value,), rows in facts.filter(is_repeated).group_by([CATEGORY], maintain_order=True):
            category = None if value is None else str(value)
            line_start = format_line_start(names.run_id, names.supplier, category)
            output.bad.add(build_repeated_lines(line_start, rows["row_number"], supplier.key))
            output.stats.count(category, -rows.height, {IngestReason.KEY_DUPLICATE.value: rows.height})


def hold_facts(
    output: ProcessedFile, old: KeyIndex, content: BinaryIO, supplier: Supplier, names: RunNames, held_from: str
) -> None:
    """I20: add the last good facts of the keys whose rows are bad now."""
    for lines, _ in read_lines_at(content, indexes.find_positions_to_hold(output.held, old, output.index)):
        facts = parse_facts(lines, supplier)
        output.facts.add(build_held_lines(names.run_id, names.supplier, facts, extract_payloads(lines), held_from))
        output.index.add(hash_keys(facts, supplier))
        for (category,), rows in facts.group_by([CATEGORY]):
            output.stats.add_held(None if category is None else str(category), rows.height)
