"""`penstock flow`: validate and draw flows in files; run and schedule flows at a running server."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from penstock.cli.completion import complete_from_server
from penstock.cli.server_client import ask_flows, wait_for_run
from penstock.cli.suggestion import make_pasteable
from penstock.cli.terminal.command_group import CommandGroup
from penstock.cli.terminal.options import (
    JsonOption,
    LimitOption,
    ReasonOption,
    RunArgument,
    TimeoutOption,
    UrlOption,
    WaitOption,
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
from penstock.cli.terminal.style import colour_status
from penstock.flows.contract import FlowRunStatus
from penstock.kernel.errors import Invalid, NotFound, PenstockError

if TYPE_CHECKING:
    from penstock.flows.client import FlowClient
    from penstock.flows.definition.spec import FlowSpec

app = CommandGroup(help="Run workflows: steps with dependencies, retries and schedules.")
artifact_app = CommandGroup(help="List and download the artifacts of a run.")
schedule_app = CommandGroup(help="List, pause and resume the schedules of flows.")
app.add_typer(artifact_app, name="artifact")
app.add_typer(schedule_app, name="schedule")
_TARGET = "A YAML or JSON file, a folder of them, a Python file, or a module."
_complete_flow = complete_from_server(
    lambda: ask_flows, lambda client, _: client.flows(), lambda found: [flow["name"] for flow in found["flows"]]
)
FlowArgument = Annotated[str, typer.Argument(help="Name of the flow.", metavar="FLOW", autocompletion=_complete_flow)]
RunOrFlowArgument = Annotated[
    str, typer.Argument(help="Id of a run, or name of a flow.", metavar="RUN|FLOW", autocompletion=_complete_flow)
]
StepArgument = Annotated[str, typer.Argument(help="Id of the step.", metavar="STEP")]
_FLOW_SUFFIXES = {".yaml", ".yml", ".json", ".py"}
_RUNS_SHOWN = 10  # runs of one flow
_STEPS_SHOWN = 200  # steps of one run; --json has all
_NOTE_WIDTH = 100


@dataclass(frozen=True)
class _LoadedFile:
    """The flows of one file or module, or the error in it."""

    path: str
    flows: "list[FlowSpec]"
    error: PenstockError | None = None


@app.command()
def validate(
    targets: Annotated[list[str], typer.Argument(help=_TARGET, metavar="TARGET")],
    json: JsonOption = False,
) -> None:
    """Validate flows, and print every error with its line and step.

    The exit code is 0 if all flows are valid, 2 otherwise.
    """
    files = list(_check_nesting(file for target in targets for file in _load_target(target)))
    rows = [row for file in files for row in _make_validation_rows(file)]
    emit(rows, as_json=json, text="\n".join(map(_format_validation, files)))
    if any(file.error for file in files):
        raise typer.Exit(2)


@app.command()
def graph(
    target: Annotated[str, typer.Argument(help=_TARGET, metavar="TARGET")],
    flow: Annotated[
        str | None, typer.Argument(help="Name of the flow, if the target has several.", metavar="FLOW")
    ] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
    json: JsonOption = False,
) -> None:
    """Draw a flow: each step below its dependencies."""
    from penstock.flows.definition import render as graphs

    spec = _choose_flow(target, flow)
    steps = [{"id": name, **step.model_dump(mode="json", by_alias=True)} for name, step in spec.steps.items()]
    draw = graphs.draw_mermaid if mermaid else graphs.draw_flow
    data = {"flow": spec.name, "steps": steps, "mermaid": graphs.draw_mermaid(spec.steps)}
    emit(data, as_json=json, text=draw(spec.steps))


@app.command("ls")
def list_flows(url: UrlOption = None, json: JsonOption = False) -> None:
    """List the flows of a server, with their schedules and last runs."""
    found = ask_flows(url, lambda client: client.flows())
    _print_file_errors(found)
    rows = [_make_flow_row(flow) for flow in found["flows"]]
    head = ["flow", "steps", "schedule", "next start", "last run", "status"]
    text = format_table([head, *rows]) if rows else "no flows; flows.folder of the server contains none"
    emit(found, as_json=json, text=text)


@app.command()
def show(
    run_id: RunOrFlowArgument,
    why: Annotated[
        str | None, typer.Option("--why", metavar="STEP", help="Explain the status of one step of the run.")
    ] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show a run and its steps, or a flow and its last runs.

    With --why STEP, explain why the step of the run has its present status.
    """
    if why is not None:
        explanation = ask_flows(url, lambda client: _explain_step(client, run_id, why))
        hint = f"\nhint: {make_printable(make_pasteable(explanation['hint'], url=url))}" if explanation["hint"] else ""
        text = f"{why} is {explanation['status']}: {make_printable(explanation['why'])}{hint}"
        emit(explanation, as_json=json, text=text)
        return
    found = ask_flows(url, lambda client: _read_run_or_flow(client, run_id))
    emit(found, as_json=json, text=_format_run(found, url) if "runId" in found else _format_flow(found))


