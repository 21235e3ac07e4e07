"""The `ingest` section of penstock.yaml."""

from datetime import timedelta

from pydantic import Field

from penstock.kernel.config.loader import Section
from penstock.kernel.config.sections import Duration, Options, Secrets, Url

_DAY = timedelta(days=1)


class IngestRetentionSection(Section):
    """§12.2, §13: retention times. `penstock ingest gc` and the watcher delete files that are older."""

    quarantine: Duration = Field(30 * _DAY, description="Retention of duplicates and rejected files in quarantine.")
    archive: Duration = Field(30 * _DAY, description="Retention of published and obsolete files in the archive.")
    runs: Duration = Field(
        30 * _DAY, description="Retention of the files of runs. The run of the published state is never deleted."
    )
    diag: Duration = Field(7 * _DAY, description="Retention of the diagnostic files of runs, in their folder `diag`.")
    accepted_runs: Duration = Field(
        365 * _DAY, description="Time for which a published file is recognized as a duplicate if it is sent again."
    )
    state_retention_hours: float = Field(
        12,
        ge=0,
        le=1_000_000,
        description="Retention of a state in hours after another state has replaced it, so that readers can finish.",
    )


class AlertSection(Section):
    """I13: thresholds of the alerts in `penstock ingest ls`, `penstock status` and the metrics."""

    unchanged_files: int = Field(
        5, ge=1, description="Alert SAME_FILE_AGAIN: number of files in a row that are equal to the published file."
    )
    failed_runs: int = Field(3, ge=1, description="Alert REPEATED_FAIL: number of runs in a row that failed.")
    state_age: Duration = Field(
        2 * _DAY,
        description="Alert STATE_OLD: age of the published state. `max_state_age_hours` of a supplier overrides it.",
    )


class IngestSection(Section):
    """Ingest of supplier snapshot files into published states."""

    root: Url | None = Field(
        None,
        description="Location of etl_data/ and etl_ops/: a folder, or s3://bucket/prefix. If it is set, `penstock up` "
        "watches the inboxes.",
    )
    options: Options = Field(default_factory=dict, description="Settings of the bucket, e.g. region and endpoint.")
    secrets: Secrets = Field(
        default_factory=dict, description="Secret settings of the bucket, each as env:NAME or file:/path."
    )
    poll: Duration = Field(timedelta(seconds=5), description="Interval at which the watcher checks the inboxes.")
    gc: Duration = Field(timedelta(hours=1), description="Interval at which the watcher deletes expired files.")
    runs_at_once: int = Field(2, ge=1, le=64, description="Number of runs that the watcher executes concurrently.")
    retention: IngestRetentionSection = IngestRetentionSection()
    alerts: AlertSection = AlertSection()
