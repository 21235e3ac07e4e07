"""What others may know of the overview: the parts, and where they are asked for together."""

from enum import StrEnum

PREFIX = "/api/v1"
EVENTS = "/events"
STATUS = "/status"
LAST_LIMIT = 1_000  # moves already made that a stream may begin with


class Part(StrEnum):
    """The five parts."""

    TRACKING = "tracking"
    REFDATA = "refdata"
    INGEST = "ingest"
    HARVEST = "harvest"
    FLOWS = "flows"
