"""`penstock ingest`: run supplier files in a folder, and read their states from the folder or from a server."""

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.completion import complete_from_server
from penstock.cli.server_client import ask_ingest
from penstock.cli.suggestion import make_pasteable
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import (
    ConfigOption,
    HealthPortOption,
    JsonOption,
    LimitOption,
    RunArgument,
)
from penstock.cli.terminal.output import (
    append_more_note,
    emit,
    format_table,
    format_time,
    make_printable,
    print_message,
)
from penstock.cli.terminal.progress import ProgressBar
from penstock.kernel.errors import BadConfig, Corrupt, Invalid, NotFound, PenstockError

if TYPE_CHECKING:
    from penstock.ingest.api.client import IngestClient
    from penstock.ingest.api.folder import FolderViews
    from penstock.ingest.run.hooks import RunOutcome
    from penstock.ingest.workspace import IngestWorkspace
    from penstock.kernel.http.schemas import Camel
    from penstock.settings import Settings

app = CommandGroup(help="Validate supplier files, publish them, and read what is published.")
state_app = CommandGroup(help="Read the published state of a supplier.")
quarantine_app = CommandGroup(help="List the files in quarantine.")
app.add_typer(state_app, name="state")
app.add_typer(quarantine_app, name="quarantine")
RootOption = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="DIR",
        help="Folder or s3://bucket/prefix that contains etl_data/ and etl_ops/; no database is used then.",
        show_default="ingest.root of the configuration, else the current folder",
    ),
]
ReadUrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Read from this server instead of a folder; PENSTOCK_TOKEN is sent as a bearer token.",
        show_default="the folder, else the server of PENSTOCK_URL or of the configuration",
    ),
]
_complete_supplier = complete_from_server(
    lambda: ask_ingest,
    lambda client, _: client.suppliers(),
    lambda found: [supplier["supplier"] for supplier in found["suppliers"]],
)
SupplierArgument = Annotated[
    str, typer.Argument(help="Name of the supplier.", metavar="SUPPLIER", autocompletion=_complete_supplier)
]
OptionalSupplierArgument = Annotated[
    str | None, typer.Argument(help="Only this supplier.", metavar="SUPPLIER", autocompletion=_complete_supplier)
]
_RUNS_SHOWN = 10  # runs of one supplier


@app.command("ls")
def list_suppliers(
    root: RootOption = None, url: ReadUrlOption = None, config: ConfigOption = None, json: JsonOption = False
) -> None:
    """List the suppliers: published state, inbox, last run, and problems."""
    found = _read(root, config, url, lambda views: views.suppliers(), lambda client: client.suppliers())
    rows = [_make_supplier_row(supplier) for supplier in found["suppliers"]]
    head = ["supplier", "state", "age", "facts", "inbox", "broken", "last run", "problem"]
    text = format_table([head, *rows]) if rows else "no supplier has an inbox or a configuration"
    emit(found, as_json=json, text=text)


