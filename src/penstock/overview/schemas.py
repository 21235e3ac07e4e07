"""The schemas of the overview's responses."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from penstock.kernel.http.schemas import MoveSchema
from penstock.kernel.status import IssueSeverity
from penstock.overview.contract import Part


class _OverviewModel(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class OverviewEvent(MoveSchema):
    """A move of one subject of a part."""

    part: Part = Field(description="The part that the subject belongs to.")
    machine: str = Field(description="The state machine, e.g. `flows.run`.")
    subject: str = Field(description="The identifier of what moved, e.g. a run or a dictionary.")


class IssueView(_OverviewModel):
    """A problem that an operator should look at."""

    severity: IssueSeverity = Field(description="BROKEN needs an operator; LATE may end without one.")
    subject: str = Field(description="The identifier of what has the problem.")
    problem: str = Field(description="The problem in words.")
    hint: str | None = Field(description="The next step, usually a command.")
    since: datetime | None = Field(description="When the problem started, if known.")


class PartStatus(_OverviewModel):
    """The status of one part."""

    part: str = Field(description="The name of the part, or `platform` or `disks`.")
    summary: str = Field(description="The state of the part in one line.")
    issues: list[IssueView] = Field(description="What is late or broken in the part.")


class StatusReport(_OverviewModel):
    """The status of all parts, with everything that is late or broken."""

    status: str = Field(description="The worst severity of all issues, BROKEN or LATE; OK if there is no issue.")
    at: datetime = Field(description="When the report was made.")
    version: str = Field(description="The version of the server.")
    parts: list[PartStatus] = Field(description="The status of each part.")
