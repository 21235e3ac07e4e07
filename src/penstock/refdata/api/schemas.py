"""R6, R7, R30: the bodies of the command API."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from pydantic import Field

from penstock.kernel.http.schemas import Camel, CamelBody
from penstock.refdata.contract import UpdateState


class ConsistencyMode(StrEnum):
    """R6: the time of the response to a command: immediately (ASYNC), or after the commit (WAIT_COMMIT)."""

    ASYNC = "ASYNC"
    WAIT_COMMIT = "WAIT_COMMIT"


class CommandAccepted(Camel):
    """202: the command was accepted; `statusUrl` is the address of its update."""

    event_id: UUID
    status: UpdateState
    status_url: str


class CommandCommitted(Camel):
    """200: the command was committed; readers can request `committedVersion` with X-Min-Version."""

    event_id: UUID
    committed_version: int


class UpdateView(Camel):
    """An update: the state of a command."""

    event_id: UUID
    tenant_id: str
    dict_code: str
    status: UpdateState
    committed_version: int | None = None
    error: str | None = None
    error_code: str | None = None
    created_at: datetime
    updated_at: datetime


class UpdatePage(Camel):
    """A page of pending or failed updates, latest first."""

    updates: list[UpdateView]
    next: str | None


class DictionaryView(Camel):
    """A dictionary of a tenant and its last committed version."""

    dict_code: str
    version: int = Field(description="Last committed version; 0 before the first commit.")
    committed_at: datetime | None
    pinned_version: int | None = Field(description="Version that readers get instead of the last one; null if none.")


class DictionaryList(Camel):
    tenant_id: str
    dictionaries: list[DictionaryView]


class DictionaryVersion(Camel):
    """A version of a dictionary and the command that made it; `keys` are the changed keys if they are few."""

    version: int
    event_id: UUID
    event_type: str
    source: str
    source_revision: int | None = None
    items: int
    keys: list[str] | None = None
    committed_at: datetime


class VersionHistory(Camel):
    """A page of the versions of a dictionary, latest first."""

    tenant_id: str
    dict_code: str
    versions: list[DictionaryVersion]
    next: str | None


class RetainedVersionView(Camel):
    """R30: a version that can be pinned or restored."""

    version: int
    items: int
    retained_at: datetime
    is_pinned: bool


class RetainedVersionList(Camel):
    """The retained versions of a dictionary, latest first."""

    tenant_id: str
    dict_code: str
    versions: list[RetainedVersionView]


class VersionChoice(CamelBody):
    """A version of a dictionary."""

    version: Annotated[int, Field(ge=0, le=2**63 - 1)]
