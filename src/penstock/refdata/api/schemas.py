"""R6, R7: what the API answers."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from pydantic import Field

from penstock.kernel.http.schemas import Camel, CamelBody
from penstock.refdata.contract import UpdateState


class ConsistencyMode(StrEnum):
    """R6: whether a write answers at once, or when it is committed."""

    ASYNC = "ASYNC"
    WAIT_COMMIT = "WAIT_COMMIT"


class CommandAccepted(Camel):
    """202: taken in; where to ask how it stands."""

    event_id: UUID
    status: UpdateState
    status_url: str


class CommandCommitted(Camel):
    """200: committed, under the version a reader may now ask for."""

    event_id: UUID
    committed_version: int


class UpdateView(Camel):
    """How an update stands."""

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
    """Updates under way or failed, the latest first."""

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
    """One version of a dictionary, and what made it. `keys` are told when they are few."""

    version: int
    event_id: UUID
    event_type: str
    source: str
    source_revision: int | None = None
    items: int
    keys: list[str] | None = None
    committed_at: datetime


class VersionHistory(Camel):
    """The versions of a dictionary, the latest first."""

    tenant_id: str
    dict_code: str
    versions: list[DictionaryVersion]
    next: str | None


class RetainedVersionView(Camel):
    """R30: a version that can be pinned or gone back to."""

    version: int
    items: int
    retained_at: datetime
    is_pinned: bool


class RetainedVersionList(Camel):
    """The versions of a dictionary that are kept, the latest first."""

    tenant_id: str
    dict_code: str
    versions: list[RetainedVersionView]


class VersionChoice(CamelBody):
    """Which version is meant."""

    version: Annotated[int, Field(ge=0, le=2**63 - 1)]
