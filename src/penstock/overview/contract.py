"""The public names of the overview: its paths, and the parts."""

from enum import StrEnum

PREFIX = "/api/v1"
EVENTS = "/events"
STATUS = "/status"
LAST_LIMIT = 1_000  # past moves that an event stream may start with


class Part(StrEnum):
    """The five parts."""

    TRACKING = "tracking"
    REFDATA = "refdata"
    INGEST = "ingest"
    HARVEST = "harvest"
    FLOWS = "flows"
