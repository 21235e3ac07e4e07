"""F18: why a step is where it is, in words."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.flows.api.explain import StepFacts, explain
from penstock.flows.contract import FlowRunStatus, StepStatus

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
STEP = StepFacts("r", "s", "work", StepStatus.PENDING, NOW - 5 * MINUTE)
BEGUN = {"status": StepStatus.RUNNING, "worker": "w1", "attempts": 2, "started_at": NOW - 3 * MINUTE}
ENDED = {"finished_at": NOW - 2 * MINUTE, "attempts": 1}
ERROR = {"code": "BROKEN", "message": "no disk"}


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"unmet": [("a", "RUNNING"), ("b", "PENDING")]}, "it waits for a (RUNNING), b (PENDING)"),
        ({"unmet": [(f"s{n}", "READY") for n in range(7)]}, "s4 (READY) and 2 more"),
        ({}, "all it waits for is there: its turn comes now"),
        (
            {"run_status": FlowRunStatus.PENDING, "flow": "nightly", "active": 2, "max_active_runs": 2},
            "the run has not begun: 2 runs of flow nightly are under way, at most 2 may be",
        ),
        (
            {"status": StepStatus.READY, "ahead": 1, "busy": 3},
            "nobody has claimed it for 5 minutes; 1 step of kind work is before it, 3 steps of kind work are under way",
        ),
        ({"status": StepStatus.READY, "ahead": 1_000}, "1000 steps of kind work or more are before it"),
        (
            {"status": StepStatus.READY, "due_at": NOW + 2 * MINUTE, "attempts": 1, "reason": "BROKEN: no disk"},
            "it is tried again in 2 minutes; attempt 1 did not succeed: BROKEN: no disk",
        ),
        (
            {"status": StepStatus.READY, "busy": 4, "limit": 4},
            "4 steps of kind work are under way, and no more than 4 may be",
        ),
        (
            {**BEGUN, "lease_until": NOW + 2 * MINUTE},
            "w1 began it 3 minutes ago (attempt 2), and holds it for another 2",
        ),
        ({**BEGUN, "lease_until": NOW - 2 * MINUTE}, "its lease ran out 2 minutes ago"),
        ({**BEGUN, "is_sealed": True}, "what it left is being published"),
        ({**BEGUN, "lease_until": NOW + MINUTE, "run_status": FlowRunStatus.CANCELLED}, "; the run is CANCELLED"),
        ({**BEGUN, "kind": "map", "items": (9, 4)}, "4 of its 9 items have ended"),
        ({**BEGUN, "kind": "flow", "inner_run": "r~s"}, "it waits for run r~s"),
        ({**ENDED, "status": StepStatus.SUCCEEDED}, "it succeeded 2 minutes ago"),
        ({**ENDED, "status": StepStatus.FAILED, "error": ERROR}, "it failed 2 minutes ago, attempt 1: BROKEN: no disk"),
        ({**ENDED, "status": StepStatus.SKIPPED, "reason": "not so: false"}, "skipped 2 minutes ago: not so: false"),
        (
            {**ENDED, "status": StepStatus.CANCELLED, "reason": "upstream_failed", "run_reason": "step a failed"},
            "it was cancelled 2 minutes ago: step a failed",
        ),
    ],
)
def test_every_standstill_has_its_words(facts: dict[str, Any], why: str) -> None:
    """F18: whatever a step waits for is named, with how long and how many."""
    assert why in explain(replace(STEP, **facts), NOW).why


@pytest.mark.parametrize(
    ("facts", "hint"),
    [
        ({"status": StepStatus.READY}, "penstock work flows --kinds work"),
        ({**ENDED, "status": StepStatus.FAILED, "error": ERROR}, "penstock flow retry r s"),
        ({"unmet": [("a", "RUNNING")]}, "ask why a has not ended"),
        ({"status": StepStatus.READY, "busy": 1, "limit": 1}, "flows.limits"),
    ],
)
def test_there_is_a_way_on(facts: dict[str, Any], hint: str) -> None:
    """F18: and what would move it."""
    assert hint in (explain(replace(STEP, **facts), NOW).hint or "")
