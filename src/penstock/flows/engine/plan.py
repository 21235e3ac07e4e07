"""F2: the plan of a run: the steps of a request as they are stored, and the start of the run."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson
from pydantic import BaseModel

from penstock.flows import store
from penstock.flows.contract import FlowRunStatus
from penstock.flows.definition import validation
from penstock.flows.definition.spec import RunRequest, StepSpec
from penstock.flows.model import NewStep, StepSettlement
from penstock.kernel.db.database import Connection

Checks = Mapping[str, Callable[[Mapping[str, Any]], None]]
ADVANCE = "advance"
_PLANS = 200


def plan_steps(steps: Mapping[str, StepSpec], checks: Checks) -> list[NewStep]:
    """Return the steps as they are stored; Invalid, with the step named, if they are not a valid flow."""
    graph = validation.validate_steps(steps, checks)
    needs_evaluation = [validation.needs_evaluation(steps[step_id]) for step_id in graph.ids]
    return [
        NewStep(
            n,
            step_id,
            steps[step_id].kind,
            graph.depends_on[n],
            graph.children[n],
            needs_evaluation[n],
            not any(needs_evaluation[child] for child in graph.children[n]),
            steps[step_id].required,
            encode_document(steps[step_id]),
            max_attempts=_get_max_attempts(steps[step_id]),
            time_limit=steps[step_id].timeout,
        )
        for n, step_id in enumerate(graph.ids)
    ]


def encode_document(document: BaseModel) -> str:
    """Return a document as it is stored: equal documents have equal texts."""
    return encode_json(document.model_dump(mode="json", by_alias=True, exclude_defaults=True))


def encode_json(value: Any) -> str:
    """Return *value* as JSON with sorted keys."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def compute_digest(request: RunRequest) -> str:
    """F2: return the digest of a request, which does not depend on the current version of its flow."""
    return hashlib.sha256(encode_document(request.model_copy(update={"run_id": None})).encode()).hexdigest()


class RunPlans:
    """A cache of plans, for flows that run again and again."""

    def __init__(self) -> None:
        self._plans: OrderedDict[int, tuple[Mapping[str, StepSpec], list[NewStep]]] = OrderedDict()

    def plan_steps(self, steps: Mapping[str, StepSpec], checks: Checks) -> list[NewStep]:
        """Return the plan of *steps*, which must not change."""
        cached = self._plans.get(id(steps))
        if cached is None or cached[0] is not steps:  # the id may belong to an object that was deleted
            cached = (steps, plan_steps(steps, checks))
            self._plans[id(steps)] = cached
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return cached[1]


def count_open_ends(steps: Sequence[NewStep]) -> int:
    """Return the number of steps without children: a run ends with the last of them."""
    return sum(not step.children for step in steps)


async def start_run(tx: Connection, run: int, now: datetime) -> StepSettlement:
    """Start a waiting run; a run without steps succeeds at once."""
    started = await store.move_run(tx, run, FlowRunStatus.PENDING, FlowRunStatus.RUNNING, ADVANCE, now)
    settlement = await store.advance(tx, [run], now)
    settlement.started.append(started)
    progress = await tx.fetchrow(store.SQL["run_progress"], run)
    if progress is not None and progress["open"] == 0:
        ended = await store.move_run(tx, run, FlowRunStatus.RUNNING, FlowRunStatus.SUCCEEDED, ADVANCE, now)
        settlement.runs.append(ended)
    return settlement


def _get_max_attempts(step: StepSpec) -> int | None:
    return step.retry.max_attempts if step.retry else None
