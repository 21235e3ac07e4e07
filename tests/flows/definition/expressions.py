"""Conditions for tests, over a scope and ended steps."""

from penstock.flows.definition.expression_eval import EvaluationContext
from penstock.flows.definition.templates import parse_condition

SCOPE = {
    "mode": "full",
    "n": 3,
    "zero": 0,
    "half": 0.5,
    "on": True,
    "nothing": None,
    "list": [1, 2, {"k": "v"}],
    "map": {"items": "own", "a b": 1, "from": 2},
    "empty": [],
}
CONTEXT = EvaluationContext(
    "run-1",
    SCOPE,
    {"fetch": {"rows": 5, "keys": ["a"]}, "fetch-eu": {"rows": 7}, "lost": {}},
    {"fetch": "SUCCEEDED", "lost": "SKIPPED"},
    item={"symbol": "BTC"},
    index=4,
)


def holds(text: str, context: EvaluationContext = CONTEXT) -> bool:
    return parse_condition(text).holds(context)
