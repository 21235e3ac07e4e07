"""Write the tables of docs/deploy/capacity.md, and its example, out of the figures in docs/deploy/capacity.json."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "deploy"
PAGE, FIGURES = FOLDER / "capacity.md", FOLDER / "capacity.json"
COMMAND = "python -m benchmarks capacity --only {}:"
SECTIONS = {
    "reads": "read",
    "memory": "a pod with",
    "pods": "a pod's",
    "redis": "Redis for",
    "work": "PostgreSQL and workers for",
    "disk": "on disk",
    "connections": "role",
    "kafka": "DELTAs of one item over",
}
# The example: what is asked for, and what of it is kept free.
TPS, DICTIONARIES, ITEMS, DELTAS, PODS = 2_000_000, 10, 1_000_000, 100, 20
FULL, POOL, POOLS = 0.7, 10, 2
HISTORY_DAYS, IDS_DAYS, STREAM, HEADERS = 90, 14, 100_000, 250
_TIME = ": processor time"
_DAY, _GB, _MIB = 86_400, 1e9, 2**20
_BLOCK = r"(<!-- figures: {} -->\n).*?(<!-- end -->)"
_PARTS = 4  # before, the two marks, after
Figures = Mapping[str, tuple[float, str]]


def main() -> None:
    PAGE.write_text(render(PAGE.read_text(), json.loads(FIGURES.read_text())))


def render(page: str, result: Mapping[str, Any]) -> str:
    """The page with every table as the figures give it."""
    for name, text in tables(result).items():
        parts = re.split(_BLOCK.format(name), page, flags=re.DOTALL)
        if len(parts) != _PARTS:
            raise SystemExit(f"{PAGE.name} has {len(parts) // _PARTS} places for {name}, not one")
        page = parts[0] + parts[1] + text + parts[2] + parts[3]
    return page


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated text of each section of the page."""
    figures = {figure["name"]: (float(figure["median"]), str(figure["unit"])) for figure in result["figures"]}
    figures |= {
        _cores(name): (TPS / 100_000 * ms / 1000, "cores") for name, (ms, _) in figures.items() if _is_read(name)
    }
    found = {section: _table(section, title, figures) for section, title in SECTIONS.items()}
    return {**found, "example": _example(figures), "machine": _machine(result["machine"], result.get("notes", []))}


def _is_read(name: str) -> bool:
    return name.startswith("reads: ") and name.endswith(_TIME)


def _cores(name: str) -> str:
    return f"{name.removesuffix(_TIME)}: {TPS:,} requests/s"


def _table(section: str, title: str, figures: Figures) -> str:
    """A row for each thing, a column for each figure of it, and the command that measures them."""
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, str] = {}
    for name, (value, unit) in figures.items():
        of, row, column = name.split(": ")
        if of == section:
            cells.setdefault(row, {})[column] = _shown(value)
            columns[column] = unit
    heads = [title, *(f"{column}, {unit}" for column, unit in columns.items())]
    rows = [[row, *(found.get(column, "") for column in columns)] for row, found in cells.items()]
    lines = [heads, ["---", *("---:" for _ in columns)], *rows]
    return f"`{COMMAND.format(section)}`\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _example(figures: Figures) -> str:
    """Formula and result of each size."""

    def of(name: str) -> float:
        return figures[name][0]

    read, loader = of("reads: 1,000 B, token and version: processor time"), of(f"pods: {DELTAS} deltas/s: loader")
    serving = TPS / 100_000 * read / 1000 / FULL
    processes = math.ceil(serving / PODS)
    peak = of("memory: 300,000 items of 200 B: peak of a full load")
    loaders, servers = (of(f"memory: 300,000 items of 200 B: {who} alone") for who in ("loader", "serving process"))
    applied, pod = of("work: DELTA of one item: PostgreSQL"), of(f"pods: {DELTAS} deltas/s: PostgreSQL")
    primary = (DELTAS * applied / 1000 + PODS * pod) / 1000 / FULL
    events = DELTAS * _DAY
    item = of("disk: item of 200 B, dictionary_item: on disk")
    history = of("disk: DELTA of one item, outbox_event: on disk")
    ids, wal = of("disk: DELTA of one item, processed_event: on disk"), of("work: DELTA of one item: WAL")
    listening = of("connections: serve query-api: listening")
    sent = of("redis: a commit, for each pod: sent")
    rows = [
        ("cores that serve", f"{TPS:,} / 100,000 × {read:,.0f} ms / 1000 / {FULL}", f"{serving:.1f}"),
        ("`query.processes` of each pod", f"{serving:.1f} / {PODS}, rounded up", f"{processes}"),
        (
            "`roles.query` `cpu` request",
            f"{processes} + {loader:,.0f} ms / 1000 for the loader",
            f"{processes + loader / 1000:.1f}",
        ),
        (
            "`query.memoryLimitMb`",
            f"{DICTIONARIES} × {ITEMS:,} × {peak:,.0f} B / 2^20 / {FULL}",
            f"{DICTIONARIES * ITEMS * peak / _MIB / FULL:,.0f}",
        ),
        (
            "`roles.query` `memory` limit",
            f"({loaders:,.0f} + {processes} × {servers:,.0f} MB) × 2",
            f"{2 * (loaders + processes * servers):,.0f} MB",
        ),
        (
            "cores of PostgreSQL",
            f"({DELTAS} × {applied:,.0f} ms / 1000 + {PODS} × {pod:,.1f} ms) / 1000 / {FULL}",
            f"{primary:.1f}",
        ),
        ("disk: items", f"{DICTIONARIES} × {ITEMS:,} × {item:,.0f} B", f"{DICTIONARIES * ITEMS * item / _GB:,.1f} GB"),
        (
            "disk: history",
            f"{events:,} a day × {HISTORY_DAYS} days × {history:,.0f} B",
            f"{events * HISTORY_DAYS * history / _GB:,.0f} GB",
        ),
        (
            "disk: ids of events",
            f"{events:,} a day × {IDS_DAYS} days × {ids:,.0f} B",
            f"{events * IDS_DAYS * ids / _GB:,.0f} GB",
        ),
        ("WAL to archive", f"{events:,} a day × {wal:,.0f} B", f"{events * wal / _GB:,.1f} GB a day"),
        (
            "connections of the pods, at most",
            f"{PODS} × ({POOLS} pools × {POOL} + {listening:.0f})",
            f"{PODS * (POOLS * POOL + listening):,.0f}",
        ),
        (
            "Redis: the stream",
            f"{STREAM:,} × {of('redis: a commit: memory of the stream'):,.0f} B",
            f"{STREAM * of('redis: a commit: memory of the stream') / 1e6:,.0f} MB",
        ),
        (
            "Redis: sent to pods",
            f"{DELTAS} × {PODS} × {sent:,.0f} B",
            f"{DELTAS * PODS * sent / 1e6:,.1f} MB/s",
        ),
        (
            "network of the reads",
            f"{TPS:,} × (200 + {HEADERS} B of headers)",
            f"{TPS * (200 + HEADERS) * 8 / _GB:,.1f} Gbit/s",
        ),
    ]
    head = "| value | calculation | result |\n|---|---|---:|\n"
    return head + "".join(f"| {value} | {formula} | {result} |\n" for value, formula, result in rows)


def _machine(about: Mapping[str, object], notes: Sequence[str]) -> str:
    text = ", ".join(f"{name} {value}" for name, value in about.items())
    return "".join(f"{line}\n" for line in [f"Measured on: {text}; everything on one machine.", *notes])


def _shown(value: float) -> str:
    return f"{value:,.1f}" if value < 100 and value % 1 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
