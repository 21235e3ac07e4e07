"""Interleaved rounds and their medians: on a noisy machine the only figures that mean something."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from penstock import __version__

Measure = Callable[[], Awaitable[float]]
T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """Something to measure: how many *unit* it makes a second, or how long it takes, beside what it shall reach."""

    name: str
    unit: str
    measure: Measure
    target: float | None = None
    is_duration: bool = False

    @property
    def label(self) -> str:
        return self.unit if self.is_duration else f"{self.unit}/s"


@dataclass(frozen=True)
class Figure:
    """The median of a bench's rounds, with the slowest and the fastest."""

    bench: Bench
    rounds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.bench.name,
            "unit": self.bench.label,
            "median": round(self.median, 1),
            "rounds": [round(value, 1) for value in self.rounds],
            "target": self.bench.target,
        }


class Shared(Generic[T]):
    """One run for several figures: whoever asks a second time has it done again."""

    def __init__(self, run: Callable[[], Awaitable[T]]) -> None:
        self._run = run
        self._last: list[T] = []
        self._told: set[str] = set()

    async def result(self, figure: str) -> T:
        """What the run gave that *figure* was not told of yet."""
        if not self._last or figure in self._told:
            self._last, self._told = [await self._run()], set()
        self._told.add(figure)
        return self._last[0]


Conclude = Callable[[Sequence[Figure]], list[str]]


async def run(benches: Sequence[Bench], rounds: int) -> list[Figure]:
    """Measure every bench once per round, so that a slow minute of the machine hits them all; round 0 warms up."""
    rates: dict[str, list[float]] = {bench.name: [] for bench in benches}
    for number in range(rounds + 1):
        for bench in benches:
            print(f"round {number}/{rounds}  {bench.name}", file=sys.stderr)
            rate = await bench.measure()
            rates[bench.name] += [rate] if number else []
    return [Figure(bench, rates[bench.name]) for bench in benches]


def machine() -> Mapping[str, object]:
    """What the figures were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 2**30),
    }


def ratio(figures: Sequence[Figure], ours: str, theirs: str) -> float | None:
    """The median of what ours was to theirs in each round; None when they were not both measured."""
    named = {figure.bench.name: figure for figure in figures}
    if ours not in named or theirs not in named:
        return None
    pairs = zip(named[ours].rounds, named[theirs].rounds, strict=True)
    return statistics.median(one / other for one, other in pairs)


def report(figures: Sequence[Figure], *, as_json: bool, notes: Sequence[str] = ()) -> str:
    """The figures for people, or for programs, and what follows from them."""
    if as_json:
        told = {"machine": machine(), "figures": [figure.as_dict() for figure in figures]}
        return json.dumps({**told, **({"notes": notes} if notes else {})}, indent=2, ensure_ascii=False)
    head = ["measured", "median", "slowest", "fastest", "target"]
    rows = [head, *(_row(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(_aligned(cell, width, n) for n, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    return "\n".join([*lines, *(["", *notes] if notes else []), "", about])


def _row(figure: Figure) -> list[str]:
    bench = figure.bench
    worst, best = (max, min) if bench.is_duration else (min, max)
    target = f"{'≤' if bench.is_duration else '≥'} {bench.target:,.0f}" if bench.target else ""
    return [
        bench.name,
        f"{_shown(figure.median, bench)} {bench.label}",
        _shown(worst(figure.rounds), bench),
        _shown(best(figure.rounds), bench),
        target,
    ]


def _shown(value: float, bench: Bench) -> str:
    return f"{value:,.1f}" if bench.is_duration else f"{value:,.0f}"


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
