"""What others may know of tracking: the stages, their states, and what can be said of a row."""

from enum import StrEnum

PREFIX = "/api/v1/pipeline"
NAME_LIMIT = 255  # characters of the name of a file, or a worker
BATCH_LIMIT = 1_000  # rows in a claim, a report or a heartbeat
WAIT_LIMIT = 30  # seconds a claim waits for a row
DELAY_LIMIT = 86_400  # seconds of a lease, or until a later try


class Stage(StrEnum):
    """The way of a row, in order."""

    EVENT_INGEST = "event-ingest"
    SHARD_SPLITTER = "shard-splitter"
    SHARD_WORKER = "shard-worker"
    MYSQL_SENDER = "mysql-sender"

    @property
    def field(self) -> str:
        """Its name where a hyphen cannot be: in columns and in the summary."""
        return self.value.replace("-", "_")

    @property
    def before(self) -> "Stage | None":
        """The stage that must be done first."""
        stages = list(Stage)
        return stages[stages.index(self) - 1] if self is not stages[0] else None


class StageStatus(StrEnum):
    """Where a row stands in one stage."""

    NEW = "new"
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


class StageReportKind(StrEnum):
    """T13: how a worker ends what it claimed."""

    DONE = "done"
    FAILED = "failed"
    RETRY = "retry"  # try again, later; counts as an attempt
    RELEASE = "release"  # not begun, or not its own fault: hand it out again as if never claimed


class StageReportAnswer(StrEnum):
    """T13: what became of one report."""

    SETTLED = "settled"
    UNCHANGED = "unchanged"  # said before, and believed then
    SUPERSEDED = "superseded"  # the row is no longer held under that fence
    UNKNOWN = "unknown"  # there is no such row
