"""`penstock track`: the status of files and shards in the pipeline, at a running server."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.server_client import ask_tracking
from penstock.cli.suggestion import make_pasteable
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import (
    AsOption,
    JsonOption,
    LimitOption,
    ReasonOption,
    UrlOption,
    parse_duration,
    resolve_operator,
)
from penstock.cli.terminal.output import append_more_note, emit, format_table, format_time
from penstock.kernel.errors import Invalid
from penstock.tracking.contract import Stage, StageStatus

if TYPE_CHECKING:
    from penstock.tracking.client import PipelineClient

RETRY_BATCH = 10_000  # rows of one request
app = CommandGroup(help="Show and change the status of files and shards in the pipeline.")
FilenameArgument = Annotated[
    str, typer.Argument(metavar="FILENAME", help="Name of the file, without .event-ingest.txt.")
]
ShardArgument = Annotated[int, typer.Argument(metavar="SHARD", help="Number of the shard.", min=0)]
WorkerOption = Annotated[
    str | None,
    typer.Option("--as", metavar="NAME", help="Name of the worker; another worker's shards cannot be changed."),
]
StageArgument = Annotated[Stage, typer.Argument(metavar="STAGE", help="Stage of the pipeline.")]


class QueueStage(StrEnum):
    """The stages whose rows workers claim."""

    SHARD_SPLITTER = Stage.SHARD_SPLITTER.value
    SHARD_WORKER = Stage.SHARD_WORKER.value
    MYSQL_SENDER = Stage.MYSQL_SENDER.value


@app.command("ls")
def list_files(
    stage: Annotated[Stage | None, typer.Option(help="Stage that --status applies to; without it, any stage.")] = None,
    status: Annotated[StageStatus | None, typer.Option(help="Only shards with this status.")] = None,
    prefix: Annotated[str, typer.Option(metavar="TEXT", help="Only filenames that start with this text.")] = "",
    limit: LimitOption = 100,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List files with their shards, by name; filter by stage and status.

    For example, `penstock track ls --stage shard-worker --status failed` lists the shards that failed in one stage.
    """
    page = ask_tracking(
        url, lambda client: client.files(stage=stage, status=status, prefix=prefix or None, limit=limit)
    )
    emit(page, as_json=json, text=append_more_note(_format_files(page["files"]), has_more=page["next"] is not None))


