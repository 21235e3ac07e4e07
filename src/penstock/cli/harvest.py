"""`penstock harvest`: run feeds of paged APIs at a running server, and show their runs, records and alerts."""

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from penstock.cli import simulator
from penstock.cli.completion import complete_from_server
from penstock.cli.server_client import ask_harvest, wait_for_run
from penstock.cli.suggestion import make_pasteable
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import (
    JsonOption,
    LimitOption,
    ReasonOption,
    TimeoutOption,
    UrlOption,
    WaitOption,
)
from penstock.cli.terminal.output import append_more_note, emit, format_table, format_time, make_printable
from penstock.cli.terminal.progress import ProgressBar
from penstock.cli.terminal.style import colour_status

if TYPE_CHECKING:
    from penstock.harvest.client import HarvestClient

app = CommandGroup(help="Synchronise paged APIs.")
_complete_feed = complete_from_server(
    lambda: ask_harvest, lambda client, _: client.feeds(), lambda found: [feed["feed"] for feed in found["feeds"]]
)
FeedArgument = Annotated[str, typer.Argument(help="Name of the feed.", metavar="FEED", autocompletion=_complete_feed)]


def _parse_run_id(text: str) -> str:
    """Return the id of a run in the spelling of the server."""
    try:
        return str(UUID(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a UUID; `penstock harvest show FEED` lists runs") from None


HarvestRunArgument = Annotated[str, typer.Argument(help="Id of the run.", metavar="RUN", parser=_parse_run_id)]


@app.command("ls")
def list_feeds(url: UrlOption = None, json: JsonOption = False) -> None:
    """List the feeds with their watermarks, last runs and next runs."""
    found = ask_harvest(url, lambda client: client.feeds())
    rows = [_make_feed_row(feed) for feed in found["feeds"]]
    head = ["feed", "watermark", "next run", "last run", "state", "records", "pending", "problem"]
    text = format_table([head, *rows]) if rows else "no feed is configured; harvest.feeds declares them"
    emit(found, as_json=json, text=text)


@app.command()
def show(
    feed: FeedArgument,
    limit: Annotated[int, typer.Option(metavar="N", help="Largest number of runs.", min=1, max=1000)] = 10,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show a feed and its last runs, newest first."""
    found = ask_harvest(url, lambda client: _read_feed_with_runs(client, feed, limit))
    rows = [_make_run_row(run) for run in found["runs"]]
    head = ["run", "type", "state", "partitions", "records", "consolidated", "rejected", "minutes", "error"]
    text = format_table([head, *rows]) if rows else f"{feed} has no runs; `penstock harvest run {feed}` starts one"
    emit(found, as_json=json, text=f"{_format_feed(found)}\n\n{text}")


@app.command()
def run(
    feed: FeedArgument,
    full: Annotated[bool, typer.Option("--full", help="Fetch all records, also if there is a watermark.")] = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = 86_400,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Start a run of a feed: incremental if there is a watermark, otherwise full.

    With --wait the exit code is 0 if the run completed, 1 if it failed, 124 if the timeout passed.
    """
    started = ask_harvest(url, lambda client: client.start(feed, full=full))
    run_id = started["runId"]
    if not wait:
        hint = make_pasteable(f"`penstock harvest show {feed}` shows it", url=url)
        emit(started, as_json=json, text=f"run {run_id} is being planned; {hint}")
        return
    ended = _wait_for_end(url, run_id, feed, timeout)
    emit(ended, as_json=json, text=_format_run_summary(ended, url))
    if ended["state"] != "completed":
        raise typer.Exit(1)


@app.command()
def partitions(run_id: HarvestRunArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Show the partitions of a run and their progress."""
    found = ask_harvest(url, lambda client: client.partitions(run_id))
    head = ["partition", "bounds", "status", "fetched", "counted", "offset", "pass", "worker", "error"]
    emit(found, as_json=json, text=format_table([head, *map(_make_partition_row, found["partitions"])]))


@app.command()
def retry(
    run_id: HarvestRunArgument,
    partition: Annotated[str | None, typer.Argument(help="Only this partition.", metavar="PARTITION")] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Retry the failed partitions of a run from the point of the failure, or its consolidation."""
    result = ask_harvest(url, lambda client: client.retry(run_id, partition))
    names = ", ".join(result["partitions"])
    emit(result, as_json=json, text=f"retrying: {names}" if names else "retrying the consolidation")


@app.command()
def force(
    run_id: HarvestRunArgument,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason recorded in the history.")],
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Consolidate a run despite its failures.

    If partitions failed, the watermark does not move: the next run fetches the same changes again.
    """
    result = ask_harvest(url, lambda client: client.force(run_id, reason))
    emit(result, as_json=json, text=f"run {run_id} is being consolidated without its failed partitions")


@app.command()
def cancel(
    run_id: HarvestRunArgument, reason: ReasonOption = None, url: UrlOption = None, json: JsonOption = False
) -> None:
    """Cancel a run that is being planned or fetched."""
    result = ask_harvest(url, lambda client: client.cancel(run_id, reason or "cancelled"))
    emit(result, as_json=json, text=f"run {run_id} is {result['state']}")


@app.command()
def watermark(
    feed: FeedArgument,
    limit: Annotated[int, typer.Option(metavar="N", help="Largest number of watermarks.", min=1, max=1000)] = 10,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show the watermarks of a feed and the runs that set them, newest first."""
    found = ask_harvest(url, lambda client: client.watermarks(feed, limit=limit))
    rows = [
        [format_time(entry["lastUpdatedAt"]), entry["lastRunId"], format_time(entry["lastRunCompletedAt"])]
        for entry in found["history"]
    ]
    lines = [format_table([["watermark", "run", "completed"], *rows]) if rows else f"{feed} has no watermark yet"]
    if found["blob"] != found["current"]:
        lines.append(f"the copy at {found['blobUrl']} differs: {found['blob']}")
    emit(found, as_json=json, text="\n".join(lines))


@app.command()
def record(
    feed: FeedArgument,
    key: Annotated[str, typer.Argument(help="Key of the record at the source.", metavar="KEY")],
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show a record as it was fetched and as it is published."""
    found = ask_harvest(url, lambda client: client.record(feed, key))
    emit(found, as_json=json, text=_format_record(found))


@app.command()
def rejects(
    run_id: HarvestRunArgument, limit: LimitOption = 20, url: UrlOption = None, json: JsonOption = False
) -> None:
    """List the rejected records of a run with the reasons."""
    page = ask_harvest(url, lambda client: client.rejects(run_id, limit=limit))
    rows = [[reject["key"] or "", make_printable(reject["reason"])] for reject in page["rejects"]]
    text = format_table([["key", "reason"], *rows]) if rows else f"run {run_id} has no rejected records"
    emit(page, as_json=json, text=append_more_note(text, has_more=page.get("next") is not None))


@app.command()
def alerts(feed: FeedArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """List the alerts of a feed and their deliveries, newest first."""
    found = ask_harvest(url, lambda client: client.alerts(feed))
    rows = [
        [
            format_time(alert["raisedAt"]),
            alert["severity"],
            alert["code"],
            ", ".join(alert["deliveredTo"]),
            make_printable(alert["message"]),
        ]
        for alert in found["alerts"]
    ]
    head = ["raised", "severity", "code", "sent to", "message"]
    emit(found, as_json=json, text=format_table([head, *rows]) if rows else f"{feed} has no alerts")


app.command()(simulator.source)


async def _read_feed_with_runs(client: "HarvestClient", feed: str, limit: int) -> dict[str, Any]:
    return {**await client.feed(feed), **await client.runs(feed=feed, limit=limit)}


def _wait_for_end(url: str | None, run_id: str, feed: str, timeout: float) -> dict[str, Any]:
    """Return the run when it has ended; until then show its progress on a terminal."""
    from penstock.harvest.contract import HarvestRunState

    ends = (HarvestRunState.COMPLETED, HarvestRunState.FAILED, HarvestRunState.CONSOLIDATION_SKIPPED)

    async def poll(client: "HarvestClient") -> dict[str, Any] | None:
        run = await client.run(run_id)
        if run["state"] in ends:
            return run
        _show_progress(bar, run)
        return None

    shown_by = f"penstock harvest show {feed}"
    with closing(ProgressBar(feed)) as bar:
        return ask_harvest(url, lambda client: wait_for_run(lambda: poll(client), run_id, timeout, shown_by))


def _show_progress(bar: ProgressBar, run: dict[str, Any]) -> None:
    counted = run.get("counted") or 0
    match run["state"]:
        case "planning":
            bar.show(f"counting the source, {run['counts']} requests")
        case "created" | "workers_running":
            part = run["records"] / counted if counted else None
            ended = run["completedWorkers"] + run["failedWorkers"]
            bar.show(f"fetching, {ended}/{run['expectedWorkers']} partitions", run["records"], part)
        case "consolidating":
            part = run["consolidated"] / run["records"] if run["records"] else None
            bar.show("consolidating", run["consolidated"], part)


def _format_run_summary(run: dict[str, Any], url: str | None) -> str:
    lines = [f"{colour_status(run['state'])}  {run['runId']}  {run['runType'] or ''}".rstrip()]
    if run["expectedWorkers"]:
        failed = f", {run['failedWorkers']} failed" if run["failedWorkers"] else ""
        partitions = "1 partition" if run["expectedWorkers"] == 1 else f"{run['expectedWorkers']} partitions"
        lines.append(
            f"{run['records']:,} records in {partitions}{failed}, "
            f"{run['consolidated']:,} consolidated, {run['rejected']:,} rejected, {run['deleted'] or 0:,} deleted"
        )
    if run["watermarkAfter"]:
        lines.append(f"synchronised up to {format_time(run['watermarkAfter'])}")
    if run["error"]:
        lines.append(make_printable(run["error"]))
        hint = f"fix the cause, then `penstock harvest run {run['feed']}`"
        if run["expectedWorkers"]:
            hint = f"`penstock harvest partitions {run['runId']}` shows the errors, "
            hint += f"`penstock harvest retry {run['runId']}` retries"
        lines.append(make_pasteable(f"hint: {hint}", url=url))
    return "\n".join(lines)


def _make_feed_row(feed: dict[str, Any]) -> list[str]:
    last = feed["lastRun"]
    problem = f"paused: {feed['pauseReason']}" if feed["pausedUntil"] else (last and last["error"]) or ""
    watermark = format_time(feed["watermark"]) if feed["watermark"] else "none"
    run_id, state, records = (last["runId"], last["state"], f"{last['records']:,}") if last else ("none", "", "")
    pending = f"{feed['pending']:,}"
    return [feed["feed"], watermark, _format_next_run(feed), run_id, state, records, pending, make_printable(problem)]


def _format_feed(feed: dict[str, Any]) -> str:
    every = f"every {feed['everySeconds']:g} s" if feed["everySeconds"] else "none"
    watermark = format_time(feed["watermark"]) if feed["watermark"] else "none"
    facts = [
        ["feed", feed["feed"]],
        ["schedule", every],
        ["next run", _format_next_run(feed)],
        ["watermark", watermark],
        ["pending", f"{feed['pending']:,} records"],
    ]
    if feed["pausedUntil"]:
        facts.append(["paused until", f"{format_time(feed['pausedUntil'])}: {feed['pauseReason']}"])
    return format_table(facts)


def _format_next_run(feed: dict[str, Any]) -> str:
    return format_time(feed["nextRunAt"]) if feed["nextRunAt"] else "not scheduled"


def _make_run_row(run: dict[str, Any]) -> list[str]:
    partitions = f"{run['completedWorkers']}/{run['expectedWorkers']}" if run["expectedWorkers"] else ""
    failed = f" ({run['failedWorkers']} failed)" if run["failedWorkers"] else ""
    minutes = "" if run["durationMinutes"] is None else f"{run['durationMinutes']:.1f}"
    numbers = [f"{run[name]:,}" for name in ("records", "consolidated", "rejected")]
    error = make_printable(run["error"] or "")
    return [run["runId"], run["runType"] or "", run["state"], partitions + failed, *numbers, minutes, error]


def _make_partition_row(row: dict[str, Any]) -> list[str]:
    lower, upper = ("" if row[name] is None else f"{row[name]:,}" for name in ("lowerBound", "upperBound"))
    bounds = f"[{lower}, {upper})" if row["kind"] == "range" else row["kind"]
    numbers = [f"{row[name]:,}" for name in ("seen", "counted", "nextOffset", "scan")]
    return [
        row["partitionId"],
        bounds,
        row["status"],
        *numbers,
        row["workerId"] or "",
        make_printable(row["error"] or ""),
    ]


def _format_record(record: dict[str, Any]) -> str:
    import orjson

    published = record["canonical"]
    lines = [record["key"], "not consolidated yet"]
    if published:
        lines = [record["key"], orjson.dumps(published["fields"]).decode()]
        if published["price"] is not None:
            price = f"cost {published['cost']}, price {published['price']} by rule {published['rule']!r}"
            lines.append(f"{price}, version {published['pricingVersion']} of the price rules")
        lines.append(f"published by run {published['runId']}")
    lines.append(f"fetched by run {record['seenRun']} in {record['seenIn']}, version {record['rawVersion']}")
    if record["isPending"]:
        lines.append("changed since, and not consolidated yet")
    if published and published["deletedAt"]:
        lines.append(f"deleted since {format_time(published['deletedAt'])}")
    return "\n".join(make_printable(line) for line in lines)
