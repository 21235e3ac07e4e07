"""Statistics of a recording: percentiles, freshness, and a timeline."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from drills.load import LATE
from drills.recorder import InjectedFault, Outcome, Recorder

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class FreshnessSample:
    """The time from the acknowledgement of a version until a pod returned it and no lower version later."""

    version: int
    pod: int
    acknowledged: float
    delay: float | None  # None: not before the end of the drill
    was_unavailable: bool  # the pod failed to answer in the meantime


@dataclass(frozen=True)
class Bucket:
    """The statistics of an interval; durations in ms, None without a measurement."""

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
    unavailable_max: float | None
    errors_per_second: float  # requests of readers and writers that failed
    errors_after_retry_per_second: float  # reads that failed twice


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """Return p50, p95, p99 and the maximum of *values* in ms; *values* are in seconds."""
    ordered = sorted(values)
    percentiles: dict[str, float | None] = {name: _ms(quantile(ordered, part)) for name, part in QUANTILES.items()}
    return {**percentiles, "max": _ms(ordered[-1] if ordered else None)}


def quantile(ordered: Sequence[float], part: float) -> float | None:
    """Return the quantile *part* of *ordered* values."""
    if not ordered:
        return None
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def measure_freshness(recorder: Recorder) -> list[FreshnessSample]:
    """Return the freshness in every pod of each write whose first attempt was acknowledged."""
    acknowledged = [(w.version, w.ended) for w in recorder.writes if w.version is not None and w.attempts == 1]
    samples = []
    for pod, observations in enumerate(recorder.observations):
        times, lowest = _final_versions(observations)
        outages = sorted(recorder.outages[pod])  # disjoint, because a poll waits for its response
        outage_ends = [until for _, until in outages]
        for version, at in acknowledged:
            index = bisect_left(lowest, version)
            delay = max(times[index] - at, 0.0) if index < len(times) else None
            end = times[index] if index < len(times) else float("inf")
            next_outage = bisect_left(outage_ends, at)
            was_unavailable = next_outage < len(outages) and outages[next_outage][0] <= end
            samples.append(FreshnessSample(version, pod, at, delay, was_unavailable))
    return samples


def summarize_figures(recorder: Recorder, fresh: Sequence[FreshnessSample]) -> dict[str, object]:
    """Return the figures of the whole drill and, if there were faults, of the time outside faults."""
    whole = _figures(recorder, fresh, ())
    outside = _figures(recorder, fresh, recorder.faults) if recorder.faults else None
    return {
        **whole,
        "outside_faults": outside,
        "errors": dict(
            Counter(f"{incident.what}: {incident.kind}" for incident in recorder.incidents if incident.is_error)
        ),
        "statuses": {str(status): count for status, count in sorted(Counter(r.status for r in recorder.reads).items())},
        "sent_late_percent": late_percent(recorder),
        "not_sent": len(recorder.unsent),
    }


def late_percent(recorder: Recorder, since: float = 0.0) -> float:
    """Return the percentage of requests that the client sent late or not at all; a high value means a slow client."""
    sent = [request for request in recorder.requests if request.due >= since]
    unsent = sum(due >= since for due in recorder.unsent)
    late = sum(request.sent - request.due > LATE for request in sent) + unsent
    return round(100 * late / max(len(sent) + unsent, 1), 2)


def outside_faults(faults: Sequence[InjectedFault]) -> Callable[[float], bool]:
    """Return a predicate for times outside *faults*, each of which lasts from one second before it until recovery."""

    def is_outside(at: float) -> bool:
        return not any(fault.started_at - 1 <= at and (fault.end is None or at <= fault.end) for fault in faults)

    return is_outside


def make_timeline(recorder: Recorder, fresh: Sequence[FreshnessSample], width: float = 1.0) -> list[Bucket]:
    """Return the statistics of intervals of *width* seconds; a request belongs to the interval of its due time."""
    end = max((request.ended for request in recorder.requests), default=0.0)
    count = int(end / width) + 1
    reads, writes, available, outages = _empty(count), _empty(count), _empty(count), _empty(count)
    for read in recorder.reads:
        if not read.error:
            reads[int(read.due / width)].append(read.ended - read.due)
    for write in recorder.writes:
        if write.outcome is Outcome.ACKNOWLEDGED:
            writes[int(write.due / width)].append(write.ended - write.due)
    for sample in fresh:
        if sample.delay is not None:
            delays = outages if sample.was_unavailable else available
            delays[min(int(sample.acknowledged / width), count - 1)].append(sample.delay)
    errors = Counter(
        int(incident.at / width)
        for incident in recorder.incidents
        if incident.is_error and incident.what != "retried read"
    )
    retries = Counter(int(incident.at / width) for incident in recorder.incidents if incident.what == "retried read")
    return [
        _bucket(n, width, (reads[n], writes[n], available[n], outages[n]), (errors[n], retries[n]))
        for n in range(count)
    ]


def _empty(count: int) -> list[list[float]]:
    return [[] for _ in range(count)]


def _bucket(number: int, width: float, measured: Sequence[list[float]], errors: tuple[int, int]) -> Bucket:
    read, write, available, outages = (sorted(values) for values in measured)
    return Bucket(
        at=number * width,
        reads=len(read),
        read_p50=_ms(quantile(read, 0.5)),
        read_p99=_ms(quantile(read, 0.99)),
        writes=len(write),
        write_p50=_ms(quantile(write, 0.5)),
        write_p99=_ms(quantile(write, 0.99)),
        fresh_p50=_ms(quantile(available, 0.5)),
        fresh_p99=_ms(quantile(available, 0.99)),
        fresh_max=_ms(available[-1] if available else None),
        unavailable_max=_ms(outages[-1] if outages else None),
        errors_per_second=errors[0] / width,
        errors_after_retry_per_second=errors[1] / width,
    )


def _figures(
    recorder: Recorder, fresh: Sequence[FreshnessSample], excluded: Sequence[InjectedFault]
) -> dict[str, object]:
    """Return the figures of the requests that were due outside the *excluded* faults."""
    is_counted = outside_faults(excluded)
    reads = [read for read in recorder.reads if is_counted(read.due)]
    writes = [write for write in recorder.writes if is_counted(write.due)]
    samples = [sample for sample in fresh if is_counted(sample.acknowledged)]
    return {
        "reads": {
            "count": len(reads),
            **spread(read.ended - read.due for read in reads if not read.error),
            "failed_first": sum(bool(read.first_error) for read in reads),
            "failed_after_retry": sum(bool(read.error) for read in reads),
            "with_version": sum(read.min_version is not None for read in reads),
            "from_primary": sum(read.status == 200 and not read.is_from_memory for read in reads),
        },
        "writes": {
            "count": len(writes),
            **spread(write.ended - write.due for write in writes if write.outcome is Outcome.ACKNOWLEDGED),
            **{outcome.value: sum(write.outcome is outcome for write in writes) for outcome in Outcome},
            "retried": sum(write.attempts > 1 for write in writes),
        },
        "freshness": {
            "count": sum(not sample.was_unavailable for sample in samples),
            **spread(sample.delay for sample in samples if sample.delay is not None and not sample.was_unavailable),
            "max_of_unavailable_pods": spread(
                sample.delay for sample in samples if sample.delay is not None and sample.was_unavailable
            )["max"],
            "not_visible": sum(sample.delay is None for sample in samples),
        },
    }


def _final_versions(observations: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    """Return the times of the observations in order, and the lowest version from each time on.

    The lowest version counts, because an address can be a load balancer of many pods.
    """
    ordered = sorted(observations)
    lowest = list(accumulate((version for _, version in reversed(ordered)), min))
    return [at for at, _ in ordered], lowest[::-1]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)
