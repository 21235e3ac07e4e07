"""The migrations of each database."""

from penstock.kernel.db import migrate
from penstock.settings import Settings


def list_platform_migrations(settings: Settings) -> list[migrate.Migration]:
    """Return every migration of the platform's database, the kernel's first."""
    own = {"tracking": settings.tracking.database, "refdata": settings.refdata.postgres}
    shared = [part for part in ("tracking", "refdata", "ingest", "harvest", "flows") if own.get(part) is None]
    return _list_migrations("kernel", *shared)


def list_tracking_migrations() -> list[migrate.Migration]:
    """Return the migrations of a separate database of tracking: those of tracking and of the kernel."""
    return _list_migrations("kernel", "tracking")


def list_refdata_migrations() -> list[migrate.Migration]:
    """Return the migrations of a separate database of refdata: those of refdata and of the kernel."""
    return _list_migrations("kernel", "refdata")


def _list_migrations(*packages: str) -> list[migrate.Migration]:
    return [migration for package in packages for migration in migrate.load(f"penstock.{package}")]
