"""docs/flows.md agrees with the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from penstock.cli.flow import app, artifact_app, schedule_app
from penstock.flows import contract, sdk
from penstock.flows.api.runs import routes
from penstock.flows.config import FlowsSection
from penstock.flows.contract import PREFIX, FlowRunStatus, HeartbeatState, StepReportAnswer, StepReportKind, StepStatus
from penstock.flows.definition import loader, spec, validation
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.definition.loader import load_file, load_module
from penstock.flows.definition.spec import FlowSpec, RetryPolicy, RunRequest, ScheduleSpec, StepSpec
from penstock.flows.engine import advance
from penstock.flows.kinds import http, python
from penstock.flows.kinds.market import ohlcv, renderers, report
from penstock.flows.kinds.platform import harvest, ingest, refdata, tracking
from penstock.flows.kinds.registry import WAITING, open_catalogue
from penstock.flows.metrics import FlowMetrics
from penstock.flows.model import RUN, STEP
from penstock.flows.sdk import KindContext
from penstock.flows.sdk import workers as registered
from penstock.ingest.contract import FailureCode
from penstock.settings import load_settings
from tests.flows.docs_page import PAGE, ROOT, blocks
from tests.pages import drawn_in

pytestmark = pytest.mark.docs

EXAMPLE = ROOT / "examples" / "market-report"
CHECKS = open_catalogue(FlowsSection()).input_checks
KINDS = {*CHECKS, *contract.ENGINE_KINDS}
ERRORS = {
    *("StepFailed", "StepError", "RenderFailed"),
    *("Invalid", "Conflict", "NotFound", "TooLarge", "BadConfig", "Forbidden"),
}


def test_diagrams_are_the_state_machines() -> None:
    """F1: the diagrams of docs/flows.md are the state machines of the code."""
    assert drawn_in(PAGE) == [RUN, STEP]


def test_flows_of_the_page_are_valid(tmp_path: Path) -> None:
    """F15: the flows and the settings of the page are valid, with the inputs of their kinds."""
    file = tmp_path / "example.yaml"
    for document in blocks("yaml"):
        file.write_text(document)
        if document.startswith("name:"):
            assert load_file(file, CHECKS).steps
        else:
            load_settings(file, {})
    (body,) = blocks("json")
    request = RunRequest.model_validate_json(body)
    validation.validate_steps(request.steps or {}, CHECKS)


def test_modules_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F15, F17: the page has a module with a flow and a worker, a worker program, and a module with `make_workers`."""
    flows, worker, maker = blocks("python")
    (tmp_path / "flows.py").write_text(flows)
    (tmp_path / "greeter.py").write_text(worker)
    module = load_module(str(tmp_path / "flows.py"), CHECKS)
    assert [flow.name for flow in module.flows] == ["exports"]
    assert [list(workers.handlers) for workers in module.workers] == [["CHECK_PRICES"]]
    monkeypatch.setattr(registered, "handlers", {})
    load_module(str(tmp_path / "greeter.py"))
    assert list(registered.handlers) == ["GREET"]
    (tmp_path / "maker.py").write_text(maker)
    section = FlowsSection(modules=[str(tmp_path / "maker.py")])
    declared, created = FlowCatalogue(section).make_workers(KindContext(section))
    assert (list(declared.input_checks), list(created.handlers)) == (["COUNT_SHOPS"], ["COUNT_SHOPS"])


def test_the_example_is_valid() -> None:
    """F13: the flow and the configuration of the market report are valid."""
    settings = load_settings(EXAMPLE / "penstock.yaml", {})
    assert settings.flows.folder is not None
    flow = load_file(ROOT / settings.flows.folder / "market-report.yaml", CHECKS)
    assert [step.kind for step in flow.steps.values()] == ["OHLCV_EXPORT", "CHART_EXPORT", "LLM_REPORT"]


def test_links_of_the_readme_of_the_example() -> None:
    """F13: every relative link of the README is a file of the repository."""
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (EXAMPLE / "README.md").read_text())
    assert [target for target in targets if "://" not in target and not (EXAMPLE / target).exists()] == []


@pytest.mark.parametrize("model", [StepSpec, RetryPolicy, ScheduleSpec, FlowSpec, RunRequest])
def test_every_key_of_a_flow_is_documented(model: type[BaseModel]) -> None:
    """F15: docs/flows.md names each key of a flow."""
    keys = [field.alias or name for name, field in model.model_fields.items()]
    assert [key for key in keys if not re.search(rf"\b{key}\b", PAGE)] == []


def test_every_command_is_documented() -> None:
    """F15: docs/flows.md has a row for each command, and for no other."""
    groups = {"schedule": schedule_app, "artifact": artifact_app}
    known = _commands(app) | {f"{group} {name}" for group, part in groups.items() for name in _commands(part)}
    assert set(re.findall(r"`flow ((?:(?:schedule|artifact) )?[a-z]+)", PAGE)) == known


def _commands(program: typer.Typer) -> set[str]:
    return {command.name or command.callback.__name__ for command in program.registered_commands if command.callback}


def test_every_route_is_documented() -> None:
    """F1, F17: docs/flows.md names the last segment of each path."""
    paths = [getattr(route, "path", "").removeprefix(PREFIX).replace(":path}", "}") for route in routes.routes]
    assert [path for path in paths if f"/{path.rsplit('/', 1)[-1]}" not in PAGE] == []


