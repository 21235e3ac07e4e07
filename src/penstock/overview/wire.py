"""What the API tells of all parts."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from penstock.kernel.findings import Severity
from penstock.kernel.wire import From, To
from penstock.overview.contract import Part


class _Told(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class Event(_Told):
    """One move of one subject: who, when, why."""

    part: Part
    machine: str
    subject: str
    source: From
    target: To
    actor: str
    at: datetime
    reason: str | None
    fence: int | None


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
