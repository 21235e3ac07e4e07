"""`penstock flow`: check and draw flows in files; run and schedule flows on a running server."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.server_client import ask_flows, wait_for_run
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import JsonOption, LimitOption, RunArgument, TimeoutOption, UrlOption, WaitOption
from penstock.cli.terminal.output import emit, print_message, printable, table, time_text
from penstock.cli.terminal.progress import ProgressBar
from penstock.kernel.errors import Invalid, NotFound, PenstockError

if TYPE_CHECKING:
    from penstock.flows.client import FlowClient
    from penstock.flows.definition.spec import FlowSpec

app = CommandGroup(help="Run flows: steps that wait for each other.")
schedule_app = CommandGroup(help="See and pause when flows run by themselves.")
app.add_typer(schedule_app, name="schedule")
_TARGET = "a YAML file, a folder of them, a Python file, or a module"
FlowArgument = Annotated[str, typer.Argument(help="The flow's name.", metavar="FLOW")]
StepArgument = Annotated[str, typer.Argument(help="The step's id.", metavar="STEP")]
ReasonOption = Annotated[str | None, typer.Option("--reason", help="Why; it is kept with the run.")]
_FLOW_SUFFIXES = {".yaml", ".yml", ".json", ".py"}
_STEPS_SHOWN = 200  # steps of one run; --json has all
_NOTE_WIDTH = 100


@dataclass(frozen=True)
class _LoadedFile:
    """The flows of one file or module, or the reason why it has none."""

    place: str
    flows: "list[FlowSpec]"
    error: PenstockError | None = None


@app.command()
def validate(
    targets: Annotated[list[str], typer.Argument(help=f"Each {_TARGET}.", metavar="TARGET…")], json: JsonOption = False
) -> None:
    """Check flows; one line for each, and every mistake with its line and the step it is in.

    Ends with 0 when all are good, 2 when any is not.
    """
    files = list(_check_nesting(file for target in targets for file in _load_target(target)))
    rows = [row for file in files for row in _validation_rows(file)]
    emit(rows, as_json=json, text="\n".join(map(_validation_text, files)))
    if any(file.error for file in files):
        raise typer.Exit(2)


@app.command()
def graph(
    target: Annotated[str, typer.Argument(help=f"{_TARGET.capitalize()}.", metavar="TARGET")],
    flow: Annotated[str | None, typer.Argument(help="Which flow, where there are several.", metavar="[FLOW]")] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
    json: JsonOption = False,
) -> None:
    """Draw a flow: each step below those it waits for."""
    from penstock.flows.definition import render as graphs

    spec = _choose_flow(target, flow)
    steps = spec.steps
    about = [{"id": name, **step.model_dump(mode="json", by_alias=True)} for name, step in steps.items()]
    draw = graphs.draw_mermaid if mermaid else graphs.draw_flow
    emit({"flow": spec.name, "steps": about, "mermaid": graphs.draw_mermaid(steps)}, as_json=json, text=draw(steps))


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
    wait: WaitOption = False,
    timeout: TimeoutOption = 86_400,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Start a run of a flow, or take one up at a step with --resume RUN --from STEP.

    With --wait it ends with 0 when the run succeeded, 1 when it did not, 124 when it took too long.
    """
    if resume is not None or from_ is not None:
        created = _resume_run(url, what, scope, resume, from_, run_id)
    else:
        request = _run_request(what, scope or [], run_id)
        created = ask_flows(url, lambda client: client.create(request))
    name = created["runId"]
    if not wait:
        again = "" if created["created"] else ", as it was before"
        text = f"run {name} is {created['status']}{again}; `penstock flow show {name}` shows it"
        emit(created, as_json=json, text=text)
        return
    told = _wait_for_end(url, name, timeout)
    emit(told, as_json=json, text=_run_summary(told))
    if told["status"] != "SUCCEEDED":
        raise typer.Exit(1)


