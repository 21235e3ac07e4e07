"""`penstock track`: where each file stands, asked of a running server."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.server_client import ask_tracking
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import JsonOption, UrlOption
from penstock.cli.terminal.output import emit, table, time_text
from penstock.kernel.errors import Invalid
from penstock.tracking.contract import Stage, StageStatus

if TYPE_CHECKING:
    from penstock.tracking.client import PipelineClient

RETRIED_AT_ONCE = 10_000
app = CommandGroup(help="Follow files through the pipeline.")
WorkerOption = Annotated[str | None, typer.Option(help="The name it is noted under in the history.")]
StageArgument = Annotated[Stage, typer.Argument()]


class QueueStage(StrEnum):
    """The stages whose rows are handed out."""

    SHARD_SPLITTER = Stage.SHARD_SPLITTER.value
    SHARD_WORKER = Stage.SHARD_WORKER.value
    MYSQL_SENDER = Stage.MYSQL_SENDER.value


@app.command()
def register(
    filename: Annotated[str, typer.Argument(help="The file's name, without .event-ingest.txt")],
    shards: Annotated[list[int], typer.Argument(help="Its shards: 0 1 2 …", min=0)],
    worker: WorkerOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Register a file: one row per shard, event-ingest started. Saying it again changes nothing."""
    told = ask_tracking(url, lambda client: client.register(filename, shards, worker=worker))
    text = f"{filename}: {'registered' if told['created'] else 'known already'}"
    emit(told, as_json=json, text=text)


