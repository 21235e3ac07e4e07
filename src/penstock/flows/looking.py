"""F8, F14: steps that must be looked at before they have their turn: what they can see, and what follows from it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import asyncpg

from penstock.flows import store
from penstock.flows.contract import STEP_LIMIT
from penstock.flows.definition.spec import StepSpec
from penstock.flows.definition.templates import Context, condition, fill, references
from penstock.flows.definition.validation import templates
from penstock.flows.engine import plan
from penstock.flows.model import NewStep
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Invalid, TooLarge

ITEMS_LIMIT = 16_000_000  # characters of the inputs of all items of a map


@dataclass
class Sight:
    """What the steps of one run that are looked at together refer to: asked for once, however many they are."""

    outputs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)

    def context(self, row: asyncpg.Record) -> Context:
        """What the expressions of a step can see."""
        return Context(run_id=row["run_id"], scope=row["scope"], outputs=self.outputs, statuses=self.statuses)

    def why_skipped(self, row: asyncpg.Record, spec: StepSpec, context: Context) -> str | None:
        """Why a step is skipped that waits for nothing; None when it is not."""
        if spec.on_skip == "skip":
            for n in row["depends_on"]:
                if n in self.skipped:
                    return f"{self.skipped[n]} was skipped"
        if spec.when is not None and not condition(spec.when).holds(context):
            return f"not so: {spec.when}"
        return None


async def look(tx: Connection, rows: Sequence[tuple[asyncpg.Record, StepSpec]]) -> dict[int, Sight]:
    """What can be seen, by run."""
    named: dict[int, set[str]] = defaultdict(set)
    before: dict[int, set[int]] = defaultdict(set)
    for row, spec in rows:
        named[row["run"]] |= _references(spec)
        before[row["run"]] |= set(row["depends_on"]) if spec.on_skip == "skip" else set()
    sights: dict[int, Sight] = {}
    for run, names in named.items():
        sight = sights[run] = Sight()
        for one in await tx.fetch(store.SQL["outputs_of"], run, sorted(names)) if names else []:
            sight.outputs[one["step_id"]] = one["outputs"] or {}
            sight.statuses[one["step_id"]] = one["status"]
        for one in await tx.fetch(store.SQL["skipped_at"], run, sorted(before[run])) if before[run] else []:
            sight.skipped[one["n"]] = one["step_id"]
    return sights


def items(spec: StepSpec, context: Context, row: asyncpg.Record, first: int) -> list[NewStep]:
    """The items of a map as steps; Invalid when what it goes over is no list, or too much."""
    over = fill(spec.over, context)
    if not isinstance(over, list) or spec.do is None:
        raise Invalid("NOT_A_LIST", f"a map goes over a list, not {type(over).__name__}", hint="look at `over`")
    if first + len(over) > STEP_LIMIT:
        raise Invalid("TOO_MANY_STEPS", f"{len(over)} items make more than {STEP_LIMIT} steps", hint="take fewer")
    work, written = spec.do, plan.document(spec.do)
    return [
        NewStep(
            n=first + index,
            step_id=f"{row['step_id']}[{index}]",
            kind=work.kind,
            depends_on=(),
            children=(row["n"],),
            is_looked_at=False,
            is_plain=False,
            required=work.required,
            spec=written,
            given=given,
            map_n=row["n"],
            max_attempts=work.retry.max_attempts if work.retry else None,
            time_limit=work.timeout,
        )
        for index, given in enumerate(_given(work.inputs, over, context))
    ]


def _given(inputs: Mapping[str, Any], over: Sequence[Any], context: Context) -> list[str]:
    """The inputs of each item; TooLarge before there is no memory left."""
    found: list[str] = []
    left = ITEMS_LIMIT
    for index, item in enumerate(over):
        found.append(plan.text(fill(inputs, replace(context, item=item, index=index))))
        left -= len(found[-1])
        if left < 0:
            hint = "give each item a reference to what it needs, not all of it"
            raise TooLarge("TOO_LARGE", f"the inputs of the items have more than {ITEMS_LIMIT} characters", hint=hint)
    return found


def _references(spec: StepSpec) -> set[str]:
    written = [templates(spec), spec.over, spec.do.inputs if spec.do else None]
    found = set(references(written))
    return found | condition(spec.when).references if spec.when else found
