"""`penstock harvest`: run feeds of paged APIs on a running server, and see what became of them."""

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import simulator
from penstock.cli.server_client import ask_harvest, wait_for_run
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import JsonOption, LimitOption, RunArgument, TimeoutOption, UrlOption, WaitOption
from penstock.cli.terminal.output import emit, printable, table, time_text
from penstock.cli.terminal.progress import ProgressBar

if TYPE_CHECKING:
    from penstock.harvest.client import HarvestClient

app = CommandGroup(help="Keep paged APIs in step.")
FeedArgument = Annotated[str, typer.Argument(help="The feed's name.", metavar="FEED")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it is kept with the run.")]


@app.command()
def run(
    feed: FeedArgument,
    full: Annotated[bool, typer.Option("--full", help="Take all there is, even where there is a watermark.")] = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = 86_400,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Start a run: incremental where there is a watermark, else full.

    With --wait it ends with 0 when the run completed, 1 when it failed, 124 when it took too long.
    """
    started = ask_harvest(url, lambda client: client.start(feed, full=full))
    run_id = started["runId"]
    if not wait:
        emit(started, as_json=json, text=f"run {run_id} is being planned; `penstock harvest status {feed}` shows it")
        return
    told = _wait_for_end(url, run_id, feed, timeout)
    emit(told, as_json=json, text=_summary(told))
    if told["state"] != "completed":
        raise typer.Exit(1)


@app.command()
def status(
    feed: Annotated[str | None, typer.Argument(help="Only this feed, with its last runs.", metavar="[FEED]")] = None,
    limit: Annotated[int, typer.Option(help="Runs to show of one feed.", min=1, max=1000)] = 10,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show where feeds stand, or the last runs of one."""
    if feed is None:
        told = ask_harvest(url, lambda client: client.feeds())
        rows = [_feed_row(one) for one in told["feeds"]]
        head = ["feed", "watermark", "last run", "state", "records", "pending", "look at"]
        text = table([head, *rows]) if rows else "no feed is configured; name one under harvest.feeds"
        emit(told, as_json=json, text=text)
        return
    told = ask_harvest(url, lambda client: _feed_with_runs(client, feed, limit))
    rows = [_run_row(one) for one in told["runs"]]
    head = ["run", "type", "state", "partitions", "records", "consolidated", "rejected", "minutes", "error"]
    text = table([head, *rows]) if rows else f"{feed} was never run; `penstock harvest run {feed}` starts it"
    emit(told, as_json=json, text=text)


@app.command()
def partitions(run_id: RunArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Show how far the partitions of a run are."""
    told = ask_harvest(url, lambda client: client.partitions(run_id))
    head = ["partition", "holds", "status", "seen", "counted", "offset", "pass", "worker", "error"]
    emit(told, as_json=json, text=table([head, *map(_partition_row, told["partitions"])]))


@app.command()
def retry(
    run_id: RunArgument,
    partition: Annotated[str | None, typer.Argument(help="Only this one.", metavar="[PARTITION]")] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Take up what failed of a run: partitions where they stopped, or consolidation."""
    told = ask_harvest(url, lambda client: client.retry(run_id, partition))
    names = ", ".join(told["partitions"])
    emit(told, as_json=json, text=f"worked on again: {names}" if names else "consolidation is tried again")


@app.command()
def force(run_id: RunArgument, reason: ReasonOption, url: UrlOption = None, json: JsonOption = False) -> None:
    """Consolidate a run in spite of its failures.

    Where partitions failed the watermark stays: the next run takes the same data again.
    """
    told = ask_harvest(url, lambda client: client.force(run_id, reason))
    emit(told, as_json=json, text=f"run {run_id} is being consolidated without what failed")


@app.command()
def cancel(
    run_id: RunArgument, reason: ReasonOption = "cancelled", url: UrlOption = None, json: JsonOption = False
) -> None:
    """Stop a run that is being planned or fetched."""
    told = ask_harvest(url, lambda client: client.cancel(run_id, reason))
    emit(told, as_json=json, text=f"run {run_id} is {told['state']}")


@app.command()
def watermark(
    feed: FeedArgument,
    limit: Annotated[int, typer.Option(help="How many of its past to show.", min=1, max=1000)] = 10,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show up to when a feed is known, and since which run."""
    told = ask_harvest(url, lambda client: client.watermarks(feed, limit=limit))
    rows = [[one["lastUpdatedAt"], one["lastRunId"], time_text(one["lastRunCompletedAt"])] for one in told["history"]]
    lines = [table([["known up to", "by run", "completed"], *rows]) if rows else f"{feed} has no watermark yet"]
    if told["blob"] != told["current"]:
        lines.append(f"the copy at {told['blobUrl']} differs: {told['blob']}")
    emit(told, as_json=json, text="\n".join(lines))


@app.command()
def record(
    feed: FeedArgument,
    key: Annotated[str, typer.Argument(help="What the source calls it.", metavar="KEY")],
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show where one record is: as the source told it, and as it is served."""
    told = ask_harvest(url, lambda client: client.record(feed, key))
    emit(told, as_json=json, text=_record_text(told))


@app.command()
def rejects(run_id: RunArgument, limit: LimitOption = 20, url: UrlOption = None, json: JsonOption = False) -> None:
    """Show the records of a run that could not be kept or mapped, and why."""
    told = ask_harvest(url, lambda client: client.rejects(run_id, limit=limit))
    rows = [[one["key"] or "", printable(one["reason"])] for one in told["rejects"]]
    emit(told, as_json=json, text=table([["key", "reason"], *rows]) if rows else "none")


@app.command()
def alerts(feed: FeedArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Show what somebody was told of, the latest first."""
    told = ask_harvest(url, lambda client: client.alerts(feed))
    rows = [
        [
            time_text(one["raisedAt"]),
            one["severity"],
            one["code"],
            ", ".join(one["deliveredTo"]),
            printable(one["message"]),
        ]
        for one in told["alerts"]
    ]
    emit(told, as_json=json, text=table([["when", "severity", "code", "sent to", "what"], *rows]) if rows else "none")


app.command()(simulator.source)


async def _feed_with_runs(client: "HarvestClient", feed: str, limit: int) -> dict[str, Any]:
    return {**await client.feed(feed), **await client.runs(feed=feed, limit=limit)}


def _wait_for_end(url: str | None, run_id: str, feed: str, timeout: float) -> dict[str, Any]:
    """Return the run when it has ended; until then show its progress on a terminal."""
    from penstock.harvest.contract import HarvestRunState

    ends = (HarvestRunState.COMPLETED, HarvestRunState.FAILED, HarvestRunState.CONSOLIDATION_SKIPPED)

    async def look(client: "HarvestClient") -> dict[str, Any] | None:
        told = await client.run(run_id)
        if told["state"] in ends:
            return told
        _show_progress(bar, told)
        return None

    shown_by = f"penstock harvest status {feed}"
    with closing(ProgressBar(feed)) as bar:
        return ask_harvest(url, lambda client: wait_for_run(lambda: look(client), run_id, timeout, shown_by))


def _show_progress(bar: ProgressBar, told: dict[str, Any]) -> None:
    counted = told.get("counted") or 0
    match told["state"]:
        case "planning":
            bar.says(f"counting the source, {told['counts']} requests")
        case "created" | "workers_running":
            part = told["records"] / counted if counted else None
            ended = told["completedWorkers"] + told["failedWorkers"]
            bar.says(f"fetching, {ended}/{told['expectedWorkers']} partitions", told["records"], part)
        case "consolidating":
            part = told["consolidated"] / told["records"] if told["records"] else None
            bar.says("consolidating", told["consolidated"], part)


def _summary(told: dict[str, Any]) -> str:
    lines = [f"{told['state']}  {told['runId']}  {told['runType'] or ''}".rstrip()]
    if told["expectedWorkers"]:
        failed = f", {told['failedWorkers']} failed" if told["failedWorkers"] else ""
        partitions = "1 partition" if told["expectedWorkers"] == 1 else f"{told['expectedWorkers']} partitions"
        lines.append(
            f"{told['records']:,} records in {partitions}{failed}, "
            f"{told['consolidated']:,} consolidated, {told['rejected']:,} rejected, {told['deleted'] or 0:,} gone"
        )
    if told["watermarkAfter"]:
        lines.append(f"known up to {told['watermarkAfter']}")
    if told["error"]:
        lines.append(printable(told["error"]))
        again = f"`penstock harvest partitions {told['runId']}` shows where, `retry` takes it up again"
        lines.append(f"hint: {again if told['expectedWorkers'] else 'mend it, and start another run'}")
    return "\n".join(lines)


def _feed_row(one: dict[str, Any]) -> list[str]:
    last = one["lastRun"]
    look = f"paused: {one['pauseReason']}" if one["pausedUntil"] else (last and last["error"]) or ""
    known = time_text(one["watermark"]) if one["watermark"] else "none"
    run_id, state, records = (last["runId"], last["state"], f"{last['records']:,}") if last else ("never", "", "")
    return [one["feed"], known, run_id, state, records, f"{one['pending']:,}", printable(look)]


def _run_row(one: dict[str, Any]) -> list[str]:
    parts = f"{one['completedWorkers']}/{one['expectedWorkers']}" if one["expectedWorkers"] else ""
    failed = f" ({one['failedWorkers']} failed)" if one["failedWorkers"] else ""
    minutes = "" if one["durationMinutes"] is None else f"{one['durationMinutes']:.1f}"
    numbers = [f"{one[name]:,}" for name in ("records", "consolidated", "rejected")]
    error = printable(one["error"] or "")
    return [one["runId"], one["runType"] or "", one["state"], parts + failed, *numbers, minutes, error]


def _partition_row(one: dict[str, Any]) -> list[str]:
    lower, upper = ("" if one[name] is None else f"{one[name]:,}" for name in ("lowerBound", "upperBound"))
    holds = f"[{lower}, {upper})" if one["kind"] == "range" else one["kind"]
    numbers = [f"{one[name]:,}" for name in ("seen", "counted", "nextOffset", "scan")]
    return [one["partitionId"], holds, one["status"], *numbers, one["workerId"] or "", printable(one["error"] or "")]


def _record_text(told: dict[str, Any]) -> str:
    made = told["canonical"]
    served = "not consolidated yet"
    if made:
        served = f"{made['fields']}\ncost {made['cost']}, price {made['price']} by rule {made['rule']!r} "
        served += f"(version {made['pricingVersion']}), made by run {made['runId']}"
    gone = f"gone since {time_text(made['deletedAt'])}" if made and made["deletedAt"] else ""
    seen = f"seen by run {told['seenRun']} in {told['seenIn']}, version {told['rawVersion']}"
    pending = "changed since, and not consolidated yet" if told["isPending"] else ""
    lines = [told["key"], *served.splitlines(), seen, pending, gone]
    return "\n".join(printable(line) for line in lines if line)
