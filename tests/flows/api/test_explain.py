"""F18: explanations of the status of a step."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.flows.api.explain import StepFacts, explain
from penstock.flows.contract import FlowRunStatus, StepStatus

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
STEP = StepFacts("r", "s", "work", StepStatus.PENDING, NOW - 5 * MINUTE)
STARTED = {"status": StepStatus.RUNNING, "worker": "w1", "attempts": 2, "started_at": NOW - 3 * MINUTE}
ENDED = {"finished_at": NOW - 2 * MINUTE, "attempts": 1}
ERROR = {"code": "BROKEN", "message": "no disk"}


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"unmet": [("a", "RUNNING"), ("b", "PENDING")]}, "it waits for a (RUNNING), b (PENDING)"),
        ({"unmet": [(f"s{n}", "READY") for n in range(7)]}, "s4 (READY) and 2 more"),
        ({}, "all its dependencies have ended: it becomes READY now"),
        (
            {"run_status": FlowRunStatus.PENDING, "flow": "nightly", "active": 2, "max_active_runs": 2},
            "the run has not started: 2 runs of flow nightly are active, and `maxActiveRuns` is 2",
        ),
        (
            {"status": StepStatus.READY, "ahead": 1, "busy": 3},
            "waited for a worker for 5 minutes; 1 step of kind work is ahead of it, 3 steps of kind work are running",
        ),
        ({"status": StepStatus.READY, "ahead": 1_000}, "1000 or more steps of kind work are ahead of it"),
        (
            {"status": StepStatus.READY, "due_at": NOW + 2 * MINUTE, "attempts": 1, "reason": "BROKEN: no disk"},
            "it will be retried in 2 minutes; attempt 1 did not succeed: BROKEN: no disk",
        ),
        (
            {"status": StepStatus.READY, "busy": 4, "limit": 4},
            "4 steps of kind work are running, and the limit is 4",
        ),
        (
            {**STARTED, "lease_until": NOW + 2 * MINUTE},
            "w1 started it 3 minutes ago (attempt 2); its lease expires in 2 minutes",
        ),
        ({**STARTED, "lease_until": NOW - 2 * MINUTE}, "its lease expired 2 minutes ago"),
        ({**STARTED, "is_sealed": True}, "its artifacts are being published"),
        ({**STARTED, "lease_until": NOW + MINUTE, "run_status": FlowRunStatus.CANCELLED}, "; the run is CANCELLED"),
        ({**STARTED, "kind": "map", "items": (9, 4)}, "4 of its 9 items have ended"),
        ({**STARTED, "kind": "flow", "sub_run": "r~s"}, "it waits for run r~s"),
        ({**ENDED, "status": StepStatus.SUCCEEDED}, "it succeeded 2 minutes ago"),
        ({**ENDED, "status": StepStatus.FAILED, "error": ERROR}, "it failed 2 minutes ago, attempt 1: BROKEN: no disk"),
        ({**ENDED, "status": StepStatus.SKIPPED, "reason": "not so: false"}, "skipped 2 minutes ago: not so: false"),
        (
            {**ENDED, "status": StepStatus.CANCELLED, "reason": "upstream_failed", "run_reason": "step a failed"},
            "it was cancelled 2 minutes ago: step a failed",
        ),
    ],
)
def test_every_status_is_explained(facts: dict[str, Any], why: str) -> None:
    """F18: the explanation names the reason, with durations and numbers."""
    assert why in explain(replace(STEP, **facts), NOW).why


@pytest.mark.parametrize(
    ("facts", "hint"),
    [
        ({"status": StepStatus.READY}, "penstock work flows --kinds work"),
        ({**ENDED, "status": StepStatus.FAILED, "error": ERROR}, "penstock flow retry r s"),
        ({"unmet": [("a", "RUNNING")]}, "penstock flow show r --why a"),
        ({"status": StepStatus.READY, "busy": 1, "limit": 1}, "flows.limits"),
    ],
)
def test_explanation_has_a_hint(facts: dict[str, Any], hint: str) -> None:
    """F18: the hint has the command or the setting that changes the status."""
    assert hint in (explain(replace(STEP, **facts), NOW).hint or "")