@app.command()
def status(
    filename: Annotated[str | None, typer.Argument(help="A file; without one, all that the filters leave.")] = None,
    stage: Annotated[Stage | None, typer.Option(help="Where --status is looked at; else anywhere.")] = None,
    status: Annotated[StageStatus | None, typer.Option(help="Only shards that stand so.")] = None,
    prefix: Annotated[str, typer.Option(help="How filenames begin.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Files at most.")] = 100,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show where a file's shards stand, or which files stand so."""
    if filename is not None:
        told = ask_tracking(url, lambda client: client.file(filename))
        files, more = [told], None
    else:
        told = ask_tracking(
            url, lambda client: client.files(stage=stage, status=status, prefix=prefix or None, limit=limit)
        )
        files, more = told["files"], told["next"]
    head = ["filename", "shard", *(stage.value for stage in Stage), "updated"]
    rows = [_standing(file["filename"], shard) for file in files for shard in file["shards"]]
    text = table([head, *rows]) if rows else "no file stands so"
    emit(told, as_json=json, text=f"{text}\n… and more: narrow it down, or raise --limit" if more else text)


@app.command()
def queue(
    stage: Annotated[Stage | None, typer.Argument(help="A stage; without one, how long each queue is.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show what waits for a stage, oldest first, or how long the queues are."""
    if stage is None:
        told = ask_tracking(url, lambda client: client.queues())
        emit(
            told, as_json=json, text=table([["stage", "ready", "started", "failed", ""], *map(_length, told["queues"])])
        )
        return
    told = ask_tracking(url, lambda client: client.queue(stage, limit=limit))
    rows = [[item["filename"], str(item["shard"]), time_text(item["created_at"])] for item in told["items"]]
    text = table([["filename", "shard", "created"], *rows]) if rows else f"nothing waits for {stage}"
    emit(told, as_json=json, text=f"{text}\n… and more" if told["next"] else text)


@app.command()
def claim(
    stage: Annotated[QueueStage, typer.Argument()],
    worker: Annotated[str, typer.Option(help="Who takes the rows.")],
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 1,
    lease: Annotated[float | None, typer.Option(min=0, help="Seconds until they are taken back.")] = None,
    wait: Annotated[float, typer.Option(min=0, max=30, help="Seconds to wait for a row.")] = 0,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Take rows of a stage for a time. Report them under their fence before the lease runs out."""
    wanted = Stage(stage.value)
    held = ask_tracking(
        url, lambda client: client.claim(wanted, worker, limit=limit, lease=lease, wait=wait), timeout=wait + 30
    )
    rows = [[one.filename, str(one.shard), str(one.fence), str(one.attempt)] for one in held]
    text = table([["filename", "shard", "fence", "attempt"], *rows]) if rows else f"nothing to do for {stage}"
    emit([one._asdict() for one in held], as_json=json, text=text)


@app.command()
def retry(
    stage: StageArgument,
    filename: Annotated[str | None, typer.Argument(help="One file …")] = None,
    shard: Annotated[int | None, typer.Argument(min=0, help="… and shard; event-ingest has none.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Everything that failed in the stage.")] = False,  # noqa: A002
    prefix: Annotated[str | None, typer.Option(help="All whose filename begins so.")] = None,
    error: Annotated[str | None, typer.Option(help="All that failed with this in their error.")] = None,
    since: Annotated[datetime | None, typer.Option(help="All that failed since (UTC).")] = None,
    before: Annotated[datetime | None, typer.Option(help="All that failed before (UTC).")] = None,
    worker: WorkerOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Set what failed back to new: one row, or all that the filters choose."""
    chosen = {
        "filename_prefix": prefix,
        "error_contains": error,
        "failed_since": _utc(since),
        "failed_before": _utc(before),
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if bool(filename) + bool(chosen or all) != 1:
        raise Invalid("RETRY_FILTER_MISSING", "say what to retry", hint="a FILENAME and SHARD, or filters, or --all")
    if filename is not None:
        told = ask_tracking(url, lambda client: client.move(stage, "retry", filename, shard, worker=worker))
        emit(told, as_json=json, text=f"{filename} is new again in {stage}")
        return
    retried = ask_tracking(url, lambda client: _retry_all(client, stage, {**chosen, "worker": worker}), timeout=300)
    emit({"stage": stage, "retried": retried}, as_json=json, text=f"{retried} set back in {stage}")


@app.command()
def why(
    filename: Annotated[str, typer.Argument()],
    shard: Annotated[int, typer.Argument(min=0)],
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Say in words why a row is where it is, and what would move it."""
    told = ask_tracking(url, lambda client: client.why(filename, shard))
    emit(told, as_json=json, text="\n".join(filter(None, [told["why"], told["hint"]])))


@app.command()
def history(
    filename: Annotated[str, typer.Argument()],
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 1000,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show every move of a file's shards: who, when, why."""
    told = ask_tracking(url, lambda client: client.history(filename, limit=limit))
    text = table([["at", "shard", "stage", "move", "by", "why"], *map(_step, told["moves"])])
    emit(told, as_json=json, text=f"{text}\n… and more" if told["next"] else text)


@app.command()
def summary(url: UrlOption = None, json: JsonOption = False) -> None:
    """Count the rows by stage and status, and by shard."""
    told = ask_tracking(url, lambda client: client.summary())
    stages = [[stage.value, *(str(told["by_stage"][stage.field][status]) for status in StageStatus)] for stage in Stage]
    shards = [[str(one[name]) for name in ("shard", "total", "done", "failed")] for one in told["by_shard"]]
    parts = [table([["stage", *StageStatus], *stages]), table([["shard", "total", "done", "failed"], *shards])]
    emit(told, as_json=json, text="\n\n".join([f"{told['total']} rows", *parts]))


@app.command()
def pause(
    stage: StageArgument,
    reason: Annotated[str | None, typer.Option(help="Why, for whoever wonders.")] = None,
    worker: WorkerOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Hand out nothing more of a stage; what is under way may end."""
    told = ask_tracking(url, lambda client: client.pause(stage, worker=worker, reason=reason))
    emit(told, as_json=json, text=f"{stage} is paused")


@app.command()
def resume(stage: StageArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Let a paused stage go on."""
    told = ask_tracking(url, lambda client: client.resume(stage))
    emit(told, as_json=json, text=f"{stage} goes on")


async def _retry_all(client: "PipelineClient", stage: Stage, chosen: Mapping[str, Any]) -> int:
    """As many as there are, a bounded number at a time."""
    total, found = 0, RETRIED_AT_ONCE
    while found == RETRIED_AT_ONCE:
        found = (await client.retry_failed(stage, **chosen, limit=RETRIED_AT_ONCE))["retried"]
        total += found
    return total


def _standing(filename: str, shard: Mapping[str, Any]) -> list[str]:
    statuses = [shard[f"{stage.field}_status"] for stage in Stage]
    return [filename, str(shard["shard"]), *statuses, time_text(shard["updated_at"])]


def _step(move: Mapping[str, Any]) -> Sequence[str]:
    step = f"{move['from'] or ''} → {move['to']}"
    return [time_text(move["at"]), str(move["shard"]), move["stage"], step, move["actor"], move["reason"] or ""]


def _length(queue: Mapping[str, Any]) -> Sequence[str]:
    paused = f"paused by {queue['paused_by']}: {queue['reason'] or 'no reason given'}" if queue["paused"] else ""
    return [queue["stage"], *(str(queue[name]) for name in ("ready", "started", "failed")), paused]


def _utc(said: datetime | None) -> str | None:
    return None if said is None else f"{said.isoformat()}Z"
