"""F15: a flow from a file or a module, checked; what is wrong is told with its place."""

import importlib
import importlib.util
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

_HINT = "`penstock flow validate FILE` checks a flow without running it"
_NO_CHECKS: KindChecks = {}
_SCHEDULED_NAME = 80


@dataclass(frozen=True)
class FlowModule:
    """What a Python module defines."""

    flows: Sequence[FlowSpec]
    workers: Sequence[Workers]
    make_workers: MakeWorkers | None
    input_checks: KindChecks
    report_checks: Mapping[str, ReportCheck]


def load_file(path: Path, kind_checks: KindChecks = _NO_CHECKS) -> FlowSpec:
    """The flow in *path*; BadConfig with the line and the place of every mistake."""

    class ValidatedFlowSpec(FlowSpec):
        """A flow whose graph is right, so that what is wrong with it is told with its line as all else is."""

        @model_validator(mode="after")
        def _has_a_graph(self) -> Self:
            try:
                validation.validate_steps(self.steps, kind_checks)
            except Invalid as error:
                raise MisplacedKey(_path(error), _told(error)) from None
            return self

        @model_validator(mode="after")
        def _has_a_time(self) -> Self:
            try:
                _check_schedule(self)
            except Invalid as error:
                raise MisplacedKey(("schedule",), _told(error)) from None
            return self

    try:
        found = loader.load(ValidatedFlowSpec, path, {})
    except BadConfig as error:
        code = "FLOW_UNREADABLE" if error.code == "CONFIG_UNREADABLE" else "FLOW_INVALID"
        raise BadConfig(code, error.message, hint=_HINT, **error.details) from None
    return FlowSpec.model_construct(
        _fields_set=found.model_fields_set, **{name: getattr(found, name) for name in FlowSpec.model_fields}
    )


def load_module(name: str, kind_checks: KindChecks = _NO_CHECKS) -> FlowModule:
    """What the module *name*, or the file of that name, defines; BadConfig when it cannot be imported."""
    try:
        module = _imported(name)
    except Exception as error:  # whatever a module of others does when it is run
        said = f"cannot import {name}: {type(error).__name__}: {error}"
        raise BadConfig("FLOW_MODULE", said, hint="modules are looked for where Python does, and here") from error
    flows: dict[str, FlowSpec] = {}
    for var in vars(module).values():
        if not isinstance(var, Flow | FlowSpec):
            continue
        flow = var.spec() if isinstance(var, Flow) else var
        if flow.name in flows and flows[flow.name] != flow:
            raise BadConfig("FLOW_INVALID", f"{name}: there are two flows {flow.name!r}", hint="name one otherwise")
        flows[flow.name] = flow
    # Whoever took the decorator of some workers has them too.
    held = [var if isinstance(var, Workers) else getattr(var, "__self__", None) for var in vars(module).values()]
    workers = list({id(one): one for one in held if isinstance(one, Workers)}.values())
    input_checks = {kind: check for worker in workers for kind, check in worker.input_checks.items()}
    report_checks = {kind: check for worker in workers for kind, check in worker.report_checks.items()}
    for flow in flows.values():
        _check(name, flow, {**input_checks, **kind_checks})
    return FlowModule(list(flows.values()), workers, vars(module).get("make_workers"), input_checks, report_checks)


def build_workers(name: str, make: MakeWorkers, context: KindContext) -> Workers:
    """Return what `make_workers` of the module *name* returns; BadConfig if it fails, or returns anything else."""
    try:
        made = make(context)
    except PenstockError:
        raise
    except Exception as error:  # whatever a module of others does
        raise BadConfig("FLOW_MODULE", f"{name}: make_workers: {type(error).__name__}: {error}") from error
    if not isinstance(made, Workers) or made.input_checks or made.report_checks:
        said = f"{name}: make_workers must return new Workers, without checks"
        raise BadConfig("FLOW_MODULE", said, hint="checks are known before: `workers.declare(…)` in the module")
    return made


def _check(name: str, flow: FlowSpec, kind_checks: KindChecks) -> None:
    try:
        validation.validate_steps(flow.steps, kind_checks)
        _check_schedule(flow)
    except Invalid as error:
        said = f"{name}: flow {flow.name!r}: {error.message}"
        raise Invalid(error.code, said, hint=error.hint, **error.details) from None


def _check_schedule(flow: FlowSpec) -> None:
    if flow.schedule is not None:
        schedule.checked(flow.schedule)
        if len(flow.name) > _SCHEDULED_NAME:
            said = f"a flow that runs by itself has a name of at most {_SCHEDULED_NAME} characters"
            raise Invalid("BAD_FLOW", said, hint="its runs are called by its name and their time")


def _told(error: Invalid) -> str:
    return error.message if error.hint is None else f"{error.message} ({error.hint})"


def _imported(name: str) -> ModuleType:
    if name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is no module")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    here = str(Path.cwd())
    if here not in sys.path and not name.startswith("penstock."):
        sys.path.append(here)  # last: nothing here goes before what is installed
    return importlib.import_module(name)


def _path(error: Invalid) -> loader.KeyPath:
    """Where in the document a mistake of a step is."""
    if (step := error.details.get("step")) is None:
        return ("steps",)
    return ("steps", step, *str(error.details.get("part", "dependsOn")).split("."))
