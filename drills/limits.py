"""What is promised of the load itself: answers, and a client that could keep up."""

from drills.checker import Finding
from drills.figures import late_percent, outside
from drills.recorder import Outcome, Recorder

FAILED_AT_MOST = 0.1  # percent of requests
ACKNOWLEDGED_AT_LEAST = 99.0  # percent of writes
LATE_AT_MOST = 10.0  # percent of requests: above it, the client is the limit


def judge_load(recorder: Recorder) -> list[Finding]:
    """Where nothing was broken and no limit was sought, readers and writers get answers."""
    return [_reads(recorder), _acknowledged(recorder), _kept_up(recorder)]


def judge_calm(recorder: Recorder) -> list[Finding]:
    """Where something was broken, all is well before and after, and every write gets through."""
    return [_calm(recorder), _acknowledged(recorder), _kept_up(recorder)]


def _reads(recorder: Recorder) -> Finding:
    failed = sum(bool(read.error) for read in recorder.reads) + len(recorder.unsent)
    percent = _percent(failed, len(recorder.reads) + len(recorder.unsent))
    detail = f"{percent:.2f} % of the reads failed, after one retry"
    return Finding(f"at most {FAILED_AT_MOST:g} % of the reads fail", percent <= FAILED_AT_MOST, detail)


def _calm(recorder: Recorder) -> Finding:
    is_calm = outside(recorder.faults)
    failed = sum(trouble.is_error and is_calm(trouble.at) for trouble in recorder.troubles)
    percent = _percent(failed, sum(is_calm(one.due) for some in (recorder.reads, recorder.writes) for one in some))
    detail = f"{percent:.2f} %, {failed:,} errors"
    promise = f"outside faults at most {FAILED_AT_MOST:g} % of the requests fail"
    return Finding(promise, percent <= FAILED_AT_MOST, detail)


def _acknowledged(recorder: Recorder) -> Finding:
    got = sum(write.outcome is Outcome.ACKNOWLEDGED for write in recorder.writes)
    percent = _percent(got, len(recorder.writes)) if recorder.writes else 100.0
    detail = f"{percent:.2f} % of {len(recorder.writes):,} writes"
    promise = f"at least {ACKNOWLEDGED_AT_LEAST:g} % of the writes are acknowledged"
    return Finding(promise, percent >= ACKNOWLEDGED_AT_LEAST, detail)


def _kept_up(recorder: Recorder) -> Finding:
    percent = late_percent(recorder)
    is_held = percent <= LATE_AT_MOST
    detail = f"{percent:g} % were sent late" + ("" if is_held else ": the client was the limit")
    return Finding(f"the client sends at most {LATE_AT_MOST:g} % late", is_held, detail)


def _percent(part: int, whole: int) -> float:
    return 100 * part / max(whole, 1)