@app.command()
def show(filename: FilenameArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Show the status of each shard of a file in each stage."""
    file = ask_tracking(url, lambda client: client.file(filename))
    emit(file, as_json=json, text=_format_files([file]))


@app.command()
def why(filename: FilenameArgument, shard: ShardArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Explain why a shard has its present status, and which command moves it."""
    explanation = ask_tracking(url, lambda client: client.why(filename, shard))
    lines = [explanation["why"], make_pasteable(explanation["hint"] or "", url=url)]
    emit(explanation, as_json=json, text="\n".join(filter(None, lines)))


@app.command()
def history(
    filename: FilenameArgument, limit: LimitOption = 1000, url: UrlOption = None, json: JsonOption = False
) -> None:
    """Show every state change of the shards of a file, oldest first: time, actor and reason."""
    page = ask_tracking(url, lambda client: client.history(filename, limit=limit))
    text = format_table([["at", "shard", "stage", "change", "by", "reason"], *map(_move_row, page["moves"])])
    emit(page, as_json=json, text=append_more_note(text, has_more=page["next"] is not None))


@app.command()
def summary(url: UrlOption = None, json: JsonOption = False) -> None:
    """Count the shards by stage and status."""
    counts = ask_tracking(url, lambda client: client.summary())
    stages = [[stage.value, *(str(counts["by_stage"][stage.field][name]) for name in StageStatus)] for stage in Stage]
    shards = [[str(shard[name]) for name in ("shard", "total", "done", "failed")] for shard in counts["by_shard"]]
    parts = [
        format_table([["stage", *StageStatus], *stages]),
        format_table([["shard", "total", "done", "failed"], *shards]),
    ]
    emit(counts, as_json=json, text="\n\n".join([f"{counts['total']} rows", *parts]))


@app.command()
def queue(
    stage: Annotated[
        Stage | None, typer.Argument(metavar="STAGE", help="Queue to list; without it, the length of each queue.")
    ] = None,
    limit: LimitOption = 100,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List the shards that wait for a stage, oldest first, or the length of each queue."""
    if stage is None:
        lengths = ask_tracking(url, lambda client: client.queues())
        rows = [["stage", "ready", "started", "failed", ""], *map(_make_queue_row, lengths["queues"])]
        emit(lengths, as_json=json, text=format_table(rows))
        return
    page = ask_tracking(url, lambda client: client.queue(stage, limit=limit))
    rows = [[item["filename"], str(item["shard"]), format_time(item["created_at"])] for item in page["items"]]
    text = format_table([["filename", "shard", "created"], *rows]) if rows else f"no shard waits for {stage}"
    emit(page, as_json=json, text=append_more_note(text, has_more=page["next"] is not None))


@app.command()
def register(
    filename: FilenameArgument,
    shards: Annotated[list[int], typer.Argument(metavar="SHARD", help="Numbers of its shards, e.g. 0 1 2.", min=0)],
    as_: WorkerOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Register a file with its shards; event-ingest is started. A repeated registration changes nothing."""
    result = ask_tracking(url, lambda client: client.register(filename, shards, worker=as_))
    text = f"{filename}: registered" if result["created"] else f"{filename}: is already registered"
    emit(result, as_json=json, text=text)


@app.command()
def done(
    stage: StageArgument,
    filename: FilenameArgument,
    shard: Annotated[
        int | None, typer.Argument(metavar="SHARD", help="Number of the shard; not for event-ingest.", min=0)
    ] = None,
    as_: WorkerOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Set the status of a shard in a stage to done; for event-ingest, of a whole file.

    `penstock track done event-ingest FILENAME` completes the registration: the shards become ready for shard-splitter.
    """
    _check_shard(stage, shard)
    result = ask_tracking(url, lambda client: client.move(stage, "done", filename, shard, worker=as_))
    subject = filename if shard is None else f"{filename} shard {shard}"
    emit(result, as_json=json, text=f"{subject} is done in {stage}")


@app.command()
def claim(
    stage: Annotated[QueueStage, typer.Argument(metavar="STAGE", help="Stage whose shards are claimed.")],
    worker: Annotated[str, typer.Option(metavar="NAME", help="Name of the worker that claims the shards.")],
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Largest number of shards.")] = 1,
    lease: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=parse_duration,
            help="Time until another worker may claim the shards.",
            show_default="tracking.lease of the server",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="DURATION", parser=parse_duration, help="Longest wait for a shard, at most 30 seconds."
        ),
    ] = 0,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Claim shards of a stage for a worker; report them under their fence before the lease expires."""
    if timeout > 30:  # the longest wait that the server allows
        raise Invalid("USAGE", f"--timeout: {timeout:g} is more than 30", hint="claim again after the timeout")
    claimed = ask_tracking(
        url,
        lambda client: client.claim(Stage(stage.value), worker, limit=limit, lease=lease, wait=timeout),
        timeout=timeout + 30,
    )
    rows = [[row.filename, str(row.shard), str(row.fence), str(row.attempt)] for row in claimed]
    text = format_table([["filename", "shard", "fence", "attempt"], *rows]) if rows else f"no shard waits for {stage}"
    emit([row._asdict() for row in claimed], as_json=json, text=text)


@app.command()
def retry(
    stage: StageArgument,
    filename: Annotated[str | None, typer.Argument(metavar="FILENAME", help="Retry a shard of this file.")] = None,
    shard: Annotated[
        int | None, typer.Argument(metavar="SHARD", min=0, help="Number of the shard; not for event-ingest.")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Retry everything that failed in the stage.")] = False,  # noqa: A002
    prefix: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Retry filenames that start with this text.")
    ] = None,
    error: Annotated[str | None, typer.Option(metavar="TEXT", help="Retry errors that contain this text.")] = None,
    since: Annotated[
        datetime | None, typer.Option(metavar="TIME", help="Retry failures since this time (UTC).")
    ] = None,
    before: Annotated[
        datetime | None, typer.Option(metavar="TIME", help="Retry failures before this time (UTC).")
    ] = None,
    as_: AsOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Reset failed shards to new: one shard, or all that match the filters."""
    filters = {
        "filename_prefix": prefix,
        "error_contains": error,
        "failed_since": _convert_to_utc(since),
        "failed_before": _convert_to_utc(before),
    }
    filters = {name: value for name, value in filters.items() if value is not None}
    if bool(filename) + bool(filters or all) != 1:
        hint = "name FILENAME and SHARD, or filters such as --error TEXT, or --all"
        raise Invalid("RETRY_FILTER_MISSING", "nothing is selected to retry", hint=hint)
    actor = resolve_operator(as_)
    if filename is not None:
        _check_shard(stage, shard)
        result = ask_tracking(url, lambda client: client.move(stage, "retry", filename, shard, worker=actor))
        subject = filename if shard is None else f"{filename} shard {shard}"
        emit(result, as_json=json, text=f"{subject} is reset to new in {stage}")
        return
    retried = ask_tracking(url, lambda client: _retry_all(client, stage, {**filters, "worker": actor}), timeout=300)
    shards = "1 shard" if retried == 1 else f"{retried} shards"
    emit({"stage": stage, "retried": retried}, as_json=json, text=f"{shards} reset to new in {stage}")


@app.command()
def pause(
    stage: StageArgument,
    reason: ReasonOption = None,
    as_: AsOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Pause the claims of a stage; started shards can finish."""
    result = ask_tracking(url, lambda client: client.pause(stage, worker=resolve_operator(as_), reason=reason))
    emit(result, as_json=json, text=f"{stage} is paused")


@app.command()
def resume(stage: StageArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Resume the claims of a paused stage."""
    result = ask_tracking(url, lambda client: client.resume(stage))
    emit(result, as_json=json, text=f"{stage} is resumed")


def _check_shard(stage: Stage, shard: int | None) -> None:
    """Raise Invalid unless *shard* is given exactly where the stage has shards."""
    if stage is Stage.EVENT_INGEST and shard is not None:
        raise Invalid("USAGE", f"unexpected argument {shard}", hint=f"{stage} applies to a whole file: omit SHARD")
    if stage is not Stage.EVENT_INGEST and shard is None:
        raise Invalid("USAGE", "missing argument SHARD", hint=f"{stage} applies to a shard: add its number")


async def _retry_all(client: "PipelineClient", stage: Stage, request: Mapping[str, Any]) -> int:
    """Retry all failures that match *request*, in batches, and return their number."""
    total, retried = 0, RETRY_BATCH
    while retried == RETRY_BATCH:
        retried = (await client.retry_failed(stage, **request, limit=RETRY_BATCH))["retried"]
        total += retried
    return total


def _format_files(files: Sequence[Mapping[str, Any]]) -> str:
    head = ["filename", "shard", *(stage.value for stage in Stage), "updated"]
    rows = [_make_shard_row(file["filename"], shard) for file in files for shard in file["shards"]]
    return format_table([head, *rows]) if rows else "no file matches"


def _make_shard_row(filename: str, shard: Mapping[str, Any]) -> list[str]:
    statuses = [shard[f"{stage.field}_status"] for stage in Stage]
    return [filename, str(shard["shard"]), *statuses, format_time(shard["updated_at"])]


def _move_row(move: Mapping[str, Any]) -> Sequence[str]:
    change = f"{move['from'] or ''} → {move['to']}"
    return [format_time(move["at"]), str(move["shard"]), move["stage"], change, move["actor"], move["reason"] or ""]


def _make_queue_row(queue: Mapping[str, Any]) -> Sequence[str]:
    paused = f"paused by {queue['paused_by']}: {queue['reason'] or 'no reason given'}" if queue["paused"] else ""
    return [queue["stage"], *(str(queue[name]) for name in ("ready", "started", "failed")), paused]


def _convert_to_utc(time: datetime | None) -> str | None:
    return None if time is None else f"{time.isoformat()}Z"
