"""Which migrations belong to which database."""

from penstock.kernel.db import migrate
from penstock.settings import Settings


def known_migrations(settings: Settings) -> list[migrate.Migration]:
    """Return every migration of the platform's database, the kernel's first."""
    own = {"tracking": settings.tracking.database, "refdata": settings.refdata.postgres}
    shared = [part for part in ("tracking", "refdata", "ingest", "harvest", "flows") if own.get(part) is None]
    return _migrations("kernel", *shared)


def tracking_migrations() -> list[migrate.Migration]:
    """Return what the pipeline's database needs: its tables, and the kernel's for their history."""
    return _migrations("kernel", "tracking")


def refdata_migrations() -> list[migrate.Migration]:
    """Return what a database of refdata's own needs: its tables, and the kernel's for their history and the bus."""
    return _migrations("kernel", "refdata")


def _migrations(*packages: str) -> list[migrate.Migration]:
    return [migration for package in packages for migration in migrate.load(f"penstock.{package}")]
