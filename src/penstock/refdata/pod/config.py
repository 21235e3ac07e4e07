"""The settings that the processes of a pod need; the loader passes them to the serving processes as JSON."""

from pathlib import Path

from penstock.kernel.config.loader import Section
from penstock.kernel.config.sections import Duration
from penstock.kernel.http.auth import AuthSection
from penstock.kernel.telemetry.telemetry import LogFormat
from penstock.refdata.config import RefdataSection

_MISSED_RECONCILIATIONS = 3  # after which the primary counts as lost


class PodConfig(Section):
    """The refdata section, and what the pod needs of the other sections."""

    refdata: RefdataSection
    auth: AuthSection
    data_dir: Path
    host: str
    drain_timeout: Duration
    log_level: str
    log_format: LogFormat

    @property
    def stale_after(self) -> float:
        """Return the seconds without contact to the primary after which responses contain X-Data-Age."""
        return self.refdata.query.reconcile_every.total_seconds() * _MISSED_RECONCILIATIONS + 1

    @property
    def drain_seconds(self) -> float:
        """Return the seconds that a stop waits for requests."""
        return self.drain_timeout.total_seconds()