@app.command()
def show(
    supplier: SupplierArgument,
    root: RootOption = None,
    url: ReadUrlOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Show a supplier: its published state, its inbox, its problems, and its last runs."""

    async def ask(client: "IngestClient") -> dict[str, Any]:
        runs = await client.runs(supplier=supplier, limit=_RUNS_SHOWN)
        return {**await client.supplier(supplier), "runs": runs["runs"]}

    def read(views: "FolderViews") -> dict[str, Any]:
        return {
            **_make_document(views.supplier(supplier)),
            "runs": _make_document(views.runs(supplier, _RUNS_SHOWN))["runs"],
        }

    found = _read(root, config, url, read, ask)
    runs = [_make_run_row(run) for run in found["runs"]]
    listed = (
        format_table([["run", "status", "finished", "good rows", "bad rows", "file"], *runs]) if runs else "no runs"
    )
    emit(found, as_json=json, text=f"{_format_supplier(found)}\n\n{listed}")


@app.command()
def run(
    supplier: SupplierArgument,
    root: RootOption = None,
    config: ConfigOption = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until a file that may still be written is unchanged.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Validate the newest file in the inbox of a supplier, and publish or reject it.

    The exit code is 0 if the file was published or there was none, 1 if it was rejected, 6 if another run is active.
    """
    from penstock.ingest.run.hooks import RunHooks

    with _open_workspace(root, config) as workspace, closing(ProgressBar(supplier)) as bar:
        hooks = RunHooks(progress=bar, on_wait=_print_waiting, should_stop=_stop_on_signals())
        workspace.list_suppliers(supplier)  # raises NotFound for a misspelled name
        outcome = workspace.run(supplier, hooks, waits=wait)
    _print_outcome(outcome, root, as_json=json)
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
    """Watch the inboxes of all suppliers and start runs, until Ctrl-C or SIGTERM."""
    from functools import partial

    from penstock.cli.serve import load_program, print_address, serve

    with load_program():
        from penstock.app import programs

    settings, uses_database = _load_settings(root, config, {"server.port": port})
    serve(settings, partial(programs.run_ingest_watch, uses_database), print_address("health", json))


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Sample file of the supplier.")],
    json: JsonOption = False,
) -> None:
    """Inspect a sample file, and propose a configuration for its supplier.

    The configuration is printed to standard output, the description of the file to standard error.
    """
    from penstock.ingest.inspect.inspection import inspect_file
    from penstock.ingest.model import RunFailed

    if not file.is_file():
        problem = f"{file} is a folder" if file.is_dir() else f"there is no file {file}"
        raise NotFound("FILE_MISSING", problem, hint="pass the path of a file of the supplier")
    try:
        inspection = inspect_file(file)
    except RunFailed as failed:
        raise Invalid(failed.code.value, failed.message, hint=failed.hint) from failed
    if not json:
        print_message(inspection.format_text())
    emit(inspection.as_dict(), as_json=json, text=inspection.format_yaml().rstrip())


@app.command("bad-rows")
def bad_rows(
    run_id: RunArgument,
    root: RootOption = None,
    url: ReadUrlOption = None,
    config: ConfigOption = None,
    limit: LimitOption = 20,
    json: JsonOption = False,
) -> None:
    """Show the bad rows of a run with their reasons, and the number of rows per reason."""
    found = _read(
        root,
        config,
        url,
        lambda views: views.bad_rows(run_id, limit),
        lambda client: client.bad_rows(run_id, limit=limit),
    )
    counts = format_table([[code, str(number)] for code, number in found["reasons"].items()])
    rows = format_table([["row", "sheet", "reason", "column", "value"], *map(_make_bad_row_cells, found["rows"])])
    text = f"{counts}\n\n{rows}" if found["rows"] else f"{run_id} has no bad rows"
    emit(found, as_json=json, text=append_more_note(text, has_more=found["badRows"] > len(found["rows"])))


@app.command()
def diff(
    supplier: SupplierArgument,
    before: Annotated[
        str | None, typer.Option("--from", metavar="RUN", help="Run to compare with.", show_default="the run before")
    ] = None,
    after: Annotated[
        str | None, typer.Option("--to", metavar="RUN", help="Run to compare.", show_default="the published run")
    ] = None,
    root: RootOption = None,
    url: ReadUrlOption = None,
    config: ConfigOption = None,
    limit: Annotated[int, typer.Option(metavar="N", min=0, max=1000, help="Changes shown of each kind.")] = 20,
    json: JsonOption = False,
) -> None:
    """Show the facts that a publication added, removed and changed."""
    found = _read(
        root,
        config,
        url,
        lambda views: views.diff(supplier, before, after, limit),
        lambda client: client.diff(supplier, before, after, limit),
    )
    counts = ", ".join(f"{found[name]:,} {name}" for name in ("added", "removed", "changed", "unchanged"))
    lines = [_format_change(change) for change in found["shown"]]
    emit(found, as_json=json, text="\n".join([f"compared with {found['before']}: {counts}", *lines]))


