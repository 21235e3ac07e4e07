"""`penstock db`: the schema."""

from typing import Annotated

import typer

from penstock.cli.output import ConfigOption, DataDirOption, JsonOption, emit, say

app = typer.Typer(help="Care for the database.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def migrate(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be applied; change nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Bring the schema up to this release. Safe to run at any time, by several at once."""
    import asyncio

    from penstock.app import schemas
    from penstock.kernel import migrate as migrations
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
        say(f"note: a newer release was here: {', '.join(newer)}")
    done = "would apply" if dry_run else "applied"
    lines = [f"{done} {name}" for name in pending] or ["the schema is up to date"]
    emit(
        {"dry_run": dry_run, "pending" if dry_run else "applied": pending, "newer": newer},
        as_json=json,
        text="\n".join(lines),
    )
