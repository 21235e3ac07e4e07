"""The public names and limits of flows: statuses of runs and steps, reports of workers, folders of artifacts."""

from enum import StrEnum

PREFIX = "/api/v1"
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"  # of runs, flows, steps and kinds; safe in a path
CODE = r"^[A-Z][A-Z0-9_]{0,63}$"
STEP_LIMIT = 20_000  # steps of one run, including the items of maps
BATCH_LIMIT = 1_000  # steps in a claim, a heartbeat or a batch of reports
DOCUMENT_LIMIT = 256_000  # bytes of a step's outputs, or of its error's details, as JSON
SCOPE_LIMIT = 64_000  # bytes of a run's scope: every claimed step contains it
WAIT_LIMIT = 30  # seconds a claim waits for a step
LEASE_LIMIT = 86_400  # seconds
LOG_LIMIT = 1_000  # lines in one report of logs
LOG_LINES = 10_000  # stored lines of one step
ARTIFACT_LIMIT = 1_000  # artifacts of one step
ARTIFACT_NAME_LIMIT = 200  # characters
DEPTH_LIMIT = 8  # levels of flows within flows

MAP = "map"  # MAP and FLOW are executed by the engine: no worker can claim them
FLOW = "flow"
ENGINE_KINDS = frozenset({MAP, FLOW})
CHART_EXPORT = "CHART_EXPORT"
# F12 fixes the folder of charts. It is defined here because remote workers build artifact paths without the engine.
ARTIFACT_FOLDERS = {CHART_EXPORT: "charts"}
MUTABLE_OUTPUTS = frozenset({"signed_url", "expires_at"})  # F5: a repeated report may change these


class FlowRunStatus(StrEnum):
    """F1: the status of a run."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class StepStatus(StrEnum):
    """F1: the status of a step."""

    PENDING = "PENDING"
    READY = "READY"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"
    CANCELLED = "CANCELLED"


class StepReportKind(StrEnum):
    """F5: the outcome that a worker reports. READY is missing: only the engine sets it."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"  # the worker stopped because the run was cancelled
    RELEASED = "RELEASED"  # not executed: another worker may claim the step, and the attempt is not counted


class StepReportAnswer(StrEnum):
    """F4, F5: the result of one report."""

    SETTLED = "settled"
    UNCHANGED = "unchanged"  # a repetition of the report that was accepted
    CONFLICT = "conflict"  # a different report was accepted under this fence
    SUPERSEDED = "superseded"  # the fence is old: the worker has lost the step
    UNKNOWN = "unknown"  # the step does not exist


class HeartbeatState(StrEnum):
    """F9: the result of a heartbeat for one step."""

    EXTENDED = "extended"
    CANCELLED = "cancelled"  # the worker must stop, and report CANCELLED
    LOST = "lost"  # the lease expired, or the step has ended


def make_artifact_folder(kind: str, run_id: str, step_id: str) -> str:
    """F6: return the folder of a step's published artifacts; it depends on the kind, the run and the step only."""
    return f"{ARTIFACT_FOLDERS.get(kind, 'runs')}/{run_id}/{step_id}"


def attempt_folder(run_id: str, step_id: str, fence: int) -> str:
    """F6: return the folder of an attempt's artifacts; they are published when its report is accepted."""
    return f"attempts/{run_id}/{step_id}/{fence}"
