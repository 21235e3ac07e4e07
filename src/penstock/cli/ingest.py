"""`penstock ingest`: run and inspect supplier snapshots, and read published states; needs no running server."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import ConfigOption, HealthPortOption, JsonOption, RunArgument
from penstock.cli.terminal.output import emit, print_message, printable, table
from penstock.cli.terminal.progress import ProgressBar

if TYPE_CHECKING:
    from penstock.ingest.model import SupplierStatus
    from penstock.ingest.run.hooks import RunOutcome
    from penstock.ingest.workspace import IngestWorkspace
    from penstock.settings import Settings

app = CommandGroup(help="Take supplier snapshots in, and read what is published.")
state_app = CommandGroup(help="Read what is published.")
quarantine_app = CommandGroup(help="See what was set aside.")
app.add_typer(state_app, name="state")
app.add_typer(quarantine_app, name="quarantine")
RootOption = Annotated[
    str | None,
    typer.Option(
        "--root", metavar="DIR", help="Holds etl_data/ and etl_ops/: a folder, or s3://bucket/prefix. No database then."
    ),
]
SupplierArgument = Annotated[str, typer.Argument(help="The supplier's name.", metavar="SUPPLIER")]
OneSupplierArgument = Annotated[str | None, typer.Argument(help="Only this supplier.", metavar="[SUPPLIER]")]


@app.command()
def run(
    supplier: SupplierArgument,
    root: RootOption = None,
    config: ConfigOption = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Do not wait for a file that may still be written.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Take the newest file of a supplier's inbox through to its published state.

    Ends with 0 when it is published or there was nothing to do, 1 when the run failed, 6 when another one is under way.
    """
    from penstock.ingest.run.hooks import RunHooks

    with _workplace(root, config) as place, closing(ProgressBar(supplier)) as bar:
        hooks = RunHooks(progress=bar, waiting=_say_waiting, should_stop=_stop_on_signals())
        outcome = place.run(supplier, hooks, waits=not no_wait)
    _print_outcome(outcome, as_json=json)
    if outcome.was_stopped:
        raise typer.Exit(130)
    if not outcome.is_pass:
        raise typer.Exit(1)


@app.command()
def watch(
    root: RootOption = None,
    config: ConfigOption = None,
    port: HealthPortOption = 0,
    json: JsonOption = False,
) -> None:
    """Watch the inboxes of all suppliers and run what is ready, until Ctrl-C or SIGTERM."""
    from functools import partial

    from penstock.cli.serve import loading, serve, tell_address

    with loading():
        from penstock.app import programs

    settings, uses_database = _settings(root, config, {"server.port": port})
    serve(settings, partial(programs.run_ingest_watch, uses_database), tell_address("health", json))


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A file nobody has seen before.")],
    json: JsonOption = False,
) -> None:
    """Look at a file, and propose a configuration for its supplier: only read it over.

    What was found goes to standard error, the configuration to standard output.
    """
    from penstock.ingest.inspect.inspection import inspect as look
    from penstock.ingest.model import RunFailed
    from penstock.kernel.errors import Invalid, NotFound

    if not file.is_file():
        raise NotFound("FILE_MISSING", f"there is no file {file}", hint="check its name")
    try:
        found = look(file)
    except RunFailed as failed:
        raise Invalid(failed.code.value, failed.message, hint=failed.hint) from failed
    if not json:
        print_message(found.text())
    emit(found.as_dict(), as_json=json, text=found.yaml().rstrip())