@pytest.mark.parametrize("names", [FlowRunStatus, StepStatus, StepReportKind, StepReportAnswer, HeartbeatState])
def test_every_value_of_the_contract_is_documented(names: Any) -> None:
    """F1, F5, F9: docs/flows.md explains each value."""
    assert [
        name.value for name in names if f"`{name.value}`" not in PAGE and name is not StepReportAnswer.UNKNOWN
    ] == []


def test_every_kind_is_documented() -> None:
    """F13, F14: docs/flows.md has a section or a row for each kind, and for no other."""
    (section,) = re.findall(r"^## Kinds of steps\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"^\| `([\w.]+)`", section, re.MULTILINE)) == KINDS
    assert WAITING <= KINDS


def test_every_input_of_a_kind_is_documented() -> None:
    """F13, F14: the row of a kind names what its schema has."""
    (section,) = re.findall(r"^## Kinds of steps\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    models: dict[str, type[BaseModel]] = {
        "OHLCV_EXPORT": ohlcv.OhlcvInputs,
        "LLM_REPORT": report.ReportInputs,
        http.KIND: http.HttpInputs,
        python.KIND: python.PythonInputs,
        ingest.KIND: ingest.IngestInputs,
        harvest.KIND: harvest.HarvestInputs,
        refdata.KIND: refdata.RefdataInputs,
        tracking.KIND: tracking.TrackingInputs,
    }
    for kind, model in models.items():
        (row,) = re.findall(rf"^\| `{re.escape(kind)}` \|(.*?)\|", section, re.MULTILINE)
        keys = {field.alias or name for name, field in model.model_fields.items()}
        assert {key for key in keys if f"`{key}`" not in row} == set(), kind


def test_every_code_is_documented() -> None:
    """F5, F10: each code of the source is in docs/flows.md, and each there is in the source."""
    known = set(_codes()) | set(renderers.CODES.values())
    assert sorted(code for code in known if f"`{code}`" not in PAGE) == []
    words = {*known, *(name.value for names in (FlowRunStatus, StepStatus, StepReportKind) for name in names), *KINDS}
    words |= {*FailureCode, "SNAPSHOT", "DELTA", "PENSTOCK_URL", "PENSTOCK_TOKEN"}
    assert sorted(set(re.findall(r"`([A-Z][A-Z0-9_]{2,})`", PAGE)) - words) == []


def _codes() -> Iterator[str]:
    """The codes of errors in the source of flows: given as they are, or by a name."""
    files = [*sorted((ROOT / "src/penstock/flows").rglob("*.py")), ROOT / "src/penstock/kernel/http/app.py"]
    trees = [ast.parse(file.read_text()) for file in files]
    named = set()
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in ERRORS and call.args:
            yield from _constants(call.args[0])
            named |= {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)}
    for assigned in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)):
        targets = assigned.targets if isinstance(assigned, ast.Assign) else [assigned.target]
        names = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        if named & names and assigned.value is not None:
            yield from _constants(assigned.value)


def _constants(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and re.fullmatch(r"[A-Z][A-Z0-9_]{1,62}[A-Z0-9]", str(node.value)):
        yield str(node.value)
    # The condition of a choice is not a code.
    for inner in (node.body, node.orelse) if isinstance(node, ast.IfExp) else ast.iter_child_nodes(node):
        yield from _constants(inner)


def test_every_name_of_the_sdk_is_documented() -> None:
    """F17: docs/flows.md names each export of the SDK, and no other."""
    (table,) = re.findall(r"^### Names of the SDK\n.*?\|---\|---\|\n(.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)
    names = {name for row in table.split("\n") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert names == set(sdk.__all__)


def test_every_metric_is_documented() -> None:
    """F18: docs/flows.md names each metric with its labels, and no other."""
    registry = CollectorRegistry()
    metrics = FlowMetrics(registry)
    metrics.count_step("K", "SUCCEEDED", 1)
    metrics.count_repaired(0)
    metrics.set_gauges([("K", 1, 2.0)], [("RUNNING", 1)])  # type: ignore[list-item]
    known = {}
    for family in registry.collect():
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        known[family.name + ("_total" if family.type == "counter" else "")] = labels
    documented = {
        name: sorted(filter(None, labels.split(",")))
        for name, labels in re.findall(r"`(penstock_flow_\w+)(?:\{([\w,]*)\})?`", PAGE)
    }
    assert documented == known


def test_limits_are_documented() -> None:
    """The limits in docs/flows.md are the limits of the code."""
    page = " ".join(PAGE.split())
    for limit, text in (
        (contract.STEP_LIMIT, "at most {:,} steps"),
        (contract.SCOPE_LIMIT, "at most {:,} bytes as JSON (`SCOPE_TOO_LARGE`)"),
        (contract.DOCUMENT_LIMIT, "at most {:,} bytes as JSON"),
        (contract.ARTIFACT_LIMIT, "has at most {:,} artifacts"),
        (contract.BATCH_LIMIT, "up to {:,} steps at once"),
        (contract.WAIT_LIMIT, "a claim waits up to {:,} s"),
        (contract.DEPTH_LIMIT, "Up to {:,} levels deep"),
        (contract.LOG_LINES, "{:,} lines per step"),
        (advance.ITEMS_LIMIT, "at most {:,} characters (`TOO_LARGE`)"),
        (loader._SCHEDULED_NAME_LIMIT, "with a `schedule` up to {:,})"),
        (spec._MAX_DURATION.days, "is at most {:,} days"),
    ):
        assert text.format(limit) in page, text
