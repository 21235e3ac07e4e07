"""Hypothesis strategies for random flows, for the engine and for the model alike."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from penstock.flows.contract import FLOW, MAP
from tests.flows.scenarios.run_model import ModelStep
from tests.flows.stepper import WORK

OTHER_KIND = "other"
LIKELY = st.sampled_from([True, True, True, False])
UNLIKELY = LIKELY.map(lambda drawn: not drawn)
ATTEMPTS = st.sampled_from([None, None, 1, 2, 3])


@st.composite
def worker_steps(draw: st.DrawFn, name: str) -> ModelStep:
    """Draw a step for a worker."""
    kind = draw(st.sampled_from([WORK, WORK, OTHER_KIND]))
    return ModelStep(name, kind, required=draw(LIKELY), max_attempts=draw(ATTEMPTS))


@st.composite
def steps(draw: st.DrawFn, most: int = 6, *, is_inner: bool = False) -> dict[str, ModelStep]:
    """Draw steps without circular dependencies, in an order in which they can run."""
    drawn: dict[str, ModelStep] = {}
    for name in "abcdefgh"[: draw(st.integers(0 if is_inner else 1, most))]:
        kind = WORK if is_inner else draw(st.sampled_from([WORK] * 5 + [MAP, FLOW]))
        before = draw(st.lists(st.sampled_from(sorted(drawn)), unique=True, max_size=3)) if drawn else []
        step = replace(draw(worker_steps(name)), depends_on=before)
        if kind == MAP:
            lists = st.lists(st.integers(0, 9), max_size=3)
            over = draw(st.one_of(lists, st.sampled_from(before)) if before else lists)
            step = replace(step, kind=MAP, max_attempts=None, over=over, each=draw(worker_steps("each")))
        elif kind == FLOW:
            step = replace(step, kind=FLOW, max_attempts=None, inner_steps=draw(steps(2, is_inner=True)))
        drawn[name] = replace(step, **draw(_draw_conditions(step)))
    return drawn


@st.composite
def _draw_conditions(draw: st.DrawFn, step: ModelStep) -> dict[str, Any]:
    if not step.depends_on:
        return {}
    conditions: dict[str, Any] = {"skips_after_skip": draw(UNLIKELY)}
    if draw(UNLIKELY):
        conditions["when"] = draw(st.sampled_from(step.depends_on))
    if draw(UNLIKELY) and step.kind not in (MAP, FLOW):
        conditions["required_output"] = draw(st.sampled_from(step.depends_on))
    return conditions


def encode_steps(drawn: Mapping[str, ModelStep]) -> dict[str, Any]:
    """Return the steps as a client sends them."""
    return {name: _encode_step(step) for name, step in drawn.items()}


def _encode_step(step: ModelStep) -> dict[str, Any]:
    body: dict[str, Any] = {"kind": step.kind, "dependsOn": list(step.depends_on), "required": step.required}
    if step.max_attempts is not None:
        body["retry"] = {"maxAttempts": step.max_attempts, "backoff": 0}
    if step.skips_after_skip:
        body["onSkip"] = "skip"
    if step.when is not None:
        body["when"] = f"steps.{step.when}.outputs.v == 1"
    if step.required_output is not None:
        body["inputs"] = {"v": f"${{steps.{step.required_output}.outputs.v}}"}
    if step.kind == MAP and step.each is not None:
        each = _encode_step(step.each)
        body["over"] = f"${{steps.{step.over}.outputs.list}}" if isinstance(step.over, str) else list(step.over)
        body["do"] = {**{name: each[name] for name in each if name != "dependsOn"}, "inputs": {"item": "${item}"}}
    if step.kind == FLOW:
        body["inputs"] = {"steps": encode_steps(step.inner_steps)}
    return body
