"""`penstock db`: the schema."""

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import ConfigOption, DataDirOption, JsonOption
from penstock.cli.terminal.output import emit, print_message

if TYPE_CHECKING:
    from penstock.settings import Settings

_ONE_LOOK = 10.0  # seconds, however short the wait
app = CommandGroup(help="Care for the database.")


@app.command()
def migrate(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be applied; change nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Bring the schema up to this release. Safe to run at any time, by several at once."""
    import asyncio

    from penstock.app.platform import schemas
    from penstock.kernel.db import migrate as migrations
    from penstock.settings import load_settings

    settings = load_settings(config, overrides={"data_dir": data_dir})

    async def work() -> tuple[list[str], list[str]]:
        pending: list[str] = []
        newer: list[str] = []
        for _, opened, known in schemas(settings):
            async with opened as db:
                plan = await migrations.plan(db, known)
                if not dry_run:
                    await migrations.migrate(db, known)
            pending += [f"{m.part} {m.version:04} {m.name}" for m in plan.pending]
            newer += plan.newer
        return pending, newer

    pending, newer = asyncio.run(work())
    if newer:
        print_message(f"note: a newer release was here: {', '.join(newer)}")
    done = "would apply" if dry_run else "applied"
    lines = [f"{done} {name}" for name in pending] or ["the schema is up to date"]
    emit(
        {"dry_run": dry_run, "pending" if dry_run else "applied": pending, "newer": newer},
        as_json=json,
        text="\n".join(lines),
    )


@app.command()
def wait(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    seconds: Annotated[float, typer.Option("--for", min=0, help="Seconds to wait at most.")] = 600,
    json: JsonOption = False,
) -> None:
    """Wait until every database is there and its schema is at least this release's; 124 when it is not in time."""
    import asyncio
    from time import monotonic

    from penstock.settings import load_settings

    settings = load_settings(config, overrides={"data_dir": data_dir})
    began = monotonic()
    asyncio.run(_until_there(settings, seconds))
    waited = round(monotonic() - began, 3)
    emit({"ready": True, "waited_seconds": waited}, as_json=json, text="the databases are there")


async def _until_there(settings: "Settings", seconds: float) -> None:
    """Look once, however short the time, and then again and again; what is lacking is told when it changes."""
    import asyncio
    from time import monotonic

    from penstock.kernel.errors import TimedOut
    from penstock.kernel.tasks.backoff import Backoff

    backoff, deadline, told = Backoff(limit=timedelta(seconds=2)), monotonic() + seconds, "no answer"
    with suppress(TimeoutError):
        async with asyncio.timeout(max(seconds, _ONE_LOOK)):
            while lacking := await _lacking(settings):
                if lacking != told:
                    print_message(f"waiting: {lacking}")
                    told = lacking
                if monotonic() >= deadline:
                    break
                await asyncio.sleep(backoff.next().total_seconds())
            else:
                return
    hint = "is PostgreSQL there? `penstock db migrate` brings the schema up to this release"
    raise TimedOut("BARRIER_TIMEOUT", f"not within {seconds:g} s: {told}", hint=hint)


async def _lacking(settings: "Settings") -> str:
    """What is not there yet, if anything."""
    import asyncpg

    from penstock.app.platform import schemas
    from penstock.kernel.db import migrate as migrations
    from penstock.kernel.errors import Transient

    for name, opened, known in schemas(settings):
        try:
            async with opened as db:
                plan = await migrations.plan(db, known)
        except Transient as error:
            is_made = not isinstance(error.__cause__, asyncpg.InvalidCatalogNameError)
            if error.code == "DATABASE_REFUSED" and is_made:  # a wrong password becomes no better
                raise
            return error.message
        if plan.pending:
            return f"the schema of the {name} lacks {len(plan.pending)} migrations"
    return ""
