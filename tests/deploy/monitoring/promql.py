"""What a query in PromQL names: metrics, and the labels it expects them to have."""

from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser
from promql_parser import AggregateExpr, BinaryExpr, Expr, MatrixSelector, VectorSelector


@dataclass(frozen=True)
class Use:
    """Of *metrics* at least one must have each of *labels*; a selector names one metric, a grouping all below it."""

    metrics: frozenset[str]
    labels: frozenset[str]


def uses(query: str) -> list[Use]:
    """All that *query* counts on."""
    return list(_uses(promql_parser.parse(query)))


def metrics_of(query: str) -> frozenset[str]:
    """The metrics it names."""
    return frozenset().union(*(use.metrics for use in uses(query)))


def groupings(query: str) -> frozenset[str] | None:
    """The labels its outermost aggregation keeps; None when it has none, and keeps all."""
    found = promql_parser.parse(query)
    while not isinstance(found, AggregateExpr):
        inner = [expression for expression in _below(found) if not isinstance(expression, promql_parser.NumberLiteral)]
        if len(inner) != 1 and not isinstance(found, BinaryExpr):
            return None
        found = inner[0]
    return frozenset(found.modifier.labels if found.modifier else ())


def kept(query: str) -> list[frozenset[str]]:
    """The labels that each aggregation of it keeps, and that each join names."""
    return list(_collect_labels(promql_parser.parse(query)))


def _collect_labels(expr: Expr) -> Iterator[frozenset[str]]:
    joins = isinstance(expr, BinaryExpr) and expr.modifier is not None and expr.modifier.matching is not None
    if joins or isinstance(expr, AggregateExpr):
        yield frozenset(_grouped(expr))
    for expression in _below(expr):
        yield from _collect_labels(expression)


def _uses(expr: Expr) -> Iterator[Use]:
    if isinstance(expr, MatrixSelector):
        expr = expr.vector_selector
    if isinstance(expr, VectorSelector):
        yield _selected(expr)
        return
    below = [use for expression in _below(expr) for use in _uses(expression)]
    yield from below
    named = frozenset().union(*(use.metrics for use in below))
    for label in _grouped(expr):
        yield Use(named, frozenset({label}))


def _selected(selector: VectorSelector) -> Use:
    matchers = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
    name = selector.name or matchers.pop("__name__")
    return Use(frozenset({name}), frozenset(matchers))


def _below(expr: Expr) -> list[Expr]:
    if isinstance(expr, BinaryExpr):
        return [expr.lhs, expr.rhs]
    if isinstance(expr, promql_parser.Call):
        return [arg for arg in expr.args if not isinstance(arg, promql_parser.StringLiteral)]
    inner = getattr(expr, "expr", None)
    return [inner] if inner is not None else []


def _grouped(expr: Expr) -> set[str]:
    """The labels that are grouped by, or joined on."""
    if isinstance(expr, AggregateExpr):
        return set(expr.modifier.labels) if expr.modifier else set()
    if isinstance(expr, BinaryExpr) and expr.modifier is not None:
        matching = expr.modifier.matching
        return {*(matching.labels if matching else ()), *(expr.modifier.group_labels or ())}
    return set()
