"""F15: loading and validation of flows from files and Python modules; errors have a file, a line and a column."""

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Self

from pydantic import model_validator

from penstock.flows.definition import schedule, validation
from penstock.flows.definition.python_dsl import Flow
from penstock.flows.definition.spec import FlowSpec
from penstock.flows.definition.validation import KindChecks
from penstock.flows.step import KindContext, MakeWorkers, ReportCheck, Workers
from penstock.kernel.config import loader
from penstock.kernel.config.loader import MisplacedKey
from penstock.kernel.errors import BadConfig, Invalid, PenstockError

_NO_CHECKS: KindChecks = {}
_SCHEDULED_NAME_LIMIT = 80  # characters: the name of a scheduled run also contains its time


@dataclass(frozen=True)
class FlowModule:
    """The flows, workers and checks that a Python module defines."""

    flows: Sequence[FlowSpec]
    workers: Sequence[Workers]
    make_workers: MakeWorkers | None
    input_checks: KindChecks
    report_checks: Mapping[str, ReportCheck]


def load_file(path: Path, kind_checks: KindChecks = _NO_CHECKS) -> FlowSpec:
    """Load the flow in *path*; raise BadConfig with the line and the key of every error."""

    class ValidatedFlowSpec(FlowSpec):
        """A flow with a validated graph: errors of the graph also get a line."""

        @model_validator(mode="after")
        def _has_a_graph(self) -> Self:
            try:
                validation.validate_steps(self.steps, kind_checks)
            except Invalid as error:
                raise MisplacedKey(_find_path(error), _format_error(error)) from None
            return self

        @model_validator(mode="after")
        def _has_a_time(self) -> Self:
            try:
                _check_schedule(self)
            except Invalid as error:
                raise MisplacedKey(("schedule",), _format_error(error)) from None
            return self

    try:
        spec = loader.load(ValidatedFlowSpec, path, {})
    except BadConfig as error:
        code = "FLOW_UNREADABLE" if error.code == "CONFIG_UNREADABLE" else "FLOW_INVALID"
        hint = f"fix the file; `penstock flow validate {shlex.quote(str(path))}` checks it without a server"
        raise BadConfig(code, error.message, hint=hint, **error.details) from None
    return FlowSpec.model_construct(
        _fields_set=spec.model_fields_set, **{name: getattr(spec, name) for name in FlowSpec.model_fields}
    )


def load_module(name: str, kind_checks: KindChecks = _NO_CHECKS) -> FlowModule:
    """Load the module *name*, or the Python file of that name; raise BadConfig if it cannot be imported."""
    try:
        module = _import_module(name)
    except Exception as error:  # a module of a user can raise anything
        problem = f"cannot import {name}: {type(error).__name__}: {error}"
        hint = "check `flows.modules`: modules are imported from Python's path and from the current folder"
        raise BadConfig("FLOW_MODULE", problem, hint=hint) from error
    flows: dict[str, FlowSpec] = {}
    for var in vars(module).values():
        if not isinstance(var, Flow | FlowSpec):
            continue
        flow = var.spec() if isinstance(var, Flow) else var
        if flow.name in flows and flows[flow.name] != flow:
            problem = f"{name}: two flows have the name {flow.name!r}"
            raise BadConfig("FLOW_INVALID", problem, hint="rename one of them")
        flows[flow.name] = flow
    # A module may import only the decorator `worker`, which is a method of its Workers.
    owners = [var if isinstance(var, Workers) else getattr(var, "__self__", None) for var in vars(module).values()]
    workers = list({id(owner): owner for owner in owners if isinstance(owner, Workers)}.values())
    input_checks = {kind: check for worker in workers for kind, check in worker.input_checks.items()}
    report_checks = {kind: check for worker in workers for kind, check in worker.report_checks.items()}
    for flow in flows.values():
        _check_flow(name, flow, {**input_checks, **kind_checks})
    return FlowModule(list(flows.values()), workers, vars(module).get("make_workers"), input_checks, report_checks)


def build_workers(name: str, make: MakeWorkers, context: KindContext) -> Workers:
    """Call `make_workers` of the module *name*, and return its workers; raise BadConfig if it fails."""
    try:
        workers = make(context)
    except PenstockError:
        raise
    except Exception as error:  # a module of a user can raise anything
        raise BadConfig("FLOW_MODULE", f"{name}: make_workers: {type(error).__name__}: {error}") from error
    if not isinstance(workers, Workers) or workers.input_checks or workers.report_checks:
        problem = f"{name}: make_workers must return new Workers, without checks"
        raise BadConfig("FLOW_MODULE", problem, hint="declare checks at module level with `workers.declare(…)`")
    return workers


def _check_flow(name: str, flow: FlowSpec, kind_checks: KindChecks) -> None:
    try:
        validation.validate_steps(flow.steps, kind_checks)
        _check_schedule(flow)
    except Invalid as error:
        problem = f"{name}: flow {flow.name!r}: {error.message}"
        raise Invalid(error.code, problem, hint=error.hint, **error.details) from None


def _check_schedule(flow: FlowSpec) -> None:
    if flow.schedule is not None:
        schedule.validate_schedule(flow.schedule)
        if len(flow.name) > _SCHEDULED_NAME_LIMIT:
            problem = f"the name of a flow with a schedule has at most {_SCHEDULED_NAME_LIMIT} characters"
            raise Invalid("BAD_FLOW", problem, hint="use a shorter `name`")


def _format_error(error: Invalid) -> str:
    return error.message if error.hint is None else f"{error.message} ({error.hint})"


def _import_module(name: str) -> ModuleType:
    if name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is not a Python module")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    current = str(Path.cwd())
    if current not in sys.path and not name.startswith("penstock."):
        sys.path.append(current)  # last: installed modules have priority
    return importlib.import_module(name)


def _find_path(error: Invalid) -> loader.KeyPath:
    """Return the path in the document of an error of a step."""
    if (step := error.details.get("step")) is None:
        return ("steps",)
    return ("steps", step, *str(error.details.get("part", "dependsOn")).split("."))
