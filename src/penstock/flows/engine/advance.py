"""F3: the effects of ended steps on conditions, maps, sub-runs and runs; and the resolution of requests for runs."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

import asyncpg
import orjson

from penstock.flows import store
from penstock.flows.contract import (
    DEPTH_LIMIT,
    DOCUMENT_LIMIT,
    FLOW,
    MAP,
    SCOPE_LIMIT,
    STEP_LIMIT,
    FlowRunStatus,
    StepStatus,
)
from penstock.flows.definition import validation
from penstock.flows.definition.expression_eval import EvaluationContext
from penstock.flows.definition.spec import FailurePolicy, FlowSpec, RunRequest, StepSpec
from penstock.flows.definition.templates import fill_template, find_references, parse_condition
from penstock.flows.definition.validation import get_input_templates, parse_inputs
from penstock.flows.engine import plan
from penstock.flows.engine.decide import make_failure
from penstock.flows.engine.plan import ADVANCE, Checks
from penstock.flows.model import (
    STEP,
    UPSTREAM_FAILED,
    NewRun,
    NewStep,
    RunChange,
    StepEnd,
    StepError,
    StepKey,
    StepSettlement,
)
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Invalid, NotFound, TooLarge

ITEMS_LIMIT = 16_000_000  # characters of the inputs of all items of a map
_NAME_LIMIT = 200


@dataclass
class RunSnapshot:
    """The outputs and statuses of one run that its evaluated steps refer to; read once for all these steps."""

    outputs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)

    def make_context(self, row: asyncpg.Record) -> EvaluationContext:
        """Return the values that the expressions of a step can use."""
        return EvaluationContext(run_id=row["run_id"], scope=row["scope"], outputs=self.outputs, statuses=self.statuses)

    def find_skip_reason(self, row: asyncpg.Record, spec: StepSpec, context: EvaluationContext) -> str | None:
        """Return the reason to skip a step without unmet dependencies; None if it must run."""
        if spec.on_skip == "skip":
            for n in row["depends_on"]:
                if n in self.skipped:
                    return f"{self.skipped[n]} was skipped"
        if spec.when is not None and not parse_condition(spec.when).holds(context):
            return f"condition is false: {spec.when}"
        return None


async def read_snapshots(tx: Connection, rows: Sequence[tuple[asyncpg.Record, StepSpec]]) -> dict[int, RunSnapshot]:
    """Return everything that the steps refer to, by run."""
    names: dict[int, set[str]] = defaultdict(set)
    parents: dict[int, set[int]] = defaultdict(set)
    for row, spec in rows:
        documents = [get_input_templates(spec), spec.over, spec.do.inputs if spec.do else None]
        names[row["run"]] |= set(find_references(documents))
        if spec.when:
            names[row["run"]] |= parse_condition(spec.when).references
        parents[row["run"]] |= set(row["depends_on"]) if spec.on_skip == "skip" else set()
    snapshots: dict[int, RunSnapshot] = {}
    for run, step_ids in names.items():
        snapshot = snapshots[run] = RunSnapshot()
        for step in await tx.fetch(store.SQL["step_outputs"], run, sorted(step_ids)) if step_ids else []:
            snapshot.outputs[step["step_id"]] = step["outputs"] or {}
            snapshot.statuses[step["step_id"]] = step["status"]
        for step in await tx.fetch(store.SQL["skipped_steps"], run, sorted(parents[run])) if parents[run] else []:
            snapshot.skipped[step["n"]] = step["step_id"]
    return snapshots


def make_items(spec: StepSpec, context: EvaluationContext, row: asyncpg.Record, first: int) -> list[NewStep]:
    """Return the items of a map as steps; Invalid if `over` is not a list, or has too many elements."""
    over = fill_template(spec.over, context)
    if not isinstance(over, list) or spec.do is None:
        message = f"`over` of a map must be a list, not {type(over).__name__}"
        raise Invalid("NOT_A_LIST", message, hint="check the expression in `over` and the outputs that it refers to")
    if first + len(over) > STEP_LIMIT:
        message = f"{len(over)} items exceed the limit of {STEP_LIMIT} steps in a run"
        raise Invalid("TOO_MANY_STEPS", message, hint="group the items into batches, or split the flow")
    work, spec_json = spec.do, plan.encode_document(spec.do)
    return [
        NewStep(
            n=first + index,
            step_id=f"{row['step_id']}[{index}]",
            kind=work.kind,
            depends_on=(),
            children=(row["n"],),
            needs_evaluation=False,
            is_plain=False,
            required=work.required,
            spec=spec_json,
            resolved_inputs=inputs,
            map_n=row["n"],
            max_attempts=work.retry.max_attempts if work.retry else None,
            time_limit=work.timeout,
        )
        for index, inputs in enumerate(_resolve_item_inputs(work.inputs, over, context))
    ]


def _resolve_item_inputs(inputs: Mapping[str, Any], over: Sequence[Any], context: EvaluationContext) -> list[str]:
    """Return the inputs of each item; TooLarge before the process runs out of memory."""
    resolved: list[str] = []
    remaining = ITEMS_LIMIT
    for index, item in enumerate(over):
        resolved.append(plan.encode_json(fill_template(inputs, replace(context, item=item, index=index))))
        remaining -= len(resolved[-1])
        if remaining < 0:
            message = f"the inputs of all items of the map have more than {ITEMS_LIMIT} characters"
            raise TooLarge("TOO_LARGE", message, hint="pass each item a file name or a key instead of the content")
    return resolved


class FlowLookup(Protocol):
    """A lookup of flows by their names."""

    def get_flow(self, name: str) -> FlowSpec: ...


@dataclass
class StepDecisions:
    """The decisions about evaluated steps."""

    ends: list[StepEnd] = field(default_factory=list)
    ready: list[tuple[int, int, Mapping[str, Any] | None]] = field(default_factory=list)
    expanded: set[int] = field(default_factory=set)  # runs with new steps
    started: list[StepSettlement] = field(default_factory=list)  # of sub-runs


class Advance:
    """The effects of ended steps on locked runs, computed in the transaction of the change."""

    def __init__(self, flows: FlowLookup, checks: Checks) -> None:
        self._flows = flows
        self._checks = checks

    async def follow(self, tx: Connection, settlement: StepSettlement, now: datetime) -> None:
        """Apply all effects of *settlement*, and the effects of these, and add them to *settlement*."""
        latest = settlement
        while latest.to_evaluate or latest.runs or any(step.status is StepStatus.FAILED for step in latest.ended):
            latest = await self._apply_effects(tx, latest, now)
            settlement.add(latest)

    async def _apply_effects(self, tx: Connection, latest: StepSettlement, now: datetime) -> StepSettlement:
        for run in latest.runs:
            if run.status is FlowRunStatus.FAILED:
                await self._fail_run(tx, run, latest, now)
        ends = await self._fail_maps(tx, latest, now)
        decisions = await self._evaluate(tx, list(dict.fromkeys(latest.to_evaluate)), now)
        effects = StepSettlement()
        for started in decisions.started:
            effects.add(started)
        if decisions.ready:
            effects.ready |= await store.make_ready(tx, decisions.ready, now)
        for run_number in sorted(decisions.expanded):
            effects.add(await store.advance(tx, [run_number], now))
        if ends or decisions.ends:
            effects.add(await store.settle(tx, [*ends, *decisions.ends], now, ADVANCE))
        return effects

    async def _fail_run(self, tx: Connection, run: RunChange, latest: StepSettlement, now: datetime) -> None:
        """F7: cancel the steps that have not started; running steps may end."""
        names = [step.name for step in latest.ended if step.key[0] == run.run and step.status is StepStatus.FAILED]
        run.reason = f"step {names[0]} failed" if names else "a step failed"
        await tx.execute(store.SQL["set_run_reason"], run.run, run.reason)
        await store.cancel_waiting(tx, run.run, UPSTREAM_FAILED, ADVANCE, now)

    async def _fail_maps(self, tx: Connection, latest: StepSettlement, now: datetime) -> list[StepEnd]:
        """F14: fail the maps of failed items, and cancel their other items that have not started."""
        failed = {
            (step.key[0], step.map_n): step.name
            for step in latest.ended
            if step.status is StepStatus.FAILED and step.map_n is not None
        }
        ends: list[StepEnd] = []
        for row in await store.read_steps(tx, list(failed)) if failed else []:
            if row["status"] == StepStatus.RUNNING:
                name = failed[row["run"], row["n"]]
                ends.append(make_failure(row, StepError("ITEM_FAILED", f"item {name} failed", {"item": name})))
                await store.cancel_waiting(tx, row["run"], "map_failed", ADVANCE, now, map_n=row["n"])
                await _recount_run(tx, row)
        return ends

    async def _evaluate(self, tx: Connection, keys: Sequence[StepKey], now: datetime) -> StepDecisions:
        decisions = StepDecisions()
        waiting: list[tuple[asyncpg.Record, StepSpec]] = []
        for row in await store.read_steps(tx, keys) if keys else []:
            if row["run_status"] != FlowRunStatus.RUNNING:
                continue
            if row["status"] == StepStatus.PENDING:
                waiting.append((row, StepSpec.model_validate(row["spec"])))
            elif row["status"] == StepStatus.RUNNING and row["kind"] == MAP:
                outputs = await _collect_map_outputs(tx, (row["run"], row["n"]))
                decisions.ends.append(_make_success(row, row["fence"], outputs))
        snapshots = await read_snapshots(tx, waiting)
        for row, spec in waiting:
            await self._evaluate_step(tx, row, spec, snapshots[row["run"]], decisions, now)
        return decisions

    async def _evaluate_step(
        self,
        tx: Connection,
        row: asyncpg.Record,
        spec: StepSpec,
        snapshot: RunSnapshot,
        decisions: StepDecisions,
        now: datetime,
    ) -> None:
        """F8: decide whether a step without unmet dependencies is skipped, becomes ready, or fails."""
        context = snapshot.make_context(row)
        try:
            if (reason := snapshot.find_skip_reason(row, spec, context)) is not None:
                decisions.ends.append(_make_skip(row, reason))
            elif spec.kind == MAP:
                await self._expand_map(tx, row, spec, context, decisions, now)
            else:
                inputs = validation.fill_inputs(spec, context)
                if check := self._checks.get(spec.kind):
                    check(inputs)
                if spec.kind == FLOW:
                    await self._start_sub_run(tx, row, inputs, decisions, now)
                else:
                    decisions.ready.append((row["run"], row["n"], inputs))
        except (Invalid, NotFound) as error:
            step_error = StepError(error.code, error.message, {"hint": error.hint} if error.hint else None)
            decisions.ends.append(make_failure(row, step_error))

    async def _expand_map(
        self,
        tx: Connection,
        row: asyncpg.Record,
        spec: StepSpec,
        context: EvaluationContext,
        decisions: StepDecisions,
        now: datetime,
    ) -> None:
        """F14: insert a step per element of the list; a retried map reuses its items."""
        key = (row["run"], row["n"])
        items = await tx.fetch(store.SQL["map_items"], *key)
        if items:
            unmet = sum(StepStatus(item["status"]) not in STEP.groups["satisfied"] for item in items)
        else:
            steps = make_items(spec, context, row, await tx.fetchval(store.SQL["next_index"], row["run"]))
            unmet = len(steps)
            if steps:
                await store.insert_steps(tx, row["run"], steps, now)
                await _recount_run(tx, row)
        fence = await store.expand(tx, key, unmet, None, now)
        if unmet == 0 and fence is not None:
            decisions.ends.append(_make_success(row, fence, await _collect_map_outputs(tx, key)))
        decisions.expanded.add(row["run"])

    async def _start_sub_run(
        self, tx: Connection, row: asyncpg.Record, inputs: Mapping[str, Any], decisions: StepDecisions, now: datetime
    ) -> None:
        """F14: create the sub-run of a step; its name depends only on the step and its attempt."""
        if row["depth"] >= DEPTH_LIMIT:
            message = f"sub-runs are nested more than {DEPTH_LIMIT} levels deep"
            raise Invalid("NESTING_TOO_DEEP", message, hint="check whether a flow contains itself")
        request = parse_inputs(RunRequest, inputs)
        if request.flow in [outer["flow"] for outer in await tx.fetch(store.SQL["outer_flows"], row["run"])]:
            message = f"flow {request.flow} contains itself, directly or through other flows"
            raise Invalid("FLOW_RECURSION", message, hint="move the shared steps into a separate flow")
        flow, steps, scope, policy = resolve_request(request, self._flows)
        name = _make_sub_run_id(row["run_id"], row["step_id"], row["fence"] + 1)
        planned = plan.plan_steps(steps, self._checks)
        new = NewRun(
            run_id=name,
            flow=flow,
            scope=scope,
            digest=plan.compute_digest(request),
            fail_fast=policy.fail_fast,
            open=plan.count_open_ends(planned),
            created_by=ADVANCE,
            parent=(row["run"], row["n"]),
            depth=row["depth"] + 1,
            trace=row["trace"],
        )
        inserted = await store.insert_run(tx, new, planned, now, is_started=False)
        if inserted is None:
            raise Invalid(
                "RUN_EXISTS",
                f"run {name} exists already",
                hint=f"retry step {row['step_id']}: each attempt has its own run id",
            )
        await store.expand(tx, (row["run"], row["n"]), 0, {**inputs, "runId": name}, now)
        # A sub-run of a named flow may have to wait for other runs of this flow: the maintenance starts it.
        started = StepSettlement(has_waiting=True) if flow else await plan.start_run(tx, inserted[0], now)
        decisions.started.append(started)


def _make_sub_run_id(run_id: str, step_id: str, fence: int) -> str:
    """Return a run id that depends only on the step and its attempt; short enough for a folder name at any depth."""
    name = f"{run_id}~{step_id}" + (f"~{fence}" if fence > 1 else "")
    if len(name) <= _NAME_LIMIT:
        return name
    return f"{run_id.split('~')[0]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def resolve_request(
    request: RunRequest, flows: FlowLookup
) -> tuple[str | None, Mapping[str, StepSpec], dict[str, Any], FailurePolicy]:
    """Return the flow name, the steps, the scope and the policy of a request."""
    if (request.flow is None) == (request.steps is None):
        message = "a run needs either `flow` or `steps`"
        raise Invalid("BAD_RUN", message, hint="name a flow in `flow`, or define the steps in `steps`, but not both")
    if request.flow is None:
        return None, request.steps or {}, check_scope(request.scope), request.policy or FailurePolicy()
    spec = flows.get_flow(request.flow)
    return spec.name, spec.steps, check_scope({**spec.scope, **request.scope}), request.policy or spec.policy


def check_scope(scope: dict[str, Any]) -> dict[str, Any]:
    """Return *scope*; TooLarge if it is too large to be sent to workers with every step."""
    if (size := len(orjson.dumps(scope))) > SCOPE_LIMIT:
        hint = "store large values in an artifact or a file, and put its name into the scope"
        raise TooLarge("SCOPE_TOO_LARGE", f"the scope has {size} bytes; the limit is {SCOPE_LIMIT}", hint=hint)
    return scope


async def _recount_run(tx: Connection, row: asyncpg.Record) -> None:
    """Recount the open steps of a run that counts all its steps, after their number has changed."""
    if row["is_counted"]:
        await tx.fetch(store.SQL["recount_run"], row["run"], False)


async def _collect_map_outputs(tx: Connection, key: StepKey) -> dict[str, Any]:
    """Return the outputs of the items in order; without the items if they exceed the limit of a step."""
    items = await tx.fetch(store.SQL["map_items"], *key)
    outputs = [item["outputs"] for item in items]
    is_complete = len(orjson.dumps(outputs)) <= DOCUMENT_LIMIT
    return {"count": len(items), "items": outputs if is_complete else None, "truncated": not is_complete}


def _make_success(row: asyncpg.Record, fence: int, outputs: Mapping[str, Any]) -> StepEnd:
    return StepEnd(row["run"], row["n"], fence, StepStatus.RUNNING, StepStatus.SUCCEEDED, outputs=outputs)


def _make_skip(row: asyncpg.Record, reason: str) -> StepEnd:
    return StepEnd(row["run"], row["n"], row["fence"], StepStatus.PENDING, StepStatus.SKIPPED, reason=reason)
