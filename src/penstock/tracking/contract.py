"""The names that other parts may use: stages, statuses, outcomes of work, and limits of the API."""

from enum import StrEnum

PREFIX = "/api/v1/pipeline"
NAME_LIMIT = 255  # characters in the name of a file or a worker
BATCH_LIMIT = 1_000  # rows in one claim, report or heartbeat
WAIT_LIMIT = 30  # seconds a claim waits for a row
DELAY_LIMIT = 86_400  # seconds of a lease, or until the next attempt


class Stage(StrEnum):
    """The stages of a row, in order."""

    EVENT_INGEST = "event-ingest"
    SHARD_SPLITTER = "shard-splitter"
    SHARD_WORKER = "shard-worker"
    MYSQL_SENDER = "mysql-sender"

    @property
    def field(self) -> str:
        """Return the name with underscores, for columns and JSON fields."""
        return self.value.replace("-", "_")

    @property
    def before(self) -> "Stage | None":
        """Return the previous stage, which must be done first; None for the first stage."""
        stages = list(Stage)
        return stages[stages.index(self) - 1] if self is not stages[0] else None


class StageStatus(StrEnum):
    """The status of a row in one stage."""

    NEW = "new"
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


class StageReportKind(StrEnum):
    """T13: the outcome that a worker reports for a claimed row."""

    DONE = "done"
    FAILED = "failed"
    RETRY = "retry"  # try again later; counts as an attempt
    RELEASE = "release"  # return the row to the queue unprocessed; costs no attempt


class StageReportAnswer(StrEnum):
    """T13: the answer of the server to one report."""

    SETTLED = "settled"
    UNCHANGED = "unchanged"  # a repeated report, accepted before
    SUPERSEDED = "superseded"  # the row has another fence now, or was settled differently
    UNKNOWN = "unknown"  # the row does not exist
