"""F2: runs made of what was asked for."""

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


def planned(steps: Mapping[str, StepSpec], checks: Checks) -> list[NewStep]:
    """The steps as they are kept; Invalid, naming it, when they make no flow."""
    known = validation.validate_steps(steps, checks)
    looked = [validation.needs_evaluation(steps[step_id]) for step_id in known.ids]
    return [
        NewStep(
            n,
            step_id,
            steps[step_id].kind,
            known.depends_on[n],
            known.children[n],
            looked[n],
            not any(looked[child] for child in known.children[n]),
            steps[step_id].required,
            document(steps[step_id]),
            max_attempts=_most(steps[step_id]),
            time_limit=steps[step_id].timeout,
        )
        for n, step_id in enumerate(known.ids)
    ]


def document(written: BaseModel) -> str:
    """What was written, as it is kept: the same text for the same meaning."""
    return text(written.model_dump(mode="json", by_alias=True, exclude_defaults=True))


def text(value: Any) -> str:
    """*value* as JSON."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def digest(request: RunRequest) -> str:
    """F2: the same for the same request, whatever becomes of the flow it names."""
    return hashlib.sha256(document(request.model_copy(update={"run_id": None})).encode()).hexdigest()


class RunPlans:
    """Steps as they are kept, made once for flows that are run again and again."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[Mapping[str, StepSpec], list[NewStep]]] = OrderedDict()

    def planned(self, steps: Mapping[str, StepSpec], checks: Checks) -> list[NewStep]:
        """The plan of *steps*, which nobody changes."""
        known = self._known.get(id(steps))
        if known is None or known[0] is not steps:  # another may have come to lie in the same place
            known = (steps, planned(steps, checks))
            self._known[id(steps)] = known
            if len(self._known) > _PLANS:
                self._known.popitem(last=False)
        return known[1]


def open_ends(steps: Sequence[NewStep]) -> int:
    """How many steps there are that nothing depends on: with the last of them a run ends."""
    return sum(not step.children for step in steps)


async def begin(tx: Connection, run: int, now: datetime) -> StepSettlement:
    """Let a run that waits begin; one without steps has succeeded."""
    await store.move_run(tx, run, FlowRunStatus.PENDING, FlowRunStatus.RUNNING, ADVANCE, now)
    told = await store.advance(tx, [run], now)
    standing = await tx.fetchrow(store.SQL["standing_of"], run)
    if standing is not None and standing["open"] == 0:
        await store.move_run(tx, run, FlowRunStatus.RUNNING, FlowRunStatus.SUCCEEDED, ADVANCE, now)
        told.runs.append((run, "", FlowRunStatus.SUCCEEDED))
    return told


def _most(step: StepSpec) -> int | None:
    return step.retry.max_attempts if step.retry else None