@app.command()
def gc(
    root: RootOption = None,
    config: ConfigOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be deleted; delete nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete files that are older than their retention, and list them with the reasons."""
    with _open_workspace(root, config) as workspace:
        result = workspace.delete_expired(is_dry=dry_run)
    deleted = [entry for entry in result.expired if entry.is_deleted or dry_run]
    data = {
        "dryRun": dry_run,
        "expired": [entry.as_dict() for entry in result.expired],
        "busy": result.busy,
        "damaged": result.damaged,
    }
    rows = format_table([[entry.path, f"{entry.size:,}", entry.reason] for entry in result.expired])
    verb = "would be deleted" if dry_run else "deleted"
    total = f"{len(deleted)} {verb}, {sum(entry.size for entry in deleted):,} bytes"
    busy = f"skipped because a run is active: {', '.join(result.busy)}" if result.busy else ""
    damaged = f"skipped because the published state is damaged: {', '.join(result.damaged)}" if result.damaged else ""
    text = "\n".join(filter(None, [rows, total if result.expired else "nothing has expired", busy, damaged]))
    emit(data, as_json=json, text=text)


@app.command()
def verify(
    supplier: OptionalSupplierArgument = None,
    root: RootOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Verify every hash in every manifest; exit code 1 if a file differs."""
    from penstock.ingest.state.verify import verify_suppliers

    with _open_workspace(root, config) as workspace:
        checked = list(verify_suppliers(workspace.tree, workspace.list_suppliers(supplier)))
    wrong = [file for file in checked if file.problem]
    data = {"checked": len(checked), "problems": [file.as_dict() for file in wrong]}
    lines = [f"{file.path}: {file.problem}" for file in wrong]
    emit(data, as_json=json, text="\n".join([*lines, f"{len(checked)} checked, {len(wrong)} wrong"]))
    if wrong:
        raise typer.Exit(1)


@state_app.command("show")
def show_state(
    supplier: SupplierArgument,
    root: RootOption = None,
    url: ReadUrlOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Show the published state: its run, its file, and what it changed."""
    found = _read(root, config, url, lambda views: views.state(supplier), lambda client: client.state(supplier))
    manifest = found["manifest"]
    names = ("input_filename", "good_rows", "bad_rows", "config_sha256", "code_commit", "previous_run")
    rows = [["run", found["runId"]], ["published", format_time(found["publishedAt"])]]
    rows += [["fence", str(found["fence"])], ["sha256", found["sha256"]]]
    rows += [[name, "" if manifest[name] is None else str(manifest[name])] for name in names]
    rows += [[name, str(number)] for name, number in (manifest["changes"] or {}).items() if name != "previous"]
    emit(found, as_json=json, text=format_table(rows))


@state_app.command("read")
def read_state(
    supplier: SupplierArgument, root: RootOption = None, url: ReadUrlOption = None, config: ConfigOption = None
) -> None:
    """Write the facts of the published state to standard output as NDJSON, and verify their hash."""
    import shutil

    with _open_folder(root, config, url) as views:
        if views is None:
            ask_ingest(url, lambda client: _copy_facts(client, supplier))
            return
        with views.open_state(supplier) as state:
            shutil.copyfileobj(state.content, sys.stdout.buffer, 1 << 20)
            sys.stdout.buffer.flush()


@quarantine_app.command("ls")
def list_quarantine(
    supplier: OptionalSupplierArgument = None,
    root: RootOption = None,
    url: ReadUrlOption = None,
    config: ConfigOption = None,
    limit: LimitOption = 100,
    json: JsonOption = False,
) -> None:
    """List the files in quarantine with the reason and the run of each, newest first."""

    def read(views: "FolderViews") -> dict[str, Any]:
        names = [supplier] if supplier else [known.supplier for known in views.suppliers().suppliers]
        return _merge_quarantines([_make_document(views.quarantine(name, limit)) for name in names], limit)

    async def ask(client: "IngestClient") -> dict[str, Any]:
        suppliers = [] if supplier else (await client.suppliers())["suppliers"]
        names = [supplier] if supplier else [known["supplier"] for known in suppliers]
        return _merge_quarantines([await client.quarantine(name, limit=limit) for name in names], limit)

    found = _read(root, config, url, read, ask)
    rows = [
        [file["path"], f"{file['bytes']:,}", format_time(file["since"]), file["reason"] or "", file["runId"] or ""]
        for file in found["files"]
    ]
    text = format_table([["file", "bytes", "since", "reason", "run"], *rows]) if rows else "no files are in quarantine"
    emit(found, as_json=json, text=append_more_note(text, has_more=found["total"] > len(rows)))


def _read(
    root: str | None,
    config: Path | None,
    url: str | None,
    read: "Callable[[FolderViews], Camel | dict[str, Any]]",
    ask: "Callable[[IngestClient], Awaitable[dict[str, Any]]]",
) -> dict[str, Any]:
    """Return the document that *read* finds in the folder, or that *ask* gets from a server; both have one form."""
    with _open_folder(root, config, url) as views:
        if views is None:
            return ask_ingest(url, ask)
        found = read(views)
        return found if isinstance(found, dict) else _make_document(found)


@contextmanager
def _open_folder(root: str | None, config: Path | None, url: str | None) -> "Iterator[FolderViews | None]":
    """Yield the folder to read from, or None for the server: with --url, or where no folder is configured."""
    if root is not None and url is not None:
        raise Invalid(
            "USAGE", "--root and --url exclude each other", hint="use --root for a folder, --url for a server"
        )
    settings = None if url is not None else _find_folder(root, config)
    if settings is None:
        yield None
        return
    from penstock.app.platform import open_ingest_workspace
    from penstock.ingest.api.folder import FolderViews
    from penstock.kernel.clock import SystemClock

    with _add_root_to_hints(root), open_ingest_workspace(settings, uses_database=False) as workspace:
        yield FolderViews(workspace.tree, settings.ingest, SystemClock())


@contextmanager
def _add_root_to_hints(root: str | None) -> Iterator[None]:
    """Add --root to the commands that the hint of an error suggests."""
    try:
        yield
    except PenstockError as error:
        if error.hint:
            error.hint = make_pasteable(error.hint, root=root)
        raise


def _make_document(view: "Camel") -> dict[str, Any]:
    """Return *view* as the API sends it."""
    return view.model_dump(mode="json", by_alias=True)


async def _copy_facts(client: "IngestClient", supplier: str) -> None:
    from hashlib import sha256

    digest = sha256()
    async with client.facts(supplier) as facts:
        async for piece in facts.pieces:
            digest.update(piece)
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        if facts.headers["ETag"].strip('"') != digest.hexdigest():
            message = f"the facts of {supplier} that were received do not match their hash"
            raise Corrupt("STATE_CORRUPT", message, hint="read the state again; `penstock ingest verify` finds damage")


def _merge_quarantines(pages: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    files = sorted((file for page in pages for file in page["files"]), key=lambda file: file["since"], reverse=True)
    return {"files": files[:limit], "total": sum(page["total"] for page in pages)}


@contextmanager
def _open_workspace(root: str | None, config: Path | None) -> "Iterator[IngestWorkspace]":
    from penstock.app.platform import open_ingest_workspace

    settings, uses_database = _load_settings(root, config, {})
    with _add_root_to_hints(root), open_ingest_workspace(settings, uses_database=uses_database) as workspace:
        yield workspace


def _load_settings(root: str | None, config: Path | None, overrides: Mapping[str, Any]) -> "tuple[Settings, bool]":
    """Return the settings with the root, and whether runs are recorded in the database.

    Runs are recorded if the root is configured. A root of the command line, or the current folder, has no database.
    """
    settings = _find_folder(root, config, overrides)
    if settings is None:
        hint = "pass --root DIR, or set ingest.root in penstock.yaml"
        message = "no ingest root: neither --root nor ingest.root is set, and the current folder has no etl_data/"
        raise BadConfig("NO_ROOT", message, hint=hint)
    is_configured = root is None and settings.ingest.root != "."
    return settings, is_configured


def _find_folder(
    root: str | None, config: Path | None, overrides: Mapping[str, Any] | None = None
) -> "Settings | None":
    """Return the settings with the root of --root, of the configuration, or the current folder; None without any."""
    from penstock.ingest.tree import paths
    from penstock.settings import load_settings

    settings = load_settings(config, overrides={**(overrides or {}), "ingest.root": root})
    if settings.ingest.root is not None:
        return settings
    if any(Path(name).is_dir() for name in ("etl_data", paths.OPS)):
        return load_settings(config, overrides={**(overrides or {}), "ingest.root": "."})
    return None


def _stop_on_signals() -> Callable[[], bool]:
    """Return a function that reports SIGINT and SIGTERM; a second signal ends the process at once."""
    received: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        if received:
            os._exit(128 + number)  # the next run discards the unfinished one
        received.append(number)
        print_message("stopping; press Ctrl-C again to stop at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return lambda: bool(received)


def _print_waiting(names: list[str], seconds: float) -> None:
    print_message(f"waiting up to {seconds:g} s for {', '.join(names[:3])} to stay unchanged (file_stability_window)")


def _print_outcome(outcome: "RunOutcome", root: str | None, *, as_json: bool) -> None:
    emit(outcome.as_dict(), as_json=as_json, text="\n".join(map(make_printable, _format_outcome(outcome, root))))


def _format_outcome(outcome: "RunOutcome", root: str | None) -> Iterator[str]:
    manifest = outcome.manifest
    if manifest is None:
        yield f"nothing to do: {outcome.reason}"
    else:
        yield f"{manifest.status.value}  {manifest.run_id}  {manifest.input_filename}"
        yield f"{manifest.good_rows:,} good rows, {manifest.bad_rows:,} bad"
        if manifest.changes and manifest.changes.previous:
            changes = manifest.changes
            yield f"{changes.added:,} added, {changes.removed:,} removed, {changes.changed:,} changed"
        if manifest.failure:
            is_list = manifest.failure.code.value.startswith("CONFIG")  # one error of the configuration per line
            message = f"{manifest.failure.code.value}: {manifest.failure.message}"
            yield from message.splitlines() if is_list else [message]
            yield f"hint: {manifest.failure.hint}" if manifest.failure.hint else ""
        if manifest.bad_rows:
            yield make_pasteable(f"hint: `penstock ingest bad-rows {manifest.run_id}` lists the bad rows", root=root)
    yield from (f"moved {name} to {to}" for name, to in outcome.moved.items())
    yield from (f"delivery to {name}: {result}" for name, result in outcome.deliveries.items())


def _make_supplier_row(supplier: Mapping[str, Any]) -> list[str]:
    age = "" if supplier["ageSeconds"] is None else _format_age(supplier["ageSeconds"])
    facts = "" if supplier["facts"] is None else f"{supplier['facts']:,}"
    inbox, broken = _format_inbox(supplier), str(supplier["broken"])
    state, last = supplier["runId"] or "none", _format_last_run(supplier)
    return [supplier["supplier"], state, age, facts, inbox, broken, last, _format_problem(supplier)]


def _format_supplier(supplier: Mapping[str, Any]) -> str:
    published = format_time(supplier["publishedAt"]) if supplier["publishedAt"] else "never"
    facts = "" if supplier["facts"] is None else f", {supplier['facts']:,} facts"
    rows = [
        ["supplier", supplier["supplier"]],
        ["published", published + facts],
        ["inbox", ", ".join([_format_inbox(supplier), *supplier["inbox"][:5]])],
        ["broken files", str(supplier["broken"])],
        ["last run", _format_last_run(supplier) or "none"],
        ["problem", _format_problem(supplier) or "none"],
    ]
    return format_table(rows)


def _make_run_row(run: Mapping[str, Any]) -> list[str]:
    manifest = run["manifest"] or {}
    finished = format_time(run["finishedAt"]) if run["finishedAt"] else ""
    rows = [f"{manifest[name]:,}" if manifest.get(name) is not None else "" for name in ("good_rows", "bad_rows")]
    status = " ".join(filter(None, [run["status"], run["failureCode"]]))
    return [run["runId"], status, finished, *rows, str(manifest.get("input_filename") or "")]


def _format_inbox(supplier: Mapping[str, Any]) -> str:
    unfinished = f" (+{len(supplier['unfinished'])} unfinished)" if supplier["unfinished"] else ""
    return f"{len(supplier['inbox'])}{unfinished}"


def _format_last_run(supplier: Mapping[str, Any]) -> str:
    last = supplier["lastRun"]
    return " ".join(filter(None, [last["status"], last["failureCode"]])) if last else ""


def _format_problem(supplier: Mapping[str, Any]) -> str:
    errors = (supplier["configError"] or "").splitlines()
    more = [f"and {len(errors) - 1} more"] if len(errors) > 1 else []
    details = "; ".join([*errors[:1], *more, *supplier["undelivered"]])
    return ": ".join(filter(None, [", ".join(supplier["alerts"]), details]))


def _format_age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _make_bad_row_cells(row: Mapping[str, Any]) -> list[str]:
    cells = (row["row_number"], row.get("category_key"), row["reason_code"], row.get("column"), row.get("raw_value"))
    return ["" if cell is None else str(cell) for cell in cells]


def _format_change(change: Mapping[str, Any]) -> str:
    sign = {"added": "+", "removed": "-", "changed": "~"}[change["change"]]
    before, after = (
        dumps(change[side]["payload"], ensure_ascii=False) if change.get(side) else None for side in ("before", "after")
    )
    return f"{sign} {before or after}" if change["change"] != "changed" else f"{sign} {before}\n  {after}"