@app.command()
def gc(
    root: RootOption = None,
    config: ConfigOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would go.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove what is older than it has to be kept; says what went, and why."""
    with _workplace(root, config) as place:
        swept = place.sweep(is_dry=dry_run)
    told = {"dry_run": dry_run, "found": [one.as_dict() for one in swept.found]}
    told |= {"busy": swept.busy, "damaged": swept.damaged}
    gone = [one for one in swept.found if one.is_gone or dry_run]
    rows = table([[one.path, f"{one.size:,}", one.why] for one in swept.found])
    verb = "would go" if dry_run else "went"
    total = f"{len(gone)} {verb}, {sum(one.size for one in gone):,} bytes" if swept.found else "nothing is too old"
    busy = f"left out, a run is under way: {', '.join(swept.busy)}" if swept.busy else ""
    damaged = f"left out, the current state is damaged: {', '.join(swept.damaged)}" if swept.damaged else ""
    emit(told, as_json=json, text="\n".join(filter(None, [rows, total, busy, damaged])))


@app.command()
def verify(
    supplier: OneSupplierArgument = None, root: RootOption = None, config: ConfigOption = None, json: JsonOption = False
) -> None:
    """Compare every hash in every manifest with the files; 1 when one differs."""
    from penstock.ingest.state.verify import verify as check

    with _workplace(root, config) as place:
        checked = list(check(place.tree, place.suppliers(supplier)))
    wrong = [one for one in checked if one.problem]
    told = {"checked": len(checked), "problems": [one.as_dict() for one in wrong]}
    lines = [f"{one.path}: {one.problem}" for one in wrong]
    emit(told, as_json=json, text="\n".join([*lines, f"{len(checked)} checked, {len(wrong)} wrong"]))
    if wrong:
        raise typer.Exit(1)


@app.command()
def status(
    supplier: OneSupplierArgument = None, root: RootOption = None, config: ConfigOption = None, json: JsonOption = False
) -> None:
    """Show where every supplier stands: what is published, what waits, what failed, and what to look at."""
    with _workplace(root, config) as place:
        found = place.standings(supplier)
    rows = [["supplier", "state", "age", "facts", "inbox", "broken", "last run", "look at"], *map(_supplier_row, found)]
    text = table(rows) if found else "no supplier has an inbox or a configuration yet"
    emit({"suppliers": [one.as_dict() for one in found]}, as_json=json, text=text)


@app.command("bad-rows")
def bad_rows(
    run_id: RunArgument,
    root: RootOption = None,
    config: ConfigOption = None,
    limit: Annotated[int, typer.Option(min=1, help="How many are shown.")] = 20,
    json: JsonOption = False,
) -> None:
    """Show the rows of a run that were bad, and why; how often each reason came first."""
    from itertools import islice

    from penstock.ingest.state import reader as states

    with _workplace(root, config) as place:
        manifest = states.manifest_of(place.tree, run_id)
        stats = states.stats_of(place.tree, run_id)
        rows = list(islice(states.bad_rows(place.tree, run_id), limit))
    told = {"run_id": run_id, "bad_rows": manifest["bad_rows"], "reasons": stats.get("reasons", {}), "rows": rows}
    counts = table([[code, str(number)] for code, number in told["reasons"].items()])
    lines = table([["row", "sheet", "reason", "column", "value"], *(_bad_row_cells(row) for row in rows)])
    text = f"{counts}\n\n{lines}" if rows else f"{run_id} has no bad rows"
    more = manifest["bad_rows"] - len(rows)
    emit(told, as_json=json, text=f"{text}\n… and {more:,} more: raise --limit" if more > 0 else text)


@app.command()
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
    with _workplace(root, config) as place:
        found = place.compare(supplier, before, after, limit)
    changes = found.changes
    counts = ((name, getattr(changes, name)) for name in ("added", "removed", "changed", "unchanged"))
    head = ", ".join(f"{number:,} {name}" for name, number in counts)
    lines = [_change_text(one) for one in found.shown]
    emit(found.as_dict(), as_json=json, text="\n".join([f"against {changes.previous}: {head}", *lines]))


@state_app.command("show")
def show_state(
    supplier: SupplierArgument, root: RootOption = None, config: ConfigOption = None, json: JsonOption = False
) -> None:
    """Show which state is current, where it comes from and what it changed."""
    from penstock.ingest.state import reader as states

    with _workplace(root, config) as place:
        pointer = states.current(place.tree, supplier)
        told = {"pointer": pointer.as_dict(), "manifest": states.manifest_of(place.tree, pointer.run_id)}
    manifest = told["manifest"]
    names = ("input_filename", "good_rows", "bad_rows", "config_sha256", "code_commit", "previous_run")
    rows = [*pointer.as_dict().items(), *((name, manifest[name]) for name in names)]
    rows += [(name, number) for name, number in (manifest["changes"] or {}).items() if name != "previous"]
    emit(told, as_json=json, text=table([[name, "" if value is None else str(value)] for name, value in rows]))


@state_app.command("read")
def read_state(supplier: SupplierArgument, root: RootOption = None, config: ConfigOption = None) -> None:
    """Write the facts of the current state to standard output, as NDJSON, after its hash was verified."""
    import shutil

    from penstock.ingest.state import reader as states

    with _workplace(root, config) as place, states.open_state(place.tree, supplier) as state:
        shutil.copyfileobj(state.content, sys.stdout.buffer, 1 << 20)
        sys.stdout.buffer.flush()


@quarantine_app.command("ls")
def list_quarantine(
    supplier: OneSupplierArgument = None, root: RootOption = None, config: ConfigOption = None, json: JsonOption = False
) -> None:
    """Show the files that were set aside, why, and which run did it."""
    with _workplace(root, config) as place:
        found = place.quarantined(supplier)
    rows = [
        [one["path"], f"{one['bytes']:,}", one["since"][:19], one["why"] or "", one["run_id"] or ""] for one in found
    ]
    text = table([["file", "bytes", "since", "why", "run"], *rows]) if rows else "nothing is set aside"
    emit({"files": found}, as_json=json, text=text)


@contextmanager
def _workplace(root: str | None, config: Path | None) -> Iterator["IngestWorkspace"]:
    from penstock.app.platform import open_workplace

    settings, uses_database = _settings(root, config, {})
    with open_workplace(settings, uses_database=uses_database) as place:
        yield place


def _settings(root: str | None, config: Path | None, overrides: Mapping[str, Any]) -> tuple["Settings", bool]:
    """Return the settings with the root to use, and whether runs are recorded in the database.

    Runs are recorded where the root is configured. A root of the command line, or the current folder, is just a folder.
    """
    from penstock.ingest.tree import paths
    from penstock.kernel.errors import BadConfig
    from penstock.settings import load_settings

    settings = load_settings(config, overrides={**overrides, "ingest.root": root})
    if settings.ingest.root is not None:
        return settings, root is None
    if any(Path(name).is_dir() for name in ("etl_data", paths.OPS)):
        return load_settings(config, overrides={**overrides, "ingest.root": "."}), False
    hint = "name it with --root DIR, or as ingest.root in penstock.yaml"
    raise BadConfig("NO_ROOT", "which folder holds etl_data/ and etl_ops/?", hint=hint)


def _stop_on_signals() -> Callable[[], bool]:
    """Return a function that tells whether SIGINT or SIGTERM came; a second signal ends the process at once."""
    asked: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        if asked:
            os._exit(128 + number)  # whatever was begun is given up by the next run
        asked.append(number)
        print_message("stopping; once more to leave at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return lambda: bool(asked)


def _say_waiting(names: list[str], seconds: float) -> None:
    print_message(f"waiting up to {seconds:g} s for {', '.join(names[:3])} to stay unchanged (file_stability_window)")


def _print_outcome(outcome: "RunOutcome", *, as_json: bool) -> None:
    manifest = outcome.manifest
    told = {
        "supplier": outcome.supplier,
        "status": manifest.status.value if manifest else "NOTHING_TO_DO",
        "reason": outcome.nothing,
        "moved": outcome.moved,
        "deliveries": outcome.deliveries,
        "manifest": manifest.as_dict() if manifest else None,
    }
    emit(told, as_json=as_json, text="\n".join(map(printable, _outcome_lines(outcome))))


def _outcome_lines(outcome: "RunOutcome") -> Iterator[str]:
    manifest = outcome.manifest
    if manifest is None:
        yield f"nothing to do: {outcome.nothing}"
    else:
        yield f"{manifest.status.value}  {manifest.run_id}  {manifest.input_filename}"
        yield f"{manifest.good_rows:,} good rows, {manifest.bad_rows:,} bad"
        if manifest.changes and manifest.changes.previous:
            changes = manifest.changes
            yield f"{changes.added:,} added, {changes.removed:,} removed, {changes.changed:,} changed"
        if manifest.failure:
            yield f"{manifest.failure.code.value}: {manifest.failure.message}"
            yield f"hint: {manifest.failure.hint}" if manifest.failure.hint else ""
    yield from (f"moved {name} to {to}" for name, to in outcome.moved.items())
    yield from (f"delivery to {name}: {how}" for name, how in outcome.deliveries.items())


def _supplier_row(one: "SupplierStatus") -> list[str]:
    last = f"{one.last['status']} {one.last['failure_code'] or ''}".strip() if one.last else ""
    age = "" if one.age_seconds is None else _age_text(one.age_seconds)
    inbox = str(len(one.inbox)) + (f" (+{len(one.unfinished)} unfinished)" if one.unfinished else "")
    config = one.config.splitlines() if one.config else []
    more = [f"and {len(config) - 1} more"] if len(config) > 1 else []
    why = "; ".join([*config[:1], *more, *one.undelivered])
    look = ", ".join(alert.value for alert in one.alerts) + (f": {why}" if why else "")
    facts = "" if one.facts is None else f"{one.facts:,}"
    return [one.supplier, one.run_id or "none", age, facts, inbox, str(one.broken), last, look]


def _age_text(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _bad_row_cells(one: dict[str, Any]) -> list[str]:
    cells = (one["row_number"], one.get("category_key"), one["reason_code"], one.get("column"), one.get("raw_value"))
    return ["" if cell is None else str(cell) for cell in cells]


def _change_text(one: dict[str, Any]) -> str:
    sign = {"added": "+", "removed": "-", "changed": "~"}[one["change"]]
    before, after = (
        dumps(one[side]["payload"], ensure_ascii=False) if one.get(side) else None for side in ("before", "after")
    )
    return f"{sign} {before or after}" if one["change"] != "changed" else f"{sign} {before}\n  {after}"
