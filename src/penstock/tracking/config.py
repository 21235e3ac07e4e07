"""The section `tracking` of the configuration."""

from datetime import timedelta
from typing import Annotated

from pydantic import Field, field_validator

from penstock.kernel.config.loader import Section
from penstock.kernel.config.sections import EMBEDDED, DatabaseSection, Duration


class TrackingSection(Section):
    """Where each file and shard stands."""

    database: DatabaseSection | None = Field(
        None, description="T10: a database of its own, e.g. pipeline_db; without one it uses the platform's."
    )
    lease: Annotated[Duration, Field(ge=timedelta(seconds=1), le=timedelta(days=1))] = Field(
        timedelta(seconds=60), description="How long a claim holds a row when it does not say."
    )
    max_attempts: int = Field(5, ge=1, le=1000, description="After so many claims without an end a row has failed.")

    @field_validator("database")
    @classmethod
    def _is_elsewhere(cls, database: DatabaseSection | None) -> DatabaseSection | None:
        if database is not None and database.url == EMBEDDED:
            raise ValueError("leave tracking.database out to use the platform's database, or give its own url")
        return database
