"""Figures of what was recorded: percentiles, freshness, and all of it second by second."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from drills.load import LATE
from drills.recorder import Outcome, Recorder, Struck

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Shown:
    """How long after its acknowledgement a pod showed a version and never again a lower one."""

    version: int
    pod: int
    acknowledged: float
    delay: float | None  # None: not before the end
    was_away: bool  # the pod did not answer at some time in between


@dataclass(frozen=True)
class Bucket:
    """One stretch of time; durations in ms, None where nothing was measured."""

    at: float
    reads: int
    read_p50: float | None
    read_p99: float | None
    writes: int
    write_p50: float | None
    write_p99: float | None
    fresh_p50: float | None
    fresh_p99: float | None
    fresh_max: float | None
    away_max: float | None
    errors_per_second: float  # requests of readers and writers that failed
    errors_after_retry_per_second: float  # reads that failed twice


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """p50, p95, p99 and the largest of seconds, in ms."""
    found = sorted(values)
    told: dict[str, float | None] = {name: _ms(quantile(found, part)) for name, part in QUANTILES.items()}
    return {**told, "max": _ms(found[-1] if found else None)}


def quantile(ordered: Sequence[float], part: float) -> float | None:
    """The smallest value that this part does not exceed."""
    if not ordered:
        return None
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def shown(recorder: Recorder) -> list[Shown]:
    """Freshness in every pod of each write acknowledged at the first try: others were committed before that."""
    acknowledged = [(w.version, w.ended) for w in recorder.writes if w.version is not None and w.attempts == 1]
    found = []
    for pod, sights in enumerate(recorder.sights):
        times, lowest = _for_good(sights)
        away = sorted(recorder.away[pod])  # one after the other: whoever looks waits for the answer
        back = [until for _, until in away]
        for version, at in acknowledged:
            place = bisect_left(lowest, version)
            delay = max(times[place] - at, 0.0) if place < len(times) else None
            end = times[place] if place < len(times) else float("inf")
            next_away = bisect_left(back, at)
            was_away = next_away < len(away) and away[next_away][0] <= end
            found.append(Shown(version, pod, at, delay, was_away))
    return found


def summary(recorder: Recorder, fresh: Sequence[Shown]) -> dict[str, object]:
    """The figures of the whole drill and, where there were faults, of its calm parts alone."""
    whole = _figures(recorder, fresh, ())
    calm = _figures(recorder, fresh, recorder.faults) if recorder.faults else None
    return {
        **whole,
        "outside_faults": calm,
        "errors": dict(Counter(f"{trouble.what}: {trouble.kind}" for trouble in recorder.troubles if trouble.is_error)),
        "statuses": {str(status): count for status, count in sorted(Counter(r.status for r in recorder.reads).items())},
        "sent_late_percent": late_percent(recorder),
        "not_sent": len(recorder.unsent),
    }


def late_percent(recorder: Recorder, since: float = 0.0) -> float:
    """The share of due requests that this client sent late, or not at all: then it was the limit."""
    sent = [one for some in (recorder.reads, recorder.writes) for one in some if one.due >= since]
    unsent = sum(due >= since for due in recorder.unsent)
    late = sum(one.sent - one.due > LATE for one in sent) + unsent
    return round(100 * late / max(len(sent) + unsent, 1), 2)


def outside(faults: Sequence[Struck]) -> Callable[[float], bool]:
    """Whether a moment is of none of these faults: each from a second before it until all was well."""

    def is_outside(at: float) -> bool:
        return not any(fault.began - 1 <= at and (fault.end is None or at <= fault.end) for fault in faults)

    return is_outside


def timeline(recorder: Recorder, fresh: Sequence[Shown], width: float = 1.0) -> list[Bucket]:
    """All of it in stretches of *width* seconds, each request where it was due."""
    end = max((one.ended for some in (recorder.reads, recorder.writes) for one in some), default=0.0)
    count = int(end / width) + 1
    reads, writes, good, away = _empty(count), _empty(count), _empty(count), _empty(count)
    for read in recorder.reads:
        if not read.error:
            reads[int(read.due / width)].append(read.ended - read.due)
    for write in recorder.writes:
        if write.outcome is Outcome.ACKNOWLEDGED:
            writes[int(write.due / width)].append(write.ended - write.due)
    for one in fresh:
        if one.delay is not None:
            (away if one.was_away else good)[min(int(one.acknowledged / width), count - 1)].append(one.delay)
    errors = Counter(
        int(trouble.at / width) for trouble in recorder.troubles if trouble.is_error and trouble.what != "read, again"
    )
    again = Counter(int(trouble.at / width) for trouble in recorder.troubles if trouble.what == "read, again")
    return [_bucket(n, width, (reads[n], writes[n], good[n], away[n]), (errors[n], again[n])) for n in range(count)]


def _empty(count: int) -> list[list[float]]:
    return [[] for _ in range(count)]


def _bucket(number: int, width: float, measured: Sequence[list[float]], errors: tuple[int, int]) -> Bucket:
    read, write, good, away = (sorted(values) for values in measured)
    return Bucket(
        at=number * width,
        reads=len(read),
        read_p50=_ms(quantile(read, 0.5)),
        read_p99=_ms(quantile(read, 0.99)),
        writes=len(write),
        write_p50=_ms(quantile(write, 0.5)),
        write_p99=_ms(quantile(write, 0.99)),
        fresh_p50=_ms(quantile(good, 0.5)),
        fresh_p99=_ms(quantile(good, 0.99)),
        fresh_max=_ms(good[-1] if good else None),
        away_max=_ms(away[-1] if away else None),
        errors_per_second=errors[0] / width,
        errors_after_retry_per_second=errors[1] / width,
    )


def _figures(recorder: Recorder, fresh: Sequence[Shown], without: Sequence[Struck]) -> dict[str, object]:
    """Of all that was due outside the given faults."""
    counts = outside(without)
    reads = [read for read in recorder.reads if counts(read.due)]
    writes = [write for write in recorder.writes if counts(write.due)]
    delays = [one for one in fresh if counts(one.acknowledged)]
    return {
        "reads": {
            "count": len(reads),
            **spread(read.ended - read.due for read in reads if not read.error),
            "failed_first": sum(bool(read.first_error) for read in reads),
            "failed_after_retry": sum(bool(read.error) for read in reads),
            "named_a_version": sum(read.least is not None for read in reads),
            "from_the_primary": sum(read.status == 200 and not read.is_from_memory for read in reads),
        },
        "writes": {
            "count": len(writes),
            **spread(write.ended - write.due for write in writes if write.outcome is Outcome.ACKNOWLEDGED),
            **{outcome.value: sum(write.outcome is outcome for write in writes) for outcome in Outcome},
            "sent_again": sum(write.attempts > 1 for write in writes),
        },
        "freshness": {
            "count": sum(not delay.was_away for delay in delays),
            **spread(delay.delay for delay in delays if delay.delay is not None and not delay.was_away),
            "max_of_pods_that_were_away": spread(
                delay.delay for delay in delays if delay.delay is not None and delay.was_away
            )["max"],
            "not_shown": sum(delay.delay is None for delay in delays),
        },
    }


def _for_good(sights: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    """The moments somebody looked, in order, and the lowest version from each on: there may be many pods behind it."""
    ordered = sorted(sights)
    lowest = list(accumulate((version for _, version in reversed(ordered)), min))
    return [at for at, _ in ordered], lowest[::-1]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)
