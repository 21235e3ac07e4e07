"""Flows in Python: the same model as in YAML."""

from datetime import timedelta
from pathlib import Path

import pytest

from penstock.flows.definition import validation
from penstock.flows.definition.expression_eval import EvaluationContext
from penstock.flows.definition.json_values import ValueReference
from penstock.flows.definition.loader import load_file
from penstock.flows.definition.python_dsl import Flow, index, item
from penstock.flows.definition.spec import FailurePolicy, RetryPolicy, ScheduleSpec, WorkSpec
from penstock.flows.definition.templates import fill_template, parse_condition
from penstock.kernel.errors import Invalid

YAML = """
name: market-report
description: Candles, charts, words.
scope: {symbol: BTC}
policy: {failFast: true}
maxActiveRuns: 2
schedule: {cron: "0 6 * * *"}
steps:
  ohlcv: {kind: OHLCV_EXPORT, inputs: {symbol: "${scope.symbol}"}}
  charts:
    kind: CHART_EXPORT
    dependsOn: [ohlcv]
    inputs: {files: "${steps.ohlcv.outputs.files}", title: "Of ${scope.symbol}: ${steps.ohlcv.outputs.rows} rows"}
    when: steps.ohlcv.outputs.rows > 0
    required: false
    onSkip: skip
    retry: {maxAttempts: 5}
    timeout: 30
  each:
    kind: map
    dependsOn: [ohlcv, charts]
    over: ${steps.ohlcv.outputs["time-frames"]}
    do: {kind: http, inputs: {url: "https://example.com/${item.name}", n: "${index}"}}
"""


def market_report() -> Flow:
    flow = Flow(
        "market-report",
        description="Candles, charts, words.",
        scope={"symbol": "BTC"},
        policy=FailurePolicy(fail_fast=True),
        max_active_runs=2,
        schedule=ScheduleSpec(cron="0 6 * * *"),
    )
    ohlcv = flow.step("ohlcv", "OHLCV_EXPORT", inputs={"symbol": flow.scope.symbol})
    charts = flow.step(
        "charts",
        "CHART_EXPORT",
        after=[ohlcv],
        inputs={"files": ohlcv.outputs.files, "title": f"Of {flow.scope.symbol}: {ohlcv.outputs.rows} rows"},
        when=f"{ohlcv.outputs.rows} > 0",
        required=False,
        on_skip="skip",
        retry=RetryPolicy(max_attempts=5),
        timeout=timedelta(seconds=30),
    )
    flow.map(
        "each",
        over=ohlcv.outputs["time-frames"],
        do=WorkSpec(kind="http", inputs={"url": f"https://example.com/{item.name}", "n": index}),
        after=["ohlcv", charts],
    )
    return flow


def test_a_flow_in_python_is_the_flow_in_yaml(tmp_path: Path) -> None:
    """F15: a flow in Python equals the same flow in YAML."""
    file = tmp_path / "flow.yaml"
    file.write_text(YAML)
    built = market_report().spec()
    assert built == load_file(file)
    assert list(validation.validate_steps(built.steps).ids) == ["ohlcv", "charts", "each"]


@pytest.mark.parametrize(
    "key", ["rows", "fetch-eu", "a.b", "from", "1h", "__class__", 'a"b', "a}b", "a'b\\", "é", "_x"]
)
def test_reference_to_any_name(key: str) -> None:
    """F15: a reference is valid for any name, with quotes if necessary."""
    context = EvaluationContext("r", {key: {"x": [1, 7]}}, {}, {})
    assert fill_template(str(ValueReference("scope")[key]["x"][1]), context) == 7


def test_reference_to_a_step_with_any_name() -> None:
    """F15: names of steps may have dashes, dots and leading digits."""
    flow = Flow("f")
    first = flow.step("1-first.x", "http")
    flow.step("second", "http", after=[first], when=first.outputs.ok, inputs={"was": first.status})
    spec = flow.spec().steps["second"]
    assert parse_condition(spec.when or "").references == {"1-first.x"}
    assert spec.inputs == {"was": '${steps["1-first.x"].status}'}
    validation.validate_steps(flow.spec().steps)


def test_errors_are_raised_where_a_step_is_added() -> None:
    """F2: `step` raises the errors of the step, `spec` those of the flow."""
    flow = Flow("f")
    flow.step("a", "http")
    with pytest.raises(Invalid, match="already has a step 'a'") as duplicate:
        flow.step("a", "http")
    assert duplicate.value.code == "DUPLICATE_STEP"
    with pytest.raises(Invalid, match=r"step 'b': inputs: x\.0: set cannot be represented in JSON"):
        flow.step("b", "http", inputs={"x": [{1}]})
    with pytest.raises(Invalid, match="step 'c': kind: "):
        flow.step("c", "not a name")
    with pytest.raises(Invalid, match=r"flow 'not a name': name: "):
        Flow("not a name").spec()
    assert list(flow.spec().steps) == ["a"]


def test_references_are_not_iterable() -> None:
    """F14: a loop over a reference raises TypeError with a hint to use a map."""
    flow = Flow("f")
    with pytest.raises(TypeError, match="use a map"):
        list(flow.step("a", "http").outputs.rows)
