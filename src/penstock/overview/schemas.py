"""What the API tells of all parts."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from penstock.kernel.findings import Severity
from penstock.kernel.http.schemas import Moved
from penstock.overview.contract import Part


class _Told(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class Event(Moved):
    """One move of one subject."""

    part: Part
    machine: str
    subject: str


class Finding(_Told):
    """What somebody should look at."""

    severity: Severity
    subject: str
    what: str
    hint: str | None = Field(description="What to do about it.")
    since: datetime | None


class PartStatus(_Told):
    """How one part stands."""

    part: str
    summary: str
    findings: list[Finding]


class Status(_Told):
    """What is late or broken, in all parts; `status` is the worst of it."""

    status: str = Field(description="OK, LATE or BROKEN.")
    at: datetime
    version: str
    parts: list[PartStatus]
