"""`penstock db`: migrations of the database schema."""

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import ConfigOption, DataDirOption, JsonOption, TimeoutOption
from penstock.cli.terminal.output import emit, print_message

if TYPE_CHECKING:
    from penstock.settings import Settings

_CHECK_TIMEOUT = 10.0  # seconds of the first check, however short the wait
app = CommandGroup(help="Manage the database schema.")


@app.command()
def migrate(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the pending migrations; change nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Migrate the schema of all databases to this release. Several processes can do it at the same time."""
    import asyncio

    from penstock.app.platform import list_schemas
    from penstock.kernel.db import migrate as migrations
    from penstock.settings import load_settings

    settings = load_settings(config, overrides={"data_dir": data_dir})

    async def migrate_all() -> tuple[list[str], list[str]]:
        pending: list[str] = []
        newer: list[str] = []
        for _, opened, known in list_schemas(settings):
            async with opened as db:
                plan = await migrations.plan(db, known)
                if not dry_run:
                    await migrations.migrate(db, known)
            pending += [f"{m.part} {m.version:04} {m.name}" for m in plan.pending]
            newer += plan.newer
        return pending, newer

    pending, newer = asyncio.run(migrate_all())
    if newer:
        print_message(f"note: the schema has migrations of a newer release: {', '.join(newer)}")
    verb = "would apply" if dry_run else "applied"
    lines = [f"{verb} {name}" for name in pending] or ["the schema is up to date"]
    data = {"dryRun": dry_run, "pending" if dry_run else "applied": pending, "newer": newer}
    emit(data, as_json=json, text="\n".join(lines))


@app.command()
def wait(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    timeout: TimeoutOption = 600,
    json: JsonOption = False,
) -> None:
    """Wait until every database is reachable and its schema is at least that of this release.

    The exit code is 124 if the timeout passed.
    """
    import asyncio
    from time import monotonic

    from penstock.settings import load_settings

    settings = load_settings(config, overrides={"data_dir": data_dir})
    started = monotonic()
    asyncio.run(_wait_until_ready(settings, timeout))
    waited = round(monotonic() - started, 3)
    emit({"ready": True, "waitedSeconds": waited}, as_json=json, text="the databases are ready")


async def _wait_until_ready(settings: "Settings", timeout: float) -> None:
    """Check at least once, however short the timeout, then repeatedly; print a missing item when it changes."""
    import asyncio
    from time import monotonic

    from penstock.kernel.errors import TimedOut
    from penstock.kernel.tasks.backoff import Backoff

    backoff, deadline, printed = Backoff(limit=timedelta(seconds=2)), monotonic() + timeout, "no response"
    with suppress(TimeoutError):
        async with asyncio.timeout(max(timeout, _CHECK_TIMEOUT)):
            while missing := await _find_missing(settings):
                if missing != printed:
                    print_message(f"waiting: {missing}")
                    printed = missing
                if monotonic() >= deadline:
                    break
                await asyncio.sleep(backoff.compute_next().total_seconds())
            else:
                return
    hint = "check that PostgreSQL is running; `penstock db migrate` migrates the schema to this release"
    raise TimedOut("DATABASE_NOT_READY", f"the databases are not ready after {timeout:g} s: {printed}", hint=hint)


async def _find_missing(settings: "Settings") -> str:
    """Return the first thing that is missing, or an empty text."""
    import asyncpg

    from penstock.app.platform import list_schemas
    from penstock.kernel.db import migrate as migrations
    from penstock.kernel.errors import Transient

    for name, opened, known in list_schemas(settings):
        try:
            async with opened as db:
                plan = await migrations.plan(db, known)
        except Transient as error:
            is_created = not isinstance(error.__cause__, asyncpg.InvalidCatalogNameError)
            if error.code == "DATABASE_REFUSED" and is_created:  # waiting does not correct a wrong password
                raise
            return error.message
        if plan.pending:
            return f"{len(plan.pending)} migrations of the {name} are pending"
    return ""
