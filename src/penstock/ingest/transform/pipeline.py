"""From a file to facts: read, judged and written at the same time, in bounded memory."""

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

_JUDGES = 2
_UNDER_WAY = 3  # one more than can be judged: a judge must not wait until the one before it is written
_TURN = 0.0002
A = TypeVar("A")
B = TypeVar("B")
Progress = Callable[[int, float | None], None]  # rows so far, and which part of the file that is


@dataclass(frozen=True)
class RunNames:
    """Whose run it is."""

    run_id: str
    supplier: str


class ProcessedFile:
    """What a file becomes, in a folder."""

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


def process_file(file: Path, supplier: Supplier, names: RunNames, made: ProcessedFile, progress: Progress) -> None:
    """Facts and bad rows of *file*; Failed when the Gate refuses it."""
    gauge = ReadProgress(file.stat().st_size)
    # Of records only the names that are mapped are read, in all spellings; without a mapping all are.
    wanted = [str(place) for column in supplier.columns.values() for place in column.places] or None
    with ThreadPoolExecutor(_JUDGES, "ingest-judge") as pool, _yielding_often():
        for table in open_tables(file, supplier.source, supplier.limits, wanted, gauge):
            emitter = RecordEmitter(names.run_id, names.supplier, supplier, bind_columns(table, supplier), table)
            if table.name:
                made.stats.count(table.name, 0, {})  # a sheet without rows is a category all the same
            prepared = (part for batch in table.batches for part in emitter.prepare(batch))
            for emitted in _at_once(pool, emitter.emit, prepared):
                made.add(emitted, table.name or None)
                progress(made.stats.good_rows + made.stats.bad_rows, gauge.fraction)


def _at_once(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterator[A]) -> Iterator[B]:
    """What *work* makes of *items*, in their order, some at once."""
    under_way: deque[Future[B]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) >= _UNDER_WAY:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()


@contextmanager
def _yielding_often() -> Iterator[None]:
    """Threads come back from the columnar library all the time, and must not wait milliseconds for their turn."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def settle_repeated_keys(made: ProcessedFile, supplier: Supplier, names: RunNames, out: Path) -> None:
    """I18: of facts with the same key one stays, or the run fails."""
    if not supplier.key or supplier.duplicate_keys == "keep":
        return
    places = indexes.find_repeated(made.index, keeps_last=supplier.duplicate_keys == "last")
    if not len(places):
        return
    if supplier.duplicate_keys == "fail":
        said = f"{len(places)} rows repeat the key ({', '.join(supplier.key)}) of another"
        raise RunFailed(FailureCode.DQ_DUPLICATE_KEYS, said, "duplicate_keys: first or last would keep one of each")
    made.facts.close()
    whole = made.facts.path.rename(out / "all.ndjson")
    made.facts, made.index = NdjsonLines(out / paths.FACTS), KeyIndex(out / "index-kept")
    with whole.open("rb") as content:
        _keep_one(made, content, places, supplier, names)
    whole.unlink()


def _keep_one(made: ProcessedFile, content: BinaryIO, places: pl.Series, supplier: Supplier, names: RunNames) -> None:
    begun = 0
    for lines in read_lines(content):
        known = parse_facts(lines, supplier)
        end = begun + len(lines)
        here = places.filter(places.is_between(begun, end, closed="left"))
        is_repeated = pl.int_range(begun, end, eager=True).is_in(here.implode())
        begun = end
        made.facts.add(lines.filter(~is_repeated))
        made.index.add(hash_keys(known.filter(~is_repeated), supplier))
        for (found,), rows in known.filter(is_repeated).group_by([CATEGORY], maintain_order=True):
            category = None if found is None else str(found)
            start = format_line_start(names.run_id, names.supplier, category)
            made.bad.add(build_repeated_lines(start, rows["row_number"]))
            made.stats.count(category, -rows.height, {IngestReason.KEY_DUPLICATE.value: rows.height})


def hold_facts(
    made: ProcessedFile, old: KeyIndex, content: BinaryIO, supplier: Supplier, names: RunNames, held_from: str
) -> None:
    """I20: add the last good facts of keys whose rows went bad."""
    for lines, _ in read_lines_at(content, indexes.find_positions_to_hold(made.held, old, made.index)):
        known = parse_facts(lines, supplier)
        made.facts.add(build_held_lines(names.run_id, names.supplier, known, extract_payloads(lines), held_from))
        made.index.add(hash_keys(known, supplier))
        for (category,), rows in known.group_by([CATEGORY]):
            made.stats.hold(None if category is None else str(category), rows.height)
