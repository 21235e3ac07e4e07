"""Settings of the section `tracking`."""

from datetime import timedelta
from typing import Annotated

from pydantic import Field, field_validator

from penstock.kernel.config.loader import Section
from penstock.kernel.config.sections import EMBEDDED, DatabaseSection, Duration


class TrackingSection(Section):
    """Tracking of files and shards through the pipeline."""

    database: DatabaseSection | None = Field(
        None,
        description="T10: separate database for tracking, e.g. pipeline_db. Default: the database of the platform.",
    )
    lease: Annotated[Duration, Field(ge=timedelta(seconds=1), le=timedelta(days=1))] = Field(
        timedelta(seconds=60), description="Duration of a lease if the claim does not set `lease_seconds`."
    )
    max_attempts: int = Field(
        5, ge=1, le=1000, description="Number of claims that may end without success before a row fails for good."
    )

    @field_validator("database")
    @classmethod
    def _is_separate(cls, database: DatabaseSection | None) -> DatabaseSection | None:
        if database is not None and database.url == EMBEDDED:
            raise ValueError(
                "tracking.database needs the url of a PostgreSQL database; remove it to use the platform's database"
            )
        return database
