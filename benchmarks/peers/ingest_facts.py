"""The work every ingest peer does: rows in, facts and bad rows out; and how a peer says what it took.

Libraries that only read get this mapping; it takes no detour that would make them look slow.
"""

import hashlib
import json
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

import orjson

RUN_ID = "nordic_20260213T194500Z_1a2b3c"
SUPPLIER = "nordic"
FIRST_ROW = 2  # the header is row 1
HEAD = {"run_id": RUN_ID, "supplier": SUPPLIER}
Payload = dict[str, str | int | None]
Numbered = Iterable[tuple[int, Sequence[Any]]]


class Bad(Exception):
    """A row that is set aside; its message is the reason's code."""


def payload(cells: Sequence[Any]) -> Payload:
    """Return the payload of a row with sorted names, which is canonical JSON; raise Bad for an unreadable row."""
    sku, name, brand, qty, price, day = cells
    if not (sku and (sku := sku.strip())):
        raise Bad("REQUIRED_MISSING")
    return {
        "brand": brand.strip() if brand else None,
        "date": _iso(day),
        "name": name.strip() if name else None,
        "price_minor": _minor(price),
        "qty": _whole(qty),
        "sku": sku,
    }


def canonical(found: Payload) -> bytes:
    return orjson.dumps(found)


def row_id(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def write_facts(rows: Numbered, folder: Path) -> int:
    """Write `facts.ndjson` and `bad.ndjson` of *rows* and return how many rows that were."""
    count = 0
    with (folder / "facts.ndjson").open("wb", 1 << 20) as facts, (folder / "bad.ndjson").open("wb") as bad:
        for number, cells in rows:
            count += 1
            try:
                text = canonical(payload(cells))
            except Bad as why:
                bad.write(orjson.dumps({**HEAD, "row_number": number, "reason_code": str(why)}) + b"\n")
                continue
            # A fragment goes into the line as it is: the payload is made JSON only once.
            fact = {**HEAD, "row_id": row_id(text), "row_number": number, "payload": orjson.Fragment(text)}
            facts.write(orjson.dumps(fact) + b"\n")
    return count


def measured(work: Callable[[Path, Path], int]) -> None:
    """Do *work* on the input and the output folder the command line names, and print what it took."""
    source, folder = Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    imported, began = _largest_child(), perf_counter()
    rows = work(source, folder)
    seconds = perf_counter() - began
    # What an import ran and ended (dlt's asks `file` about Python) is no part of the work.
    child = found if (found := _largest_child()) > imported else 0
    peak = (_own_peak() + child) / 1024
    print(json.dumps({"rows": rows, "seconds": round(seconds, 4), "peak_mb": round(peak, 1)}))


def _largest_child() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def _own_peak() -> int:
    # getrusage counts what the process that started us held before exec, so a large benchmark would be ours too.
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _iso(day: Any) -> str:
    if not isinstance(day, str):  # a workbook's
        if day is None:
            raise Bad("NOT_DATE")
        return str(day)[:10]
    try:
        return date(int(day[6:]), int(day[3:5]), int(day[:2])).isoformat()
    except ValueError:
        raise Bad("NOT_DATE") from None


def _minor(price: Any) -> int:
    if isinstance(price, int | float):
        return round(price * 100)
    whole, _, part = (price or "").replace(" ", "").partition(",")
    if len(part) != 2:
        raise Bad("NOT_MONEY")
    try:
        return int(whole + part)
    except ValueError:
        raise Bad("NOT_MONEY") from None


def _whole(qty: Any) -> int:
    try:
        return int(qty.lstrip("> ") if isinstance(qty, str) else qty)
    except (TypeError, ValueError):
        raise Bad("NOT_INTEGER") from None
