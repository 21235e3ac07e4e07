"""A CSV into facts with dlt, as JSONL on its filesystem destination: `ingest_dlt.py INPUT OUTPUT_DIR [WAY]`.

`arrow`, the default, is the fastest we found: pyarrow reads and maps whole batches, and dlt writes them as JSONL.
`rows` is what dlt's documentation shows first: a Python generator of pages of dictionaries, to which dlt adds its ids.
"""

import csv
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dlt  # type: ignore[import-not-found]
import pyarrow as pa  # type: ignore[import-not-found]
import pyarrow.compute as pc  # type: ignore[import-not-found]
import pyarrow.csv  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.ingest_facts import FIRST_ROW, HEAD, Bad, canonical, measured, payload, row_id

SETTINGS = {
    "RUNTIME__DLTHUB_TELEMETRY": "false",
    "RUNTIME__LOG_LEVEL": "CRITICAL",
    "DATA_WRITER__DISABLE_COMPRESSION": "true",
    "SOURCES__DATA_WRITER__FILE_MAX_ITEMS": "250000",  # several files, so that several workers have something to do
}
COLUMNS = ("sku", "name", "brand", "qty", "price", "date")
PAGE = 10_000  # dlt's guide: yield pages, not rows
BLOCK = 4 << 20
LARGE = 32 << 20  # bytes; below, starting processes costs more than they save
Pages = Iterator[Any]


def rows(source: Path) -> Pages:
    """Facts and bad rows in pages of dictionaries."""
    facts: list[dict[str, Any]] = []
    bad: list[dict[str, Any]] = []
    with source.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, delimiter=";")
        next(reader)
        for number, cells in enumerate(reader, start=FIRST_ROW):
            try:
                found = payload(cells)
            except Bad as why:
                bad.append({**HEAD, "row_number": number, "reason_code": str(why)})
                continue
            facts.append({**HEAD, "row_id": row_id(canonical(found)), "row_number": number, "payload": found})
            if len(facts) == PAGE:
                yield facts
                facts = []
    yield facts
    yield dlt.mark.with_table_name(bad, "bad")


def arrow(source: Path) -> Pages:
    """Facts and bad rows in arrow tables; only the hash, which arrow has not, is made in Python."""
    reader = pyarrow.csv.open_csv(
        source,
        read_options=pyarrow.csv.ReadOptions(block_size=BLOCK),
        parse_options=pyarrow.csv.ParseOptions(delimiter=";"),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(COLUMNS, pa.string()), null_values=[""], strings_can_be_null=True
        ),
    )
    start = FIRST_ROW
    for batch in reader:
        numbers = pa.array(range(start, start + len(batch)))
        start += len(batch)
        typed = _typed(batch)
        reasons = _reasons(typed)
        good = pc.is_null(reasons)
        yield _facts(typed.filter(good), numbers.filter(good))
        if reasons.null_count < len(reasons):
            bad = pc.invert(good)
            found = {"row_number": numbers.filter(bad), "reason_code": reasons.filter(bad)}
            yield dlt.mark.with_table_name(_headed(found), "bad")


def _typed(batch: Any) -> Any:
    """The payload's columns, sorted by name; null where a cell cannot be read."""
    price, qty = pc.replace_substring(batch["price"], " ", ""), pc.utf8_ltrim(batch["qty"], "> ")
    sku = pc.utf8_trim(batch["sku"], " ")
    found = {
        "brand": pc.utf8_trim(batch["brand"], " "),
        "date": _iso(batch["date"]),
        "name": pc.utf8_trim(batch["name"], " "),
        "price_minor": pc.replace_substring(_only(price, r"^\d+,\d\d$"), ",", "").cast(pa.int64()),
        "qty": _only(qty, r"^\d+$").cast(pa.int64()),
        "sku": _only(sku, "."),
    }
    return pa.RecordBatch.from_pydict(found)


def _iso(day: Any) -> Any:
    read = pc.strptime(day, "%d.%m.%Y", unit="s", error_is_null=True).cast(pa.date32()).cast(pa.string())
    turned = pc.binary_join_element_wise(
        *(pc.utf8_slice_codeunits(day, *part) for part in ((6, 10), (3, 5), (0, 2))), "-"
    )
    return pc.if_else(pc.equal(read, turned), read, None)  # arrow takes 31.02. for 03.03.


def _only(column: Any, pattern: str) -> Any:
    return pc.if_else(pc.match_substring_regex(column, pattern), column, None)


def _reasons(typed: Any) -> Any:
    codes = {"sku": "REQUIRED_MISSING", "date": "NOT_DATE", "price_minor": "NOT_MONEY", "qty": "NOT_INTEGER"}
    missing = pa.StructArray.from_arrays([pc.is_null(typed[name]) for name in codes], list(codes))
    return pc.case_when(missing, *(pa.scalar(code) for code in codes.values()))


def _facts(typed: Any, numbers: Any) -> Any:
    parts: list[Any] = []
    for name in typed.schema.names:
        parts += [f'{"," if parts else "{"}"{name}":', _json(typed[name])]
    texts = pc.binary_join_element_wise(*parts, "}", "").cast(pa.binary())
    ids = pa.array([row_id(text) for text in texts.to_pylist()])
    return _headed({"row_id": ids, "row_number": numbers, "payload": typed.to_struct_array()})


def _json(column: Any) -> Any:
    if pa.types.is_integer(column.type):
        return column.cast(pa.string())
    escaped = pc.replace_substring(pc.replace_substring(column, "\\", "\\\\"), '"', '\\"')
    return pc.coalesce(pc.binary_join_element_wise('"', escaped, '"', ""), "null")


def _headed(columns: dict[str, Any]) -> Any:
    count = len(columns["row_number"])
    return pa.table({**{name: pa.repeat(value, count) for name, value in HEAD.items()}, **columns})


WAYS: dict[str, Callable[[Path], Pages]] = {"arrow": arrow, "rows": rows}


def ingest(way: str, source: Path, folder: Path) -> int:
    """Extract, normalize and load; *folder* is to be empty, for dlt goes on where it finds its own state."""
    large = source.stat().st_size > LARGE
    os.environ.update(SETTINGS, NORMALIZE__WORKERS=str(os.cpu_count()) if large else "1")
    destination = dlt.destinations.filesystem(bucket_url=(folder / "loaded").as_uri())
    pipeline = dlt.pipeline("ingest", destination=destination, dataset_name="lists", pipelines_dir=str(folder / "work"))
    hints = {"payload": {"data_type": "json"}} if way == "rows" else None  # arrow brings its types along
    listed = dlt.resource(WAYS[way], name="facts", max_table_nesting=0, columns=hints)
    pipeline.run(listed(source), loader_file_format="jsonl")
    counts = pipeline.last_trace.last_normalize_info.row_counts
    return int(counts["facts"] + counts.get("bad", 0))


if __name__ == "__main__":
    measured(partial(ingest, sys.argv[3] if len(sys.argv) > 3 else "arrow"))
