"""The `ingest` section of penstock.yaml."""

from datetime import timedelta

from pydantic import Field

from penstock.kernel.config.loader import Section
from penstock.kernel.config.sections import Duration, Options, Secrets, Url

_DAY = timedelta(days=1)


class IngestRetentionSection(Section):
    """§12.2, §13: how long things are kept."""

    quarantine: Duration = Field(30 * _DAY, description="Duplicates and broken files.")
    archive: Duration = Field(30 * _DAY, description="Files that were published, and obsolete ones.")
    runs: Duration = Field(30 * _DAY, description="What runs left behind; that of the current state stays.")
    diag: Duration = Field(7 * _DAY, description="What only helps to find out what happened.")
    accepted_runs: Duration = Field(365 * _DAY, description="How long a file that was accepted is known again.")
    state_retention_hours: float = Field(
        12, ge=0, le=1_000_000, description="How long a state stays after another became current."
    )


class AlertSection(Section):
    """I13: from when on somebody should look."""

    equal_shas: int = Field(5, ge=1, description="The same file so many times in a row.")
    fails: int = Field(3, ge=1, description="So many runs failed in a row.")
    state_age: Duration = Field(2 * _DAY, description="The current state is older, unless its supplier says otherwise.")


class IngestSection(Section):
    """Ingest: supplier snapshot files in, published state out."""

    root: Url | None = Field(
        None,
        description="Where etl_data/ and etl_ops/ are: a folder, or s3://bucket/prefix. With it inboxes are watched.",
    )
    options: Options = Field(default_factory=dict, description="The bucket's own settings, e.g. region, endpoint")
    secrets: Secrets = Field(default_factory=dict, description="Its secret settings, by reference")
    poll: Duration = Field(timedelta(seconds=5), description="How often the watcher looks into the inboxes.")
    gc: Duration = Field(timedelta(hours=1), description="How often the watcher removes what is too old.")
    runs_at_once: int = Field(2, ge=1, le=64, description="How many suppliers the watcher serves at the same time.")
    retention: IngestRetentionSection = IngestRetentionSection()
    alerts: AlertSection = AlertSection()
