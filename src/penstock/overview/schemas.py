"""What the API tells of all parts."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from penstock.kernel.http.schemas import MoveSchema
from penstock.kernel.status import IssueSeverity
from penstock.overview.contract import Part


class _OverviewModel(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class OverviewEvent(MoveSchema):
    """One move of one subject."""

    part: Part
    machine: str
    subject: str


class IssueView(_OverviewModel):
    """What somebody should look at."""

    severity: IssueSeverity
    subject: str
    problem: str
    hint: str | None = Field(description="What to do about it.")
    since: datetime | None


class PartStatus(_OverviewModel):
    """How one part stands."""

    part: str
    summary: str
    issues: list[IssueView]


class StatusReport(_OverviewModel):
    """What is late or broken, in all parts; `status` is the worst of it."""

    status: str = Field(description="OK, LATE or BROKEN.")
    at: datetime
    version: str
    parts: list[PartStatus]
