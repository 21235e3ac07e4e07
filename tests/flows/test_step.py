"""F17: the workers of step kinds, with the checks of the kinds."""

from collections.abc import Mapping
from typing import Any

import pytest

from penstock.flows.step import ReportCheck, Workers

KIND, REPORT_CHECK = "EXPORT_ROWS", ReportCheck("receipt.json", "receiptUri", lambda data, inputs, names: {})


def accept(inputs: Mapping[str, Any]) -> None:
    """Accept any inputs."""


def make_export_workers() -> Workers:
    """Return workers of a kind with checks, and of a declared kind."""
    workers = Workers()
    workers.worker(KIND, check_inputs=accept, check_report=REPORT_CHECK)(lambda step: None)
    workers.declare("MADE", check_inputs=accept)
    return workers


def test_checks_stay_with_their_kinds() -> None:
    """F17: `add` and `select_kinds` copy the checks of the kinds; a declared kind has no handler."""
    both = Workers()
    both.worker("PLAIN")(lambda step: None)
    both.add(make_export_workers())
    chosen, plain = both.select_kinds([KIND]), both.select_kinds(["PLAIN"])
    assert (chosen.input_checks, chosen.report_checks) == ({KIND: accept}, {KIND: REPORT_CHECK})
    assert (plain.input_checks, plain.report_checks) == ({}, {})
    assert (list(both.select_kinds([]).handlers), list(both.select_kinds([]).input_checks)) == (
        ["PLAIN", KIND],
        [KIND, "MADE"],
    )


def test_a_kind_has_one_worker() -> None:
    """F17: a second worker of a kind is refused; the worker of a declared kind is accepted."""
    workers = make_export_workers()
    workers.worker("MADE")(lambda step: None)
    with pytest.raises(ValueError, match="the step kind MADE has two workers"):
        workers.worker("MADE")(lambda step: None)
    with pytest.raises(ValueError, match="the step kind EXPORT_ROWS has two workers"):
        workers.add(make_export_workers())
