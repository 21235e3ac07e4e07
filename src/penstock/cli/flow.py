"""`penstock flow`: runs of flows; asks a running server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import flow_files, flow_schedules
from penstock.cli.flow_text import run_row, run_text, summary
from penstock.cli.output import JsonOption, emit, printable, say, table
from penstock.cli.server_client import URL, UrlOption, ask_flows, moment, until_ended

if TYPE_CHECKING:
    from penstock.flows.client import FlowClient

app = typer.Typer(help="Run flows: steps that wait for each other.", no_args_is_help=True, rich_markup_mode=None)
app.command()(flow_files.validate)
app.command()(flow_files.graph)
app.add_typer(flow_schedules.app, name="schedule")
RunArgument = Annotated[str, typer.Argument(help="The run's id.", metavar="RUN")]
StepArgument = Annotated[str, typer.Argument(help="The step's id.", metavar="STEP")]
ReasonOption = Annotated[str | None, typer.Option("--reason", help="Why; it is kept with the run.")]
LimitOption = Annotated[int, typer.Option(help="How many to show.", min=1, max=1000)]
_SUFFIXES = {".yaml", ".yml", ".json", ".py"}


@app.command()
def run(
    what: Annotated[
        str | None, typer.Argument(help="A flow's name, or a file that holds one.", metavar="[NAME|FILE]")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="KEY=VALUE; a value that is JSON counts as such. May come again."),
    ] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="A name for it: asking again makes no other.")] = None,
    resume: Annotated[str | None, typer.Option("--resume", help="Begin anew what this run did.", metavar="RUN")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="The step to begin at.", metavar="STEP")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until the run ended, and show how far it is.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait at most.", min=1)] = 86_400,
    url: UrlOption = URL,
    json: JsonOption = False,
) -> None:
    """Start a run of a flow, or take one up at a step with --resume RUN --from STEP.

    With --wait it ends with 0 when the run succeeded, 1 when it did not, 124 when it took too long.
    """
    if resume is not None or from_ is not None:
        created = _resumed(url, what, scope, resume, from_, run_id)
    else:
        request = _request(what, scope or [], run_id)
        created = ask_flows(url, lambda client: client.create(request))
    name = created["runId"]
    if not wait:
        again = "" if created["created"] else ", as it was before"
        text = f"run {name} is {created['status']}{again}; `penstock flow show {name}` shows it"
        emit(created, as_json=json, text=text)
        return
    told = _followed(url, name, timeout)
    emit(told, as_json=json, text=summary(told))
    if told["status"] != "SUCCEEDED":
        raise typer.Exit(1)


@app.command("ls")
def list_runs(
    flow: Annotated[str | None, typer.Argument(help="Only of this flow.", metavar="[FLOW]")] = None,
    status: Annotated[str | None, typer.Option(help="Only those that stand so, e.g. FAILED.")] = None,
    since: Annotated[str | None, typer.Option(help="Made then or later, e.g. 2026-01-31T00:00:00Z.")] = None,
    limit: LimitOption = 20,
    url: UrlOption = URL,
    json: JsonOption = False,
) -> None:
    """List runs, the latest first."""
    told = ask_flows(url, lambda client: client.runs(flow=flow, status=status, since=since, limit=limit))
    rows = [run_row(one) for one in told["runs"]]
    head = ["run", "flow", "status", "created", "seconds", "by", "reason"]
    text = table([head, *rows]) if rows else "no runs; `penstock flow run FLOW` starts one"
    if told["next"]:
        say(f"there are more than {limit}; --limit shows them")
    emit(told, as_json=json, text=text)


@app.command()
def show(
    run_id: RunArgument,
    why: Annotated[str | None, typer.Option("--why", help="Tell why this step is where it is.", metavar="STEP")] = None,
    url: UrlOption = URL,
    json: JsonOption = False,
) -> None:
    """Show where a run and its steps stand; with --why, what a step waits for."""
    if why is not None:
        told = ask_flows(url, lambda client: client.why(run_id, why))
        hint = f"\nhint: {printable(told['hint'])}" if told["hint"] else ""
        emit(told, as_json=json, text=f"{why} is {told['status']}: {printable(told['why'])}{hint}")
        return
    told = ask_flows(url, lambda client: client.run(run_id))
    emit(told, as_json=json, text=run_text(told))


@app.command()
def logs(
    run_id: RunArgument,
    step_id: StepArgument,
    attempt: Annotated[int | None, typer.Option(help="Only of this one.", min=1)] = None,
    url: UrlOption = URL,
    json: JsonOption = False,
) -> None:
    """Show what a step told while it ran."""
    told = ask_flows(url, lambda client: _all_logs(client, run_id, step_id, attempt))
    lines = [
        f"{moment(one['at'])}  {one['attempt']}  {one['level']:<7}  {printable(one['message'])}"
        for one in told["lines"]
    ]
    emit(told, as_json=json, text="\n".join(lines) if lines else f"{step_id} has told nothing")


@app.command()
def retry(
    run_id: RunArgument,
    step_id: Annotated[str | None, typer.Argument(help="Only this one.", metavar="[STEP]")] = None,
    url: UrlOption = URL,
    json: JsonOption = False,
) -> None:
    """Try what failed of a run again, with what was cancelled because of it."""
    told = ask_flows(url, lambda client: client.retry(run_id, step_id))
    emit(told, as_json=json, text=f"taken up again: {', '.join(told['steps'])}")


@app.command()
def skip(
    run_id: RunArgument,
    step_id: StepArgument,
    reason: ReasonOption = None,
    url: UrlOption = URL,
    json: JsonOption = False,
) -> None:
    """Do without a step: what comes after it has its turn."""
    told = ask_flows(url, lambda client: client.skip(run_id, step_id, reason))
    emit(told, as_json=json, text=f"{step_id} of run {run_id} is {told['status']}")


@app.command()
def cancel(run_id: RunArgument, reason: ReasonOption = None, url: UrlOption = URL, json: JsonOption = False) -> None:
    """Stop a run: what waits does not begin, what is under way is told."""
    told = ask_flows(url, lambda client: client.cancel(run_id, reason))
    emit(told, as_json=json, text=f"run {run_id} is {told['status']}")


def _request(what: str | None, scope: list[str], run_id: str | None) -> dict[str, Any]:
    """What is asked for: a flow by its name, or the steps of a file with its own scope below the given one."""
    from penstock.kernel.errors import Invalid

    if what is None:
        raise Invalid("WHICH_FLOW", "it takes a flow to run", hint="`penstock flow run NAME`, or the FILE of one")
    given = dict(map(_pair, scope))
    request: dict[str, Any] = {"runId": run_id} if run_id else {}
    if Path(what).suffix not in _SUFFIXES:
        return {**request, "flow": what, "scope": given}
    spec = flow_files.chosen(what, None)
    written = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    policy = {"policy": written["policy"]} if "policy" in written else {}
    return {**request, "steps": written.get("steps", {}), "scope": {**spec.scope, **given}, **policy}


def _pair(text: str) -> tuple[str, Any]:
    import json

    from penstock.kernel.errors import Invalid

    key, is_given, value = text.partition("=")
    if not is_given or not key:
        raise Invalid("BAD_SCOPE", f"{text!r} is not KEY=VALUE", hint="e.g. --scope day=2026-01-31 --scope limit=5")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _resumed(
    url: str, what: str | None, scope: list[str] | None, run_id: str | None, step_id: str | None, new: str | None
) -> dict[str, Any]:
    from penstock.kernel.errors import Invalid

    if run_id is None or step_id is None or what is not None or scope:
        said = "a run is taken up with --resume RUN and --from STEP, and nothing else of its own"
        raise Invalid("BAD_RESUME", said, hint="flow and scope are those of the run")
    return ask_flows(url, lambda client: client.resume(run_id, step_id, new))


def _followed(url: str, run_id: str, timeout: float) -> dict[str, Any]:
    """The run when it ended; meanwhile how far it is, on a terminal."""
    from contextlib import closing

    from penstock.cli.progress import Bar
    from penstock.flows.model import RUN

    async def look(client: "FlowClient") -> dict[str, Any] | None:
        told = await client.run(run_id, steps=False)
        if told["status"] in RUN.groups["ended"]:
            return await client.run(run_id)
        _show(bar, told)
        return None

    shown_by = f"penstock flow show {run_id}"
    with closing(Bar(run_id)) as bar:
        return ask_flows(url, lambda client: until_ended(lambda: look(client), run_id, timeout, shown_by))


def _show(bar: Any, told: dict[str, Any]) -> None:
    counts = told["counts"]
    total = sum(counts.values())
    ended = total - sum(counts.get(name, 0) for name in ("PENDING", "READY", "RUNNING"))
    what = f"{ended:,}/{total:,} steps, {counts.get('RUNNING', 0):,} running, {counts.get('READY', 0):,} ready"
    bar.says(f"{told['status']}, {what}", part=ended / total if total else None)


async def _all_logs(client: "FlowClient", run_id: str, step_id: str, attempt: int | None) -> dict[str, Any]:
    told = await client.logs(run_id, step_id, attempt=attempt, limit=1000)
    while told["next"]:
        more = await client.logs(run_id, step_id, attempt=attempt, limit=1000, cursor=told["next"])
        told = {**more, "lines": told["lines"] + more["lines"]}
    return told
