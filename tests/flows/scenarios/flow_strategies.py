"""Hypothesis strategies for random flows, for the engine and for the model alike."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from penstock.flows.contract import FLOW, MAP
from tests.flows.scenarios.run_model import ModelStep
from tests.flows.stepper import WORK

OTHER = "other"
MOSTLY = st.sampled_from([True, True, True, False])
SELDOM = MOSTLY.map(lambda drawn: not drawn)
ATTEMPTS = st.sampled_from([None, None, 1, 2, 3])


@st.composite
def works(draw: st.DrawFn, name: str) -> ModelStep:
    """What a worker does."""
    kind = draw(st.sampled_from([WORK, WORK, OTHER]))
    return ModelStep(name, kind, required=draw(MOSTLY), max_attempts=draw(ATTEMPTS))


@st.composite
def steps(draw: st.DrawFn, most: int = 6, *, is_inside: bool = False) -> dict[str, ModelStep]:
    """Steps that hang together in any way that is no circle, in an order in which they can be done."""
    drawn: dict[str, ModelStep] = {}
    for name in "abcdefgh"[: draw(st.integers(0 if is_inside else 1, most))]:
        kind = WORK if is_inside else draw(st.sampled_from([WORK] * 5 + [MAP, FLOW]))
        before = draw(st.lists(st.sampled_from(sorted(drawn)), unique=True, max_size=3)) if drawn else []
        step = replace(draw(works(name)), depends_on=before)
        if kind == MAP:
            lists = st.lists(st.integers(0, 9), max_size=3)
            over = draw(st.one_of(lists, st.sampled_from(before)) if before else lists)
            step = replace(step, kind=MAP, max_attempts=None, over=over, each=draw(works("each")))
        elif kind == FLOW:
            step = replace(step, kind=FLOW, max_attempts=None, within=draw(steps(2, is_inside=True)))
        drawn[name] = replace(step, **draw(_conditions(step)))
    return drawn


@st.composite
def _conditions(draw: st.DrawFn, step: ModelStep) -> dict[str, Any]:
    if not step.depends_on:
        return {}
    told: dict[str, Any] = {"skips_after_skip": draw(SELDOM)}
    if draw(SELDOM):
        told["when"] = draw(st.sampled_from(step.depends_on))
    if draw(SELDOM) and step.kind not in (MAP, FLOW):
        told["needs"] = draw(st.sampled_from(step.depends_on))
    return told


def written(drawn: Mapping[str, ModelStep]) -> dict[str, Any]:
    """The steps as they are sent."""
    return {name: _written(step) for name, step in drawn.items()}


def _written(step: ModelStep) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": step.kind, "dependsOn": list(step.depends_on), "required": step.required}
    if step.max_attempts is not None:
        told["retry"] = {"maxAttempts": step.max_attempts, "backoff": 0}
    if step.skips_after_skip:
        told["onSkip"] = "skip"
    if step.when is not None:
        told["when"] = f"steps.{step.when}.outputs.v == 1"
    if step.needs is not None:
        told["inputs"] = {"v": f"${{steps.{step.needs}.outputs.v}}"}
    if step.kind == MAP and step.each is not None:
        each = _written(step.each)
        told["over"] = f"${{steps.{step.over}.outputs.list}}" if isinstance(step.over, str) else list(step.over)
        told["do"] = {**{name: each[name] for name in each if name != "dependsOn"}, "inputs": {"item": "${item}"}}
    if step.kind == FLOW:
        told["inputs"] = {"steps": written(step.within)}
    return told
