"""The contract of ingest with the other parts: names of suppliers, states of runs, failure and reason codes."""

from enum import StrEnum

PREFIX = "/api/v1/ingest"
SUPPLIER = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"  # a full match


class IngestRunStatus(StrEnum):
    """§10: the result of a run that ended."""

    PASS = "PASS"  # noqa: S105 - no password
    FAIL = "FAIL"


class IngestRunState(StrEnum):
    """The state of a run."""

    RUNNING = "RUNNING"
    PASS = "PASS"  # noqa: S105 - no password
    FAIL = "FAIL"


class FailureCode(StrEnum):
    """I6, I7, I20: the reasons for which a run publishes nothing."""

    FILE_MISSING = "FILE_MISSING"
    FILE_EMPTY = "FILE_EMPTY"
    FILE_UNREADABLE = "FILE_UNREADABLE"
    FILE_TOO_LARGE = "FILE_TOO_LARGE"
    FORMAT_UNKNOWN = "FORMAT_UNKNOWN"
    COLUMNS_MISSING = "COLUMNS_MISSING"
    HEADER_MISMATCH = "HEADER_MISMATCH"
    CONFIG_DQ_MISSING = "CONFIG_DQ_MISSING"
    CONFIG_INVALID = "CONFIG_INVALID"
    DQ_EMPTY_SNAPSHOT = "DQ_EMPTY_SNAPSHOT"
    DQ_TOO_FEW_FACTS = "DQ_TOO_FEW_FACTS"
    DQ_TOO_MANY_BAD_ROWS = "DQ_TOO_MANY_BAD_ROWS"
    DQ_DUPLICATE_KEYS = "DQ_DUPLICATE_KEYS"
    GUARD_ROWS_DROPPED = "GUARD_ROWS_DROPPED"
    GUARD_CATEGORIES_VANISHED = "GUARD_CATEGORIES_VANISHED"
    GUARD_KEYS_VANISHED = "GUARD_KEYS_VANISHED"
    FILE_CRASHES_RUNS = "FILE_CRASHES_RUNS"
    INTERNAL = "INTERNAL"
    SUPERSEDED = "SUPERSEDED"
    INTERRUPTED = "INTERRUPTED"


class IngestReason(StrEnum):
    """I9: the reasons for which a row is bad. The registry docs/etl/reason_codes.yaml has exactly these codes."""

    REQUIRED_MISSING = "REQUIRED_MISSING"
    NOT_INTEGER = "NOT_INTEGER"
    NOT_MONEY = "NOT_MONEY"
    NOT_DECIMAL = "NOT_DECIMAL"
    NOT_DATE = "NOT_DATE"
    NOT_IN_ENUM = "NOT_IN_ENUM"
    PATTERN_MISMATCH = "PATTERN_MISMATCH"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    TOO_LONG = "TOO_LONG"
    ROW_TOO_LONG = "ROW_TOO_LONG"
    RECORD_MALFORMED = "RECORD_MALFORMED"
    KEY_DUPLICATE = "KEY_DUPLICATE"
