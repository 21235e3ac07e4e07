"""Interleaved rounds and their medians: on a noisy machine the only figures that mean something."""

import asyncio
import json
import os
import platform
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from benchmarks.session import Session
from penstock import __version__

Measure = Callable[[], Awaitable[float]]
T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class Bench:
    """Something to measure: how many *unit* it makes a second, or how long it takes, beside what it shall reach."""

    name: str
    unit: str
    measure: Measure
    target: float | None = None
    is_duration: bool = False
    may_be_zero: bool = False  # a difference, or a count of what need not be there

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
            "median": _rounded(self.median),
            "rounds": [_rounded(value) for value in self.rounds],
            "target": self.bench.target,
            "may_be_zero": self.bench.may_be_zero,
        }


class Shared(Generic[T]):
    """One run for several figures; a second request for the same figure starts a new run."""

    def __init__(self, run: Callable[[], Awaitable[T]]) -> None:
        self._run = run
        self._last: list[T] = []
        self._told: set[str] = set()

    async def result(self, figure: str) -> T:
        """Return the result of the run, or of a new run if *figure* has already got it."""
        if not self._last or figure in self._told:
            self._last, self._told = [await self._run()], set()
        self._told.add(figure)
        return self._last[0]


@dataclass(frozen=True)
class Group(Generic[S]):
    """Benchmarks that share their set-up, and the sizes of their data in the full form and in the smoke form."""

    benches: Callable[[Session, S], AbstractAsyncContextManager[Sequence[Bench]]]
    full: S
    smoke: S
    conclude: Callable[[Sequence[Figure], S], list[str]] | None = None
    needs_two_cores: bool = False  # one for the server, one for its load

    def sizes(self, session: Session) -> S:
        """Return the sizes in the form of *session*."""
        return self.full if session.form.is_complete else self.smoke

    def open(self, session: Session) -> AbstractAsyncContextManager[Sequence[Bench]]:
        """Set up everything that is measured, until the end."""
        return self.benches(session, self.sizes(session))

    def notes(self, session: Session, figures: Sequence[Figure]) -> list[str]:
        """Return what follows from *figures*."""
        return self.conclude(figures, self.sizes(session)) if self.conclude else []


@dataclass
class Results:
    """The rounds that are finished, of so many that are wanted."""

    wanted: int
    benches: Sequence[Bench] = ()
    rounds: list[Mapping[str, float]] = field(default_factory=list)
    interruption: str = ""  # the signal that ended the run early

    @property
    def figures(self) -> list[Figure]:
        """Return the figures of all finished rounds; none before the first."""
        if not self.rounds:
            return []
        return [Figure(bench, [sample[bench.name] for sample in self.rounds]) for bench in self.benches]

    def __str__(self) -> str:
        return f"interrupted by {self.interruption} after {len(self.rounds)} of {self.wanted} rounds"


async def run(benches: Sequence[Bench], results: Results, *, warms_up: bool) -> None:
    """Measure every bench once per round, so that a slow minute of the machine hits them all; round 0 warms up."""
    results.benches = benches
    for number in range(0 if warms_up else 1, results.wanted + 1):
        values = {bench.name: await _measure(bench, f"{number}/{results.wanted}") for bench in benches}
        if number:
            results.rounds.append(values)
        print(f"round {number}/{results.wanted} finished", file=sys.stderr)


async def _measure(bench: Bench, place: str) -> float:
    print(f"round {place}  {bench.name}", file=sys.stderr)
    value = await bench.measure()
    task = asyncio.current_task()
    if task is not None and task.cancelling():  # the code that was measured swallowed the interruption
        raise asyncio.CancelledError
    return value


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
    return statistics.median(sample / other for sample, other in pairs)


def report(session: Session, results: Results, *, as_json: bool, notes: Sequence[str] = ()) -> str:
    """Return the figures for people, or for programs, and what follows from them."""
    return _as_json(session, results, notes) if as_json else _as_table(session, results, notes)


def _as_json(session: Session, results: Results, notes: Sequence[str]) -> str:
    document = {
        "machine": machine(),
        "form": session.form.name,
        "rounds": len(results.rounds),
        "interrupted": results.interruption or None,
        "left_out": session.left_out,
        "figures": [figure.as_dict() for figure in results.figures],
    }
    return json.dumps({**document, **({"notes": notes} if notes else {})}, indent=2, ensure_ascii=False)


def _as_table(session: Session, results: Results, notes: Sequence[str]) -> str:
    head = ["measured", "median", "slowest", "fastest", "target"]
    rows = [head, *(_row(figure) for figure in results.figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(_aligned(cell, width, n) for n, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    footer = [*notes, *(f"left out: {name}" for name in session.left_out)]
    footer += [] if session.form.is_complete else ["smoke form: the data is tiny, and the figures mean nothing"]
    footer += [str(results)] if results.interruption else []
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    return "\n".join([*lines, *(["", *footer] if footer else []), "", about])


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


def _rounded(value: float) -> float:
    """Return so many digits as mean something, of small values too."""
    return float(f"{value:.6g}")


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
