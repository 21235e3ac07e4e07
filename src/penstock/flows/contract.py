"""What others may know of flows: the states of runs and steps, what a worker says, and where artifacts are."""

from enum import StrEnum

PREFIX = "/api/v1"
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"  # of runs, flows, steps and kinds; safe in a path
CODE = r"^[A-Z][A-Z0-9_]{0,63}$"
STEP_LIMIT = 20_000  # steps of one run, items of maps among them
BATCH_LIMIT = 1_000  # steps in a claim, a heartbeat or a batch of reports
DOCUMENT_LIMIT = 256_000  # bytes of a step's outputs, or of its error's details, as JSON
SCOPE_LIMIT = 64_000  # bytes of a run's scope: it is handed out with every step
WAIT_LIMIT = 30  # seconds a claim waits for a step
LEASE_LIMIT = 86_400  # seconds
LOG_LIMIT = 1_000  # lines in one report of logs
LOG_LINES = 10_000  # lines that are kept of one step
ARTIFACT_LIMIT = 1_000  # artifacts of one step
ARTIFACT_NAME_LIMIT = 200  # characters
DEPTH_LIMIT = 8  # flows within flows

MAP = "map"  # kinds the engine runs itself: no worker is handed them
FLOW = "flow"
ENGINE_KINDS = frozenset({MAP, FLOW})
CHART_EXPORT = "CHART_EXPORT"
# F12 fixes the folder of charts; here, because a remote worker names its artifacts without the engine.
ARTIFACT_FOLDERS = {CHART_EXPORT: "charts"}
LATE_OUTPUTS = frozenset({"signed_url", "expires_at"})  # may change after a step has ended


class FlowRunStatus(StrEnum):
    """F1: where a run stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class StepStatus(StrEnum):
    """F1: where a step stands."""

    PENDING = "PENDING"
    READY = "READY"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"
    CANCELLED = "CANCELLED"


class StepReportKind(StrEnum):
    """F5: how a worker ends a step. READY is not among them: only advance says that."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"  # it was told to stop, and did
    RELEASED = "RELEASED"  # not begun, or the worker is going: hand it out again as if never claimed


class StepReportAnswer(StrEnum):
    """F4, F5: what became of one report."""

    SETTLED = "settled"
    UNCHANGED = "unchanged"  # said before, and believed then
    CONFLICT = "conflict"  # the step ended otherwise under this fence
    SUPERSEDED = "superseded"  # the step is no longer held under that fence
    UNKNOWN = "unknown"  # there is no such step


class RunHold(StrEnum):
    """F9: what a heartbeat is answered with, for each step."""

    HELD = "held"
    CANCELLED = "cancelled"  # still held, and to be stopped
    LOST = "lost"  # somebody else's by now, or ended


def artifact_folder(kind: str, run_id: str, step_id: str) -> str:
    """F6: where the artifacts of a step are; nothing but the run and the step decides it."""
    return f"{ARTIFACT_FOLDERS.get(kind, 'runs')}/{run_id}/{step_id}"


def attempt_folder(run_id: str, step_id: str, fence: int) -> str:
    """F6: where an attempt writes, until it is known to be the one that counts."""
    return f"attempts/{run_id}/{step_id}/{fence}"
