"""`penstock flow validate|graph`: look at flows as they are written, without running anything."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import JsonOption, emit, printable
from penstock.kernel.errors import Invalid, NotFound, PenstockError

if TYPE_CHECKING:
    from penstock.flows.definition.spec import FlowSpec

_WHAT = "a YAML file, a folder of them, a Python file, or a module"
TargetsArgument = Annotated[list[str], typer.Argument(help=f"Each {_WHAT}.", metavar="TARGET…")]
TargetArgument = Annotated[str, typer.Argument(help=f"{_WHAT.capitalize()}.", metavar="TARGET")]


@dataclass(frozen=True)
class _Looked:
    """What was found in one place."""

    place: str
    flows: "list[FlowSpec]"
    error: PenstockError | None = None


def validate(targets: TargetsArgument, json: JsonOption = False) -> None:
    """Check flows; one line for each, and every mistake with its line and the step it is in.

    Ends with 0 when all are good, 2 when any is not.
    """
    looked = list(_together(one for target in targets for one in _looked_at(target)))
    emit([row for one in looked for row in _rows(one)], as_json=json, text="\n".join(map(_line, looked)))
    if any(one.error for one in looked):
        raise typer.Exit(2)


def graph(
    target: TargetArgument,
    flow: Annotated[str | None, typer.Argument(help="Which flow, where there are several.", metavar="[FLOW]")] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
    json: JsonOption = False,
) -> None:
    """Draw a flow: each step below those it waits for."""
    from penstock.flows.definition import render as graphs

    spec = chosen(target, flow)
    steps = spec.steps
    about = [{"id": name, **step.model_dump(mode="json", by_alias=True)} for name, step in steps.items()]
    draw = graphs.mermaid if mermaid else graphs.drawing
    emit({"flow": spec.name, "steps": about, "mermaid": graphs.mermaid(steps)}, as_json=json, text=draw(steps))


def _looked_at(target: str) -> Iterator[_Looked]:
    from penstock.flows.definition.catalogue import flow_files

    path = Path(target)
    if not path.is_dir():
        yield _loaded(target)
        return
    files = flow_files(path)
    if not files:
        none = NotFound("NO_FLOWS", "there are no *.yaml in it", hint="flows are files such as market-report.yaml")
        yield _Looked(target, [], none)
    yield from (_loaded(str(file)) for file in files)


def _together(looked: Iterable[_Looked]) -> Iterator[_Looked]:
    """The same beside each other: flows that lead back to themselves are wrong, each good by itself."""
    from penstock.flows.definition.graph import within_itself

    known: dict[str, FlowSpec] = {}
    for one in looked:
        errors = (within_itself(flow, known | {flow.name: flow for flow in one.flows}) for flow in one.flows)
        error = next((error for error in errors if error), None)
        if error is None:
            known |= {flow.name: flow for flow in one.flows}
        yield one if error is None else _Looked(one.place, [], error)


def _loaded(target: str) -> _Looked:
    from penstock.flows.definition.catalogue import SUFFIXES, load_file, load_module
    from penstock.flows.kinds.registry import check_inputs

    path = Path(target)
    try:
        if path.suffix in SUFFIXES or (path.is_file() and path.suffix != ".py"):
            return _Looked(target, [load_file(path, check_inputs)])
        return _Looked(target, list(load_module(target, check_inputs).flows))
    except PenstockError as error:
        return _Looked(target, [], error)


def chosen(target: str, name: str | None) -> "FlowSpec":
    """The one flow that is meant; an error where that is none, or one of several."""
    looked = list(_looked_at(target))
    found = {flow.name: flow for one in looked for flow in one.flows}
    if name in found:
        return found[name]
    if error := next((one.error for one in looked if one.error), None):
        raise error
    names = ", ".join(found) or "none"
    if name is not None:
        raise NotFound("FLOW_NOT_FOUND", f"there is no flow {name!r} in {target}", hint=f"there are: {names}")
    if len(found) != 1:
        raise Invalid("WHICH_FLOW", f"there are {len(found)} flows in {target}", hint=f"name one of: {names}")
    return next(iter(found.values()))


def _rows(looked: _Looked) -> list[dict[str, Any]]:
    if looked.error is not None:
        return [{"file": looked.place, "valid": False, "error": looked.error.as_dict()}]
    return [{"file": looked.place, "valid": True, "flow": flow.name, "steps": len(flow.steps)} for flow in looked.flows]


def _line(looked: _Looked) -> str:
    if looked.error is None:
        flows = "; ".join(f"{flow.name}, {_steps(len(flow.steps))}" for flow in looked.flows)
        return f"ok   {looked.place}: {flows or 'no flows'}"
    told = looked.error.message
    if looked.error.hint and "problems" not in looked.error.details:  # those name what to do each
        told = f"{told} ({looked.error.hint})"
    lines = [printable(line.removeprefix(f"{looked.place}: ")) for line in told.splitlines()]
    return "\n".join(f"bad  {line if line.startswith(looked.place) else f'{looked.place}: {line}'}" for line in lines)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"