@app.command("runs")
def list_runs(
    flow: Annotated[
        str | None, typer.Argument(help="Only runs of this flow.", metavar="FLOW", autocompletion=_complete_flow)
    ] = None,
    status: Annotated[FlowRunStatus | None, typer.Option(help="Only runs with this status.")] = None,
    since: Annotated[
        datetime | None, typer.Option(metavar="TIME", help="Only runs created since, e.g. 2026-01-31T00:00:00Z.")
    ] = None,
    limit: LimitOption = 20,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List runs, newest first."""
    filters = {
        "flow": flow,
        "status": status,
        "since": None if since is None else _convert_to_utc(since),
        "limit": limit,
    }
    page = ask_flows(url, lambda client: client.runs(**filters))
    rows = [_make_run_row(run) for run in page["runs"]]
    head = ["run", "flow", "status", "created", "seconds", "by", "reason"]
    text = format_table([head, *rows]) if rows else "no runs; `penstock flow run FLOW` starts one"
    emit(page, as_json=json, text=append_more_note(text, has_more=page["next"] is not None))


@app.command()
def run(
    target: Annotated[
        str | None, typer.Argument(metavar="FLOW", help="Name of a flow of the server, or a file that contains a flow.")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="KEY=VALUE", help="Value of the scope, repeatable; JSON values are parsed."),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run-id", metavar="RUN", help="Id of the run; a repeated request creates no second run."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Repeat this run from the step of --from.")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="STEP", help="First step to repeat; results before it are reused.")
    ] = None,
    wait: WaitOption = False,
    timeout: TimeoutOption = 86_400,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Start a run of a flow, or repeat a run from a step with --resume RUN --from STEP.

    With --wait the exit code is 0 if the run succeeded, 1 if it did not, 124 if the timeout passed.
    """
    if resume is not None or from_ is not None:
        created = _resume_run(url, target, scope, resume, from_, run_id)
    else:
        request = _make_run_request(target, scope or [], run_id)
        created = ask_flows(url, lambda client: client.create(request))
    name = created["runId"]
    if not wait:
        already = "" if created["created"] else ", it already existed"
        hint = make_pasteable(f"`penstock flow show {name}` shows it", url=url)
        emit(created, as_json=json, text=f"run {name} is {created['status']}{already}; {hint}")
        return
    ended = _wait_for_end(url, name, timeout)
    emit(ended, as_json=json, text=_format_run_summary(ended, url))
    if ended["status"] != "SUCCEEDED":
        raise typer.Exit(1)


@app.command()
def logs(
    run_id: RunArgument,
    step_id: Annotated[str | None, typer.Argument(help="Only lines of this step.", metavar="STEP")] = None,
    attempt: Annotated[int | None, typer.Option(metavar="N", help="Only lines of this attempt.", min=1)] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Print the log lines of a run, oldest first, or those of one step."""
    if step_id is None and attempt is not None:
        raise Invalid("USAGE", "--attempt needs a step", hint=f"penstock flow logs {run_id} STEP --attempt {attempt}")
    found = ask_flows(url, lambda client: _read_all_logs(client, run_id, step_id, attempt))
    lines = [_format_log(line, step_id) for line in found["lines"]]
    subject = f"run {run_id}" if step_id is None else f"step {step_id}"
    emit(found, as_json=json, text="\n".join(lines) if lines else f"{subject} has logged nothing")


@app.command()
def retry(
    run_id: RunArgument,
    step_id: Annotated[str | None, typer.Argument(help="Only this step.", metavar="STEP")] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Retry the failed steps of a run, and the steps that were cancelled because of them."""
    result = ask_flows(url, lambda client: client.retry(run_id, step_id))
    emit(result, as_json=json, text=f"retrying: {', '.join(result['steps'])}")


@app.command()
def skip(
    run_id: RunArgument,
    step_id: StepArgument,
    reason: ReasonOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Skip a step, so that the steps after it can run."""
    result = ask_flows(url, lambda client: client.skip(run_id, step_id, reason))
    emit(result, as_json=json, text=f"step {step_id} of run {run_id} is {result['status']}")


@app.command()
def cancel(run_id: RunArgument, reason: ReasonOption = None, url: UrlOption = None, json: JsonOption = False) -> None:
    """Cancel a run: waiting steps do not start, and workers of running steps are notified."""
    result = ask_flows(url, lambda client: client.cancel(run_id, reason))
    emit(result, as_json=json, text=f"run {run_id} is {result['status']}")


@artifact_app.command("ls")
def list_artifacts(
    run_id: RunArgument,
    step_id: Annotated[str | None, typer.Argument(help="Only artifacts of this step.", metavar="STEP")] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List the artifacts of a run."""
    steps = ask_flows(url, lambda client: client.run(run_id))["steps"]
    if step_id is not None and step_id not in steps:
        raise NotFound("STEP_NOT_FOUND", f"run {run_id} has no step {step_id}", hint=f"steps: {', '.join(steps)}")
    artifacts = [
        {"step": name, **artifact}
        for name, step in steps.items()
        if step_id in (None, name)
        for artifact in step["artifacts"]
    ]
    rows = [[artifact["step"], artifact["name"], f"{artifact['size']:,}", artifact["sha256"]] for artifact in artifacts]
    text = format_table([["step", "artifact", "bytes", "sha256"], *rows]) if rows else f"run {run_id} has no artifacts"
    emit({"artifacts": artifacts}, as_json=json, text=text)


@artifact_app.command("get")
def get_artifact(
    run_id: RunArgument,
    step_id: StepArgument,
    name: Annotated[str, typer.Argument(help="Name of the artifact.", metavar="NAME")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write.", show_default="standard output"),
    ] = None,
    url: UrlOption = None,
) -> None:
    """Write an artifact to a file or to standard output."""
    file = None if output is None or str(output) == "-" else output

    async def download(client: "FlowClient") -> int:
        size = 0
        async with client.download(run_id, step_id, name) as artifact:
            with _open_output(file) as stream:
                async for piece in artifact.pieces:
                    size += stream.write(piece)
                stream.flush()
        return size

    size = ask_flows(url, download)
    if file is not None:
        print_message(f"{file}: {size:,} bytes")


@schedule_app.command("ls")
def list_schedules(url: UrlOption = None, json: JsonOption = False) -> None:
    """List the scheduled flows with their next and last runs."""
    found = ask_flows(url, lambda client: client.flows())
    _print_file_errors(found)
    scheduled = [flow for flow in found["flows"] if flow["schedule"]]
    rows = [_make_schedule_row(flow["name"], flow["schedule"]) for flow in scheduled]
    head = ["flow", "cron", "time zone", "next start", "last run", "note"]
    text = format_table([head, *rows]) if rows else "no flow has a schedule"
    emit(scheduled, as_json=json, text=text)


@schedule_app.command()
def pause(flow: FlowArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Pause the schedule of a flow; runs can still be started by hand."""
    result = ask_flows(url, lambda client: client.pause(flow))
    hint = make_pasteable(f"`penstock flow schedule resume {flow}` resumes it", url=url)
    emit(result, as_json=json, text=f"the schedule of {flow} is paused; {hint}")


@schedule_app.command()
def resume(flow: FlowArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Resume the schedule of a flow; starts that were missed are not caught up."""
    result = ask_flows(url, lambda client: client.unpause(flow))
    text = f"the schedule of {flow} is resumed, next start: {_format_next_start(result['schedule'])}"
    emit(result, as_json=json, text=text)


def _load_target(target: str) -> Iterator[_LoadedFile]:
    from penstock.flows.definition.catalogue import list_flow_files

    path = Path(target)
    if not path.is_dir():
        yield _load_file(target)
        return
    files = list_flow_files(path)
    if not files:
        none = NotFound("NO_FLOWS", "the folder contains no *.yaml file", hint="a flow is a file such as nightly.yaml")
        yield _LoadedFile(target, [], none)
    yield from (_load_file(str(file)) for file in files)


def _check_nesting(files: Iterable[_LoadedFile]) -> Iterator[_LoadedFile]:
    """Yield *files*, with an error where a flow would run itself, directly or through flows of other files."""
    from penstock.flows.definition.graph import find_recursion

    flows: dict[str, FlowSpec] = {}
    for file in files:
        combined = flows | {flow.name: flow for flow in file.flows}
        error = next(filter(None, (find_recursion(flow, combined) for flow in file.flows)), None)
        if error is None:
            flows = combined
        yield file if error is None else _LoadedFile(file.path, [], error)


def _load_file(target: str) -> _LoadedFile:
    from penstock.flows.config import FlowsSection
    from penstock.flows.definition.catalogue import SUFFIXES
    from penstock.flows.definition.loader import load_file, load_module
    from penstock.flows.kinds.registry import open_catalogue

    path, checks = Path(target), open_catalogue(FlowsSection()).input_checks
    if not path.exists() and (path.suffix in _FLOW_SUFFIXES or len(path.parts) > 1):
        return _LoadedFile(target, [], NotFound("FILE_MISSING", f"there is no file {target}", hint="check its path"))
    try:
        if path.suffix in SUFFIXES or (path.is_file() and path.suffix != ".py"):
            return _LoadedFile(target, [load_file(path, checks)])
        return _LoadedFile(target, list(load_module(target, checks).flows))
    except PenstockError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == target:
            hint = "a module is searched on Python's path and in the current folder"
            error = NotFound("FILE_MISSING", f"there is no file, folder or module {target}", hint=hint)
        return _LoadedFile(target, [], error)


def _choose_flow(target: str, name: str | None) -> "FlowSpec":
    """Return the flow of *target* called *name*, or its only flow."""
    files = list(_load_target(target))
    flows = {flow.name: flow for file in files for flow in file.flows}
    if name in flows:
        return flows[name]
    if error := next((file.error for file in files if file.error), None):
        raise error
    names = ", ".join(flows) or "none"
    if name is not None:
        raise NotFound("FLOW_NOT_FOUND", f"{target} contains no flow {name!r}", hint=f"its flows: {names}")
    if len(flows) != 1:
        raise Invalid("MISSING_FLOW", f"{target} contains {len(flows)} flows", hint=f"add the name of one: {names}")
    return next(iter(flows.values()))


def _make_validation_rows(file: _LoadedFile) -> list[dict[str, Any]]:
    if file.error is not None:
        return [{"file": file.path, "valid": False, "error": file.error.as_dict()}]
    return [{"file": file.path, "valid": True, "flow": flow.name, "steps": len(flow.steps)} for flow in file.flows]


def _format_validation(file: _LoadedFile) -> str:
    if file.error is None:
        flows = "; ".join(f"{flow.name}, {_format_step_count(len(flow.steps))}" for flow in file.flows)
        return f"ok   {file.path}: {flows or 'no flows'}"
    message = file.error.message
    if file.error.hint and "problems" not in file.error.details:  # each problem has its own hint
        message = f"{message} ({file.error.hint})"
    lines = [make_printable(line.removeprefix(f"{file.path}: ")) for line in message.splitlines()]
    return "\n".join(f"bad  {line if line.startswith(file.path) else f'{file.path}: {line}'}" for line in lines)


def _format_step_count(number: int) -> str:
    return "1 step" if number == 1 else f"{number:,} steps"


@contextmanager
def _open_output(file: Path | None) -> Iterator[BinaryIO]:
    """Yield standard output, or a stream into *file*, which is replaced only when all is written."""
    if file is None:
        yield sys.stdout.buffer
        return
    part = file.with_name(f".{file.name}.part")
    try:
        with part.open("wb") as stream:
            yield stream
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _make_run_request(target: str | None, scope: list[str], run_id: str | None) -> dict[str, Any]:
    """Return the request for a named flow, or for the steps of a file; *scope* overrides the scope of the file."""
    if target is None:
        hint = "specify the name of a flow, or a file: `penstock flow run FLOW`; `penstock flow ls` lists the flows"
        raise Invalid("MISSING_FLOW", "no flow is specified", hint=hint)
    values = dict(map(_parse_scope, scope))
    request: dict[str, Any] = {"runId": run_id} if run_id else {}
    if Path(target).suffix not in _FLOW_SUFFIXES:
        return {**request, "flow": target, "scope": values}
    spec = _choose_flow(target, None)
    document = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    policy = {"policy": document["policy"]} if "policy" in document else {}
    return {**request, "steps": document.get("steps", {}), "scope": {**spec.scope, **values}, **policy}


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
    url: str | None,
    target: str | None,
    scope: list[str] | None,
    run_id: str | None,
    step_id: str | None,
    new_run_id: str | None,
) -> dict[str, Any]:
    if run_id is None or step_id is None or target is not None or scope:
        message = "--resume RUN and --from STEP belong together, and exclude a flow and --scope"
        raise Invalid("BAD_RESUME", message, hint="the new run has the flow and the scope of RUN")
    return ask_flows(url, lambda client: client.resume(run_id, step_id, new_run_id))


async def _explain_step(client: "FlowClient", run_id: str, step_id: str) -> dict[str, Any]:
    """Return why the step has its status; NotFound names the run if that is what does not exist."""
    try:
        return await client.why(run_id, step_id)
    except NotFound:
        await client.run(run_id, steps=False)
        raise


async def _read_run_or_flow(client: "FlowClient", name: str) -> dict[str, Any]:
    """Return the run *name*, else the flow *name* with its last runs."""
    try:
        return await client.run(name)
    except NotFound as no_run:
        try:
            flow = await client.flow(name)
        except NotFound:
            hint = "`penstock flow runs` lists runs, `penstock flow ls` lists flows"
            raise NotFound(no_run.code, f"there is no run and no flow {name!r}", hint=hint) from None
        return {**flow, "runs": (await client.runs(flow=name, limit=_RUNS_SHOWN))["runs"]}


def _wait_for_end(url: str | None, run_id: str, timeout: float) -> dict[str, Any]:
    """Return the run when it has ended; until then show its progress on a terminal."""
    from penstock.flows.model import RUN

    async def poll(client: "FlowClient") -> dict[str, Any] | None:
        run = await client.run(run_id, steps=False)
        if run["status"] in RUN.groups["ended"]:
            return await client.run(run_id)
        _show_progress(bar, run)
        return None

    shown_by = f"penstock flow show {run_id}"
    with closing(ProgressBar(run_id)) as bar:
        return ask_flows(url, lambda client: wait_for_run(lambda: poll(client), run_id, timeout, shown_by))


def _show_progress(bar: ProgressBar, run: dict[str, Any]) -> None:
    counts = run["counts"]
    total = sum(counts.values())
    ended = total - sum(counts.get(name, 0) for name in ("PENDING", "READY", "RUNNING"))
    steps = f"{ended:,}/{total:,} steps, {counts.get('RUNNING', 0):,} running, {counts.get('READY', 0):,} ready"
    bar.show(f"{run['status']}, {steps}", part=ended / total if total else None)


async def _read_all_logs(client: "FlowClient", run_id: str, step_id: str | None, attempt: int | None) -> dict[str, Any]:
    """Return all log lines of a run, or of one step of it."""
    lines: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        if step_id is None:
            page = await client.run_logs(run_id, limit=1000, cursor=cursor)
        else:
            page = await client.logs(run_id, step_id, attempt=attempt, limit=1000, cursor=cursor)
        lines += page["lines"]
        cursor = page["next"]
        if cursor is None:
            return {**page, "lines": lines}


def _format_log(line: Mapping[str, Any], step_id: str | None) -> str:
    step = "" if step_id is not None else f"{line['stepId']}  "
    return f"{format_time(line['at'])}  {step}{line['attempt']}  {line['level']:<7}  {make_printable(line['message'])}"


def _print_file_errors(found: Mapping[str, Any]) -> None:
    for file, error in found["errors"].items():
        for line in error.splitlines():
            print_message(make_printable(line if line.startswith(file) else f"{file}: {line}"))


def _make_flow_row(flow: dict[str, Any]) -> list[str]:
    schedule, last = flow["schedule"], flow["latestRun"]
    cron, start = (schedule["cron"], _format_next_start(schedule)) if schedule else ("", "")
    run_id, status = (last["runId"], last["status"]) if last else ("never", "")
    return [flow["name"], str(flow["steps"]), cron, start, run_id, status]


def _format_flow(flow: dict[str, Any]) -> str:
    """Return a flow and its last runs as text."""
    lines = [f"{flow['name']}  {_format_step_count(flow['steps'])}  {flow['description']}".rstrip()]
    if schedule := flow["schedule"]:
        lines.append(f"schedule: {schedule['cron']} {schedule['timezone']}, next start: {_format_next_start(schedule)}")
    steps = flow["spec"].get("steps", {})
    rows = [[name, step["kind"], ", ".join(step.get("dependsOn", ()))] for name, step in steps.items()]
    lines += ["", format_table([["step", "kind", "depends on"], *rows])]
    runs = [_make_run_row(run) for run in flow["runs"]]
    head = ["run", "flow", "status", "created", "seconds", "by", "reason"]
    lines += ["", format_table([head, *runs]) if runs else f"no runs; `penstock flow run {flow['name']}` starts one"]
    return "\n".join(lines)


def _make_schedule_row(name: str, schedule: dict[str, Any]) -> list[str]:
    last, note = schedule["lastRun"] or "never", schedule["note"] or ""
    return [name, schedule["cron"], schedule["timezone"], _format_next_start(schedule), last, note]


def _format_next_start(schedule: dict[str, Any]) -> str:
    if schedule["paused"]:
        return "paused"
    return f"{format_time(schedule['next'][0])}" if schedule["next"] else "never"


def _make_run_row(run: dict[str, Any]) -> list[str]:
    created, seconds = format_time(run["createdAt"]), _format_seconds(run["startedAt"], run["finishedAt"])
    reason = _shorten(run["reason"] or "")
    return [run["runId"], run["flow"] or "", run["status"], created, seconds, run["createdBy"], reason]


def _format_run(run: dict[str, Any], url: str | None) -> str:
    """Return a run and its steps as text."""
    steps = list(run["steps"].items())
    head = ["step", "kind", "status", "attempts", "seconds", "worker", "note"]
    lines = [_format_run_summary(run, url)]
    if steps:
        lines += ["", format_table([head, *(_make_step_row(name, step) for name, step in steps[:_STEPS_SHOWN])])]
    if len(steps) > _STEPS_SHOWN:
        lines.append(f"… and {len(steps) - _STEPS_SHOWN:,} more steps; --json has all")
    return "\n".join(lines)


def _format_run_summary(run: dict[str, Any], url: str | None) -> str:
    """Return the status of a run, its failed steps, and the next command to type."""
    flow = f"  {run['flow']}" if run["flow"] else ""
    counts = ", ".join(f"{number:,} {status}" for status, number in sorted(run["counts"].items()))
    lines = [f"{colour_status(run['status'])}  {run['runId']}{flow}  {counts}".rstrip()]
    if run["reason"]:
        lines.append(make_printable(run["reason"]))
    failed = [name for name, step in (run["steps"] or {}).items() if step["status"] == "FAILED"]
    for name in failed[:5]:
        error = run["steps"][name]["error"] or {"code": "", "message": ""}
        lines.append(make_printable(f"{name}: {error['code']}: {error['message']}"))
    if failed and run["status"] == "FAILED":
        lines.append(make_pasteable(f"hint: fix the cause, then `penstock flow retry {run['runId']}`", url=url))
    return "\n".join(lines)


def _make_step_row(name: str, step: dict[str, Any]) -> list[str]:
    seconds = _format_seconds(step["startedAt"], step["finishedAt"])
    return [name, step["kind"], step["status"], str(step["attempts"]), seconds, step["worker"] or "", _make_note(step)]


def _make_note(step: dict[str, Any]) -> str:
    """Return what a step waits for, its error, its reason or its artifacts."""
    if step["status"] == "PENDING" and step["dependsOn"]:
        return _shorten(f"after {', '.join(step['dependsOn'])}")
    if step["error"] and step["status"] != "SUCCEEDED":
        return _shorten(f"{step['error']['code']}: {step['error']['message']}")
    if step["reason"]:
        return _shorten(step["reason"])
    return _shorten(", ".join(artifact["name"] for artifact in step["artifacts"]))


def _format_seconds(started: str | None, finished: str | None) -> str:
    if started is None or finished is None:
        return ""
    return f"{max(0.0, (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()):.1f}"


def _convert_to_utc(time: datetime) -> str:
    """Return *time* for the server; a time without an offset is in UTC."""
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).isoformat()


def _shorten(text: str) -> str:
    shown = make_printable(text)
    return shown if len(shown) <= _NOTE_WIDTH else f"{shown[: _NOTE_WIDTH - 1]}…"