@app.command("ls")
def list_runs(
    flow: Annotated[str | None, typer.Argument(help="Only of this flow.", metavar="[FLOW]")] = None,
    status: Annotated[str | None, typer.Option(help="Only those that stand so, e.g. FAILED.")] = None,
    since: Annotated[str | None, typer.Option(help="Made then or later, e.g. 2026-01-31T00:00:00Z.")] = None,
    limit: LimitOption = 20,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List runs, the latest first."""
    told = ask_flows(url, lambda client: client.runs(flow=flow, status=status, since=since, limit=limit))
    rows = [_run_row(one) for one in told["runs"]]
    head = ["run", "flow", "status", "created", "seconds", "by", "reason"]
    text = table([head, *rows]) if rows else "no runs; `penstock flow run FLOW` starts one"
    if told["next"]:
        print_message(f"there are more than {limit}; --limit shows them")
    emit(told, as_json=json, text=text)


@app.command()
def show(
    run_id: RunArgument,
    why: Annotated[str | None, typer.Option("--why", help="Tell why this step is where it is.", metavar="STEP")] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show where a run and its steps stand; with --why, what a step waits for."""
    if why is not None:
        told = ask_flows(url, lambda client: client.why(run_id, why))
        hint = f"\nhint: {printable(told['hint'])}" if told["hint"] else ""
        emit(told, as_json=json, text=f"{why} is {told['status']}: {printable(told['why'])}{hint}")
        return
    told = ask_flows(url, lambda client: client.run(run_id))
    emit(told, as_json=json, text=_run_text(told))


@app.command()
def logs(
    run_id: RunArgument,
    step_id: StepArgument,
    attempt: Annotated[int | None, typer.Option(help="Only of this one.", min=1)] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a step told while it ran."""
    told = ask_flows(url, lambda client: _all_logs(client, run_id, step_id, attempt))
    lines = [
        f"{time_text(one['at'])}  {one['attempt']}  {one['level']:<7}  {printable(one['message'])}"
        for one in told["lines"]
    ]
    emit(told, as_json=json, text="\n".join(lines) if lines else f"{step_id} has told nothing")


@app.command()
def retry(
    run_id: RunArgument,
    step_id: Annotated[str | None, typer.Argument(help="Only this one.", metavar="[STEP]")] = None,
    url: UrlOption = None,
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
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Do without a step: what comes after it has its turn."""
    told = ask_flows(url, lambda client: client.skip(run_id, step_id, reason))
    emit(told, as_json=json, text=f"{step_id} of run {run_id} is {told['status']}")


@app.command()
def cancel(run_id: RunArgument, reason: ReasonOption = None, url: UrlOption = None, json: JsonOption = False) -> None:
    """Stop a run: what waits does not begin, what is under way is told."""
    told = ask_flows(url, lambda client: client.cancel(run_id, reason))
    emit(told, as_json=json, text=f"run {run_id} is {told['status']}")


@schedule_app.command("ls")
def list_schedules(url: UrlOption = None, json: JsonOption = False) -> None:
    """Show when flows run next, and when they ran last."""
    told = ask_flows(url, lambda client: client.flows())
    for file, trouble in told["troubles"].items():
        print_message(printable(f"{file}: {trouble}"))
    scheduled = [one for one in told["flows"] if one["schedule"]]
    rows = [_schedule_row(one["name"], one["schedule"]) for one in scheduled]
    head = ["flow", "cron", "time zone", "next", "last run", "note"]
    text = table([head, *rows]) if rows else "no flow runs by itself; give one a `schedule`"
    emit(scheduled, as_json=json, text=text)


@schedule_app.command()
def pause(flow: FlowArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Do not start a flow by itself for the time being."""
    told = ask_flows(url, lambda client: client.pause(flow))
    emit(
        told, as_json=json, text=f"{flow} no longer runs by itself; `penstock flow schedule resume {flow}` changes that"
    )


@schedule_app.command()
def resume(flow: FlowArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Start a flow by itself again; what passed meanwhile is not caught up."""
    told = ask_flows(url, lambda client: client.unpause(flow))
    emit(told, as_json=json, text=f"{flow} runs by itself again, next: {_next_start(told['schedule'])}")


def _load_target(target: str) -> Iterator[_LoadedFile]:
    from penstock.flows.definition.catalogue import flow_files

    path = Path(target)
    if not path.is_dir():
        yield _load_file(target)
        return
    files = flow_files(path)
    if not files:
        none = NotFound("NO_FLOWS", "there are no *.yaml in it", hint="flows are files such as market-report.yaml")
        yield _LoadedFile(target, [], none)
    yield from (_load_file(str(file)) for file in files)


def _check_nesting(files: Iterable[_LoadedFile]) -> Iterator[_LoadedFile]:
    """Yield *files*; one whose flow would run within itself, through flows of the others, with that error."""
    from penstock.flows.definition.graph import find_recursion

    known: dict[str, FlowSpec] = {}
    for file in files:
        named = known | {flow.name: flow for flow in file.flows}
        error = next(filter(None, (find_recursion(flow, named) for flow in file.flows)), None)
        if error is None:
            known = named
        yield file if error is None else _LoadedFile(file.place, [], error)


def _load_file(target: str) -> _LoadedFile:
    from penstock.flows.config import FlowsSection
    from penstock.flows.definition.catalogue import SUFFIXES
    from penstock.flows.definition.loader import load_file, load_module
    from penstock.flows.kinds.registry import open_catalogue

    path, checks = Path(target), open_catalogue(FlowsSection()).input_checks
    try:
        if path.suffix in SUFFIXES or (path.is_file() and path.suffix != ".py"):
            return _LoadedFile(target, [load_file(path, checks)])
        return _LoadedFile(target, list(load_module(target, checks).flows))
    except PenstockError as error:
        return _LoadedFile(target, [], error)


def _choose_flow(target: str, name: str | None) -> "FlowSpec":
    """Return the only flow of *target*, or the one with that *name*."""
    files = list(_load_target(target))
    found = {flow.name: flow for file in files for flow in file.flows}
    if name in found:
        return found[name]
    if error := next((file.error for file in files if file.error), None):
        raise error
    names = ", ".join(found) or "none"
    if name is not None:
        raise NotFound("FLOW_NOT_FOUND", f"there is no flow {name!r} in {target}", hint=f"there are: {names}")
    if len(found) != 1:
        raise Invalid("MISSING_FLOW", f"there are {len(found)} flows in {target}", hint=f"name one of: {names}")
    return next(iter(found.values()))


def _validation_rows(file: _LoadedFile) -> list[dict[str, Any]]:
    if file.error is not None:
        return [{"file": file.place, "valid": False, "error": file.error.as_dict()}]
    return [{"file": file.place, "valid": True, "flow": flow.name, "steps": len(flow.steps)} for flow in file.flows]


def _validation_text(file: _LoadedFile) -> str:
    if file.error is None:
        flows = "; ".join(f"{flow.name}, {_step_count(len(flow.steps))}" for flow in file.flows)
        return f"ok   {file.place}: {flows or 'no flows'}"
    told = file.error.message
    if file.error.hint and "problems" not in file.error.details:  # those name what to do each
        told = f"{told} ({file.error.hint})"
    lines = [printable(line.removeprefix(f"{file.place}: ")) for line in told.splitlines()]
    return "\n".join(f"bad  {line if line.startswith(file.place) else f'{file.place}: {line}'}" for line in lines)


def _step_count(number: int) -> str:
    return "1 step" if number == 1 else f"{number:,} steps"


def _run_request(what: str | None, scope: list[str], run_id: str | None) -> dict[str, Any]:
    """Return the request for a flow by its name, or for the steps of a file; *scope* overrides the file's own."""
    if what is None:
        raise Invalid("MISSING_FLOW", "it takes a flow to run", hint="`penstock flow run NAME`, or the FILE of one")
    given = dict(map(_parse_scope, scope))
    request: dict[str, Any] = {"runId": run_id} if run_id else {}
    if Path(what).suffix not in _FLOW_SUFFIXES:
        return {**request, "flow": what, "scope": given}
    spec = _choose_flow(what, None)
    written = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    policy = {"policy": written["policy"]} if "policy" in written else {}
    return {**request, "steps": written.get("steps", {}), "scope": {**spec.scope, **given}, **policy}


def _parse_scope(text: str) -> tuple[str, Any]:
    import json

    key, is_given, value = text.partition("=")
    if not is_given or not key:
        raise Invalid("BAD_SCOPE", f"{text!r} is not KEY=VALUE", hint="e.g. --scope day=2026-01-31 --scope limit=5")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _resume_run(
    url: str | None, what: str | None, scope: list[str] | None, run_id: str | None, step_id: str | None, new: str | None
) -> dict[str, Any]:
    if run_id is None or step_id is None or what is not None or scope:
        said = "a run is taken up with --resume RUN and --from STEP, and nothing else of its own"
        raise Invalid("BAD_RESUME", said, hint="flow and scope are those of the run")
    return ask_flows(url, lambda client: client.resume(run_id, step_id, new))


def _wait_for_end(url: str | None, run_id: str, timeout: float) -> dict[str, Any]:
    """Return the run when it has ended; until then show its progress on a terminal."""
    from penstock.flows.model import RUN

    async def look(client: "FlowClient") -> dict[str, Any] | None:
        told = await client.run(run_id, steps=False)
        if told["status"] in RUN.groups["ended"]:
            return await client.run(run_id)
        _show_progress(bar, told)
        return None

    shown_by = f"penstock flow show {run_id}"
    with closing(ProgressBar(run_id)) as bar:
        return ask_flows(url, lambda client: wait_for_run(lambda: look(client), run_id, timeout, shown_by))


def _show_progress(bar: ProgressBar, told: dict[str, Any]) -> None:
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


def _schedule_row(name: str, schedule: dict[str, Any]) -> list[str]:
    last, note = schedule["lastRun"] or "never", schedule["note"] or ""
    return [name, schedule["cron"], schedule["timezone"], _next_start(schedule), last, note]


def _next_start(schedule: dict[str, Any]) -> str:
    if schedule["paused"]:
        return "paused"
    return f"{time_text(schedule['next'][0])}" if schedule["next"] else "never"


def _run_row(one: dict[str, Any]) -> list[str]:
    created, seconds = time_text(one["createdAt"]), _seconds(one["startedAt"], one["finishedAt"])
    reason = _short(one["reason"] or "")
    return [one["runId"], one["flow"] or "", one["status"], created, seconds, one["createdBy"], reason]


def _run_text(told: dict[str, Any]) -> str:
    """Return a run and its steps as text."""
    steps = list(told["steps"].items())
    head = ["step", "kind", "status", "attempts", "seconds", "worker", "note"]
    lines = [_run_summary(told)]
    if steps:
        lines += ["", table([head, *(_step_row(name, step) for name, step in steps[:_STEPS_SHOWN])])]
    if len(steps) > _STEPS_SHOWN:
        lines.append(f"… and {len(steps) - _STEPS_SHOWN:,} more; --json has them all")
    return "\n".join(lines)


def _run_summary(told: dict[str, Any]) -> str:
    """Return the status of a run, its failed steps, and the next command to type."""
    flow = f"  {told['flow']}" if told["flow"] else ""
    counts = ", ".join(f"{number:,} {status}" for status, number in sorted(told["counts"].items()))
    lines = [f"{told['status']}  {told['runId']}{flow}  {counts}".rstrip()]
    if told["reason"]:
        lines.append(printable(told["reason"]))
    failed = [name for name, step in (told["steps"] or {}).items() if step["status"] == "FAILED"]
    for name in failed[:5]:
        error = told["steps"][name]["error"] or {"code": "", "message": ""}
        lines.append(printable(f"{name}: {error['code']}: {error['message']}"))
    if failed and told["status"] == "FAILED":
        lines.append(f"hint: mend the cause, then `penstock flow retry {told['runId']}`")
    return "\n".join(lines)


def _step_row(name: str, step: dict[str, Any]) -> list[str]:
    seconds = _seconds(step["startedAt"], step["finishedAt"])
    return [name, step["kind"], step["status"], str(step["attempts"]), seconds, step["worker"] or "", _note(step)]


def _note(step: dict[str, Any]) -> str:
    """Return what a step waits for, its error, its reason or its artifacts."""
    if step["status"] == "PENDING" and step["dependsOn"]:
        return _short(f"after {', '.join(step['dependsOn'])}")
    if step["error"] and step["status"] != "SUCCEEDED":
        return _short(f"{step['error']['code']}: {step['error']['message']}")
    if step["reason"]:
        return _short(step["reason"])
    return _short(", ".join(one["name"] for one in step["artifacts"]))


def _seconds(started: str | None, finished: str | None) -> str:
    if started is None or finished is None:
        return ""
    return f"{max(0.0, (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()):.1f}"


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _NOTE_WIDTH else f"{shown[: _NOTE_WIDTH - 1]}…"
