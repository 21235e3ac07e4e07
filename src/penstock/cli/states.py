"""`penstock ingest state|diff|bad-rows|quarantine`: what was published, what it changed, and what was set aside."""

import json as jsons
import sys
from typing import Annotated, Any

import typer

from penstock.cli.ingest import RootOption, SupplierArgument, workplace
from penstock.cli.output import ConfigOption, JsonOption, emit, table

RunArgument = Annotated[str, typer.Argument(help="The run's id.", metavar="RUN")]
SomeSupplier = Annotated[str | None, typer.Argument(help="Only this supplier.", metavar="[SUPPLIER]")]
state_app = typer.Typer(help="Read what is published.", no_args_is_help=True, rich_markup_mode=None)
quarantine_app = typer.Typer(help="See what was set aside.", no_args_is_help=True, rich_markup_mode=None)


def add_to(app: typer.Typer) -> None:
    """Let *app*, that of ingest, have these commands too."""
    app.command("bad-rows")(bad_rows)
    app.command()(diff)
    app.add_typer(state_app, name="state")
    app.add_typer(quarantine_app, name="quarantine")


def bad_rows(
    run_id: RunArgument,
    root: RootOption = None,
    config: ConfigOption = None,
    limit: Annotated[int, typer.Option(min=1, help="How many are shown.")] = 20,
    json: JsonOption = False,
) -> None:
    """Show the rows of a run that were bad, and why; how often each reason came first."""
    from itertools import islice

    from penstock.ingest.state import reader

    with workplace(root, config) as place:
        manifest = reader.manifest_of(place.tree, run_id)
        stats = reader.stats_of(place.tree, run_id)
        rows = list(islice(reader.bad_rows(place.tree, run_id), limit))
    told = {"run_id": run_id, "bad_rows": manifest["bad_rows"], "reasons": stats.get("reasons", {}), "rows": rows}
    counts = table([[code, str(number)] for code, number in told["reasons"].items()])
    lines = table([["row", "sheet", "reason", "column", "value"], *(_bad_row(one) for one in rows)])
    text = f"{counts}\n\n{lines}" if rows else f"{run_id} has no bad rows"
    more = manifest["bad_rows"] - len(rows)
    emit(told, as_json=json, text=f"{text}\n… and {more:,} more: raise --limit" if more > 0 else text)


def diff(
    supplier: SupplierArgument,
    before: Annotated[str | None, typer.Option("--from", help="A run; the one before the current, by default.")] = None,
    after: Annotated[str | None, typer.Option("--to", help="A run; the current one, by default.")] = None,
    root: RootOption = None,
    config: ConfigOption = None,
    limit: Annotated[int, typer.Option(min=0, help="How many changes of each kind are shown.")] = 20,
    json: JsonOption = False,
) -> None:
    """Show what a publication changed: facts added, removed and changed."""
    with workplace(root, config) as place:
        found = place.compare(supplier, before, after, limit)
    changes = found.changes
    counts = ((name, getattr(changes, name)) for name in ("added", "removed", "changed", "unchanged"))
    head = ", ".join(f"{number:,} {name}" for name, number in counts)
    lines = [_change(one) for one in found.shown]
    emit(found.as_dict(), as_json=json, text="\n".join([f"against {changes.previous}: {head}", *lines]))


@state_app.command("show")
def show_state(
    supplier: SupplierArgument, root: RootOption = None, config: ConfigOption = None, json: JsonOption = False
) -> None:
    """Show which state is current, where it comes from and what it changed."""
    from penstock.ingest.state import reader

    with workplace(root, config) as place:
        pointer = reader.current(place.tree, supplier)
        told = {"pointer": pointer.as_dict(), "manifest": reader.manifest_of(place.tree, pointer.run_id)}
    manifest = told["manifest"]
    names = ("input_filename", "good_rows", "bad_rows", "config_sha256", "code_commit", "previous_run")
    rows = [*pointer.as_dict().items(), *((name, manifest[name]) for name in names)]
    rows += [(name, number) for name, number in (manifest["changes"] or {}).items() if name != "previous"]
    emit(told, as_json=json, text=table([[name, "" if value is None else str(value)] for name, value in rows]))


@state_app.command("read")
def read_state(supplier: SupplierArgument, root: RootOption = None, config: ConfigOption = None) -> None:
    """Write the facts of the current state to standard output, as NDJSON, after its hash was verified."""
    import shutil

    from penstock.ingest.state import reader

    with workplace(root, config) as place, reader.open_state(place.tree, supplier) as state:
        shutil.copyfileobj(state.content, sys.stdout.buffer, 1 << 20)
        sys.stdout.buffer.flush()


@quarantine_app.command("ls")
def list_quarantine(
    supplier: SomeSupplier = None,
    root: RootOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Show the files that were set aside, why, and which run did it."""
    with workplace(root, config) as place:
        found = place.quarantined(supplier)
    rows = [
        [one["path"], f"{one['bytes']:,}", one["since"][:19], one["why"] or "", one["run_id"] or ""] for one in found
    ]
    text = table([["file", "bytes", "since", "why", "run"], *rows]) if rows else "nothing is set aside"
    emit({"files": found}, as_json=json, text=text)


def _bad_row(one: dict[str, Any]) -> list[str]:
    cells = (one["row_number"], one.get("category_key"), one["reason_code"], one.get("column"), one.get("raw_value"))
    return ["" if cell is None else str(cell) for cell in cells]


def _change(one: dict[str, Any]) -> str:
    sign = {"added": "+", "removed": "-", "changed": "~"}[one["change"]]
    before, after = (
        jsons.dumps(one[side]["payload"], ensure_ascii=False) if one.get(side) else None for side in ("before", "after")
    )
    return f"{sign} {before or after}" if one["change"] != "changed" else f"{sign} {before}\n  {after}"
