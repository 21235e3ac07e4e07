"""The guarantees about the load itself: requests are answered, and the client was fast enough."""

from drills.checker import GuaranteeResult
from drills.figures import late_percent, outside_faults
from drills.recorder import Outcome, Recorder

MAX_FAILED = 0.1  # percent of requests
MIN_ACKNOWLEDGED = 99.0  # percent of writes
MAX_LATE = 10.0  # percent of requests: above it, the client is the limit


def judge_load(recorder: Recorder) -> list[GuaranteeResult]:
    """Judge a load without faults at a constant rate."""
    return [_judge_reads(recorder), _judge_acknowledged(recorder), _judge_client(recorder)]


def judge_failover(recorder: Recorder) -> list[GuaranteeResult]:
    """Judge a load with faults: outside faults requests succeed, and every write is acknowledged."""
    return [_judge_outside_faults(recorder), _judge_acknowledged(recorder), _judge_client(recorder)]


def _judge_reads(recorder: Recorder) -> GuaranteeResult:
    failed = sum(bool(read.error) for read in recorder.reads) + len(recorder.unsent)
    percent = _percent(failed, len(recorder.reads) + len(recorder.unsent))
    detail = f"{percent:.2f} % of the reads failed, after one retry"
    return GuaranteeResult(f"at most {MAX_FAILED:g} % of the reads fail", percent <= MAX_FAILED, detail)


def _judge_outside_faults(recorder: Recorder) -> GuaranteeResult:
    is_outside = outside_faults(recorder.faults)
    failed = sum(incident.is_error and is_outside(incident.at) for incident in recorder.incidents)
    percent = _percent(failed, sum(is_outside(request.due) for request in recorder.requests))
    detail = f"{percent:.2f} %, {failed:,} errors"
    guarantee = f"outside faults at most {MAX_FAILED:g} % of the requests fail"
    return GuaranteeResult(guarantee, percent <= MAX_FAILED, detail)


def _judge_acknowledged(recorder: Recorder) -> GuaranteeResult:
    count = sum(write.outcome is Outcome.ACKNOWLEDGED for write in recorder.writes)
    percent = _percent(count, len(recorder.writes)) if recorder.writes else 100.0
    detail = f"{percent:.2f} % of {len(recorder.writes):,} writes"
    guarantee = f"at least {MIN_ACKNOWLEDGED:g} % of the writes are acknowledged"
    return GuaranteeResult(guarantee, percent >= MIN_ACKNOWLEDGED, detail)


def _judge_client(recorder: Recorder) -> GuaranteeResult:
    percent = late_percent(recorder)
    is_kept = percent <= MAX_LATE
    detail = f"{percent:g} % were sent late" + ("" if is_kept else ": the client was the limit")
    return GuaranteeResult(f"the client sends at most {MAX_LATE:g} % late", is_kept, detail)


def _percent(part: int, whole: int) -> float:
    return 100 * part / max(whole, 1)
