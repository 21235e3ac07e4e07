"""F3: the effects of ended steps on conditions, maps, inner flows and runs; and the resolution of requests for runs."""

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
from penstock.flows.definition.validation import input_templates, parse_inputs
from penstock.flows.engine import plan
from penstock.flows.engine.decide import given_up
from penstock.flows.engine.plan import ADVANCE, Checks
from penstock.flows.model import STEP, UPSTREAM_FAILED, NewRun, NewStep, StepEnd, StepError, StepKey, StepSettlement
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Invalid, NotFound, TooLarge

ITEMS_LIMIT = 16_000_000  # characters of the inputs of all items of a map
_NAME_LIMIT = 200


@dataclass
class RunSnapshot:
    """What the steps of one run that are looked at together refer to: asked for once, however many they are."""

    outputs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)

    def context(self, row: asyncpg.Record) -> EvaluationContext:
        """What the expressions of a step can see."""
        return EvaluationContext(run_id=row["run_id"], scope=row["scope"], outputs=self.outputs, statuses=self.statuses)

    def why_skipped(self, row: asyncpg.Record, spec: StepSpec, context: EvaluationContext) -> str | None:
        """Why a step is skipped that waits for nothing; None when it is not."""
        if spec.on_skip == "skip":
            for n in row["depends_on"]:
                if n in self.skipped:
                    return f"{self.skipped[n]} was skipped"
        if spec.when is not None and not parse_condition(spec.when).holds(context):
            return f"not so: {spec.when}"
        return None


async def look(tx: Connection, rows: Sequence[tuple[asyncpg.Record, StepSpec]]) -> dict[int, RunSnapshot]:
    """What can be seen, by run."""
    named: dict[int, set[str]] = defaultdict(set)
    before: dict[int, set[int]] = defaultdict(set)
    for row, spec in rows:
        written = [input_templates(spec), spec.over, spec.do.inputs if spec.do else None]
        named[row["run"]] |= set(find_references(written))
        if spec.when:
            named[row["run"]] |= parse_condition(spec.when).references
        before[row["run"]] |= set(row["depends_on"]) if spec.on_skip == "skip" else set()
    sights: dict[int, RunSnapshot] = {}
    for run, names in named.items():
        sight = sights[run] = RunSnapshot()
        for one in await tx.fetch(store.SQL["outputs_of"], run, sorted(names)) if names else []:
            sight.outputs[one["step_id"]] = one["outputs"] or {}
            sight.statuses[one["step_id"]] = one["status"]
        for one in await tx.fetch(store.SQL["skipped_at"], run, sorted(before[run])) if before[run] else []:
            sight.skipped[one["n"]] = one["step_id"]
    return sights


def items(spec: StepSpec, context: EvaluationContext, row: asyncpg.Record, first: int) -> list[NewStep]:
    """The items of a map as steps; Invalid when what it goes over is no list, or too much."""
    over = fill_template(spec.over, context)
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
            needs_evaluation=False,
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


def _given(inputs: Mapping[str, Any], over: Sequence[Any], context: EvaluationContext) -> list[str]:
    """The inputs of each item; TooLarge before there is no memory left."""
    found: list[str] = []
    left = ITEMS_LIMIT
    for index, item in enumerate(over):
        found.append(plan.text(fill_template(inputs, replace(context, item=item, index=index))))
        left -= len(found[-1])
        if left < 0:
            hint = "give each item a reference to what it needs, not all of it"
            raise TooLarge("TOO_LARGE", f"the inputs of the items have more than {ITEMS_LIMIT} characters", hint=hint)
    return found


class FlowLookup(Protocol):
    """Flows by their names."""

    def get_flow(self, name: str) -> FlowSpec: ...


@dataclass
class StepDecisions:
    """What was found of steps that were looked at."""

    ends: list[StepEnd] = field(default_factory=list)
    ready: list[tuple[int, int, Mapping[str, Any] | None]] = field(default_factory=list)
    grown: set[int] = field(default_factory=set)  # runs that got more steps
    begun: list[StepSettlement] = field(default_factory=list)  # of runs inside


class Advance:
    """The engine. It works on runs that are held, in the transaction that made the change."""

    def __init__(self, flows: FlowLookup, checks: Checks) -> None:
        self._flows = flows
        self._checks = checks

    async def follow(self, tx: Connection, told: StepSettlement, now: datetime) -> None:
        """Do all that follows from *told*, which grows by it, until nothing follows any more."""
        news = told
        while news.to_evaluate or news.runs or any(one.status is StepStatus.FAILED for one in news.ended):
            news = await self._once(tx, news, now)
            told.add(news)

    async def _once(self, tx: Connection, news: StepSettlement, now: datetime) -> StepSettlement:
        for run, _, status in news.runs:
            if status is FlowRunStatus.FAILED:
                await self._fail(tx, run, news, now)
        ends = await self._failed_maps(tx, news, now)
        verdicts = await self._looked_at(tx, list(dict.fromkeys(news.to_evaluate)), now)
        more = StepSettlement()
        for begun in verdicts.begun:
            more.add(begun)
        if verdicts.ready:
            more.ready |= await store.make_ready(tx, verdicts.ready, now)
        for run in sorted(verdicts.grown):
            more.add(await store.advance(tx, [run], now))
        if ends or verdicts.ends:
            more.add(await store.settle(tx, [*ends, *verdicts.ends], now, ADVANCE))
        return more

    async def _fail(self, tx: Connection, run: int, news: StepSettlement, now: datetime) -> None:
        """F7: what has not begun does not begin; what is under way may end."""
        named = [one.name for one in news.ended if one.key[0] == run and one.status is StepStatus.FAILED]
        reason = f"step {named[0]} failed" if named else "a step failed"
        await tx.execute(store.SQL["explain_run"], run, reason)
        await store.cancel_waiting(tx, run, UPSTREAM_FAILED, ADVANCE, now)

    async def _failed_maps(self, tx: Connection, news: StepSettlement, now: datetime) -> list[StepEnd]:
        """F14: with one of its items a map has failed; the others that have not begun are cancelled."""
        failed = {
            (one.key[0], one.map_n): one.name
            for one in news.ended
            if one.status is StepStatus.FAILED and one.map_n is not None
        }
        ends: list[StepEnd] = []
        for row in await store.steps_at(tx, list(failed)) if failed else []:
            if row["status"] == StepStatus.RUNNING:
                name = failed[row["run"], row["n"]]
                ends.append(given_up(row, StepError("ITEM_FAILED", f"{name} failed", {"item": name})))
                await store.cancel_waiting(tx, row["run"], "map_failed", ADVANCE, now, map_n=row["n"])
                await _recount(tx, row)
        return ends

    async def _looked_at(self, tx: Connection, places: Sequence[StepKey], now: datetime) -> StepDecisions:
        verdicts = StepDecisions()
        waiting: list[tuple[asyncpg.Record, StepSpec]] = []
        for row in await store.steps_at(tx, places) if places else []:
            if row["run_status"] != FlowRunStatus.RUNNING:
                continue
            if row["status"] == StepStatus.PENDING:
                waiting.append((row, StepSpec.model_validate(row["spec"])))
            elif row["status"] == StepStatus.RUNNING and row["kind"] == MAP:
                outputs = await _map_outputs(tx, (row["run"], row["n"]))
                verdicts.ends.append(_outcome(row, row["fence"], outputs))
        sights = await look(tx, waiting)
        for row, spec in waiting:
            await self._judge(tx, row, spec, sights[row["run"]], verdicts, now)
        return verdicts

    async def _judge(
        self,
        tx: Connection,
        row: asyncpg.Record,
        spec: StepSpec,
        sight: RunSnapshot,
        verdicts: StepDecisions,
        now: datetime,
    ) -> None:
        """F8: whether a step that waits for nothing is skipped, has its turn, or makes no sense."""
        context = sight.context(row)
        try:
            if (reason := sight.why_skipped(row, spec, context)) is not None:
                verdicts.ends.append(_skip(row, reason))
            elif spec.kind == MAP:
                await self._expand(tx, row, spec, context, verdicts, now)
            else:
                given = validation.fill_inputs(spec, context)
                if check := self._checks.get(spec.kind):
                    check(given)
                if spec.kind == FLOW:
                    await self._begin_inner(tx, row, given, verdicts, now)
                else:
                    verdicts.ready.append((row["run"], row["n"], given))
        except (Invalid, NotFound) as error:
            told = StepError(error.code, error.message, {"hint": error.hint} if error.hint else None)
            verdicts.ends.append(given_up(row, told))

    async def _expand(
        self,
        tx: Connection,
        row: asyncpg.Record,
        spec: StepSpec,
        context: EvaluationContext,
        verdicts: StepDecisions,
        now: datetime,
    ) -> None:
        """F14: a step per item of a list that is known only now; a map that is tried again keeps its items."""
        place = (row["run"], row["n"])
        known = await tx.fetch(store.SQL["items_of"], *place)
        if known:
            waits = sum(StepStatus(item["status"]) not in STEP.groups["satisfied"] for item in known)
        else:
            steps = items(spec, context, row, await tx.fetchval(store.SQL["next_place"], row["run"]))
            waits = len(steps)
            if steps:
                await store.insert_steps(tx, row["run"], steps, now)
                await _recount(tx, row)
        fence = await store.expand(tx, place, waits, None, now)
        if waits == 0 and fence is not None:
            verdicts.ends.append(_outcome(row, fence, await _map_outputs(tx, place)))
        verdicts.grown.add(row["run"])

    async def _begin_inner(
        self, tx: Connection, row: asyncpg.Record, given: Mapping[str, Any], verdicts: StepDecisions, now: datetime
    ) -> None:
        """F14: a run inside a step, by a name that nothing but the step and its attempt decides."""
        if row["depth"] >= DEPTH_LIMIT:
            raise Invalid("NESTING_TOO_DEEP", f"flows are at most {DEPTH_LIMIT} deep", hint="does one contain itself?")
        request = parse_inputs(RunRequest, given)
        if request.flow in [one["flow"] for one in await tx.fetch(store.SQL["outer_flows"], row["run"])]:
            hint = "take its steps into another flow"
            raise Invalid("FLOW_RECURSION", f"flow {request.flow} would run within itself", hint=hint)
        flow, steps, scope, policy = resolved(request, self._flows)
        fence = row["fence"] + 1
        name = _inner_name(row["run_id"], row["step_id"], fence)
        planned = plan.planned(steps, self._checks)
        new = NewRun(
            run_id=name,
            flow=flow,
            scope=scope,
            digest=plan.digest(request),
            fail_fast=policy.fail_fast,
            open=plan.open_ends(planned),
            created_by=ADVANCE,
            parent=(row["run"], row["n"]),
            depth=row["depth"] + 1,
            trace=row["trace"],
        )
        made = await store.insert_run(tx, new, planned, now, is_begun=False)
        if made is None:
            raise Invalid("RUN_EXISTS", f"there is a run {name} already", hint="choose other run ids")
        await store.expand(tx, (row["run"], row["n"]), 0, {**given, "runId": name}, now)
        # One that has a name may have to wait for others of it, as any run of it: who admits them begins it.
        begun = StepSettlement(has_waiting=True) if flow else await plan.begin(tx, made[0], now)
        verdicts.begun.append(begun)


def _inner_name(run_id: str, step_id: str, fence: int) -> str:
    """What nothing but the step and its attempt decides, and what can be a folder's name however deep it is."""
    name = f"{run_id}~{step_id}" + (f"~{fence}" if fence > 1 else "")
    if len(name) <= _NAME_LIMIT:
        return name
    return f"{run_id.split('~')[0]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def resolved(
    request: RunRequest, flows: FlowLookup
) -> tuple[str | None, Mapping[str, StepSpec], dict[str, Any], FailurePolicy]:
    """What a request means: the name of the flow, its steps, its scope, its policy."""
    if (request.flow is None) == (request.steps is None):
        raise Invalid("BAD_RUN", "a run is made of a `flow` or of `steps`", hint="give exactly one of them")
    if request.flow is None:
        return None, request.steps or {}, checked_scope(request.scope), request.policy or FailurePolicy()
    spec = flows.get_flow(request.flow)
    return spec.name, spec.steps, checked_scope({**spec.scope, **request.scope}), request.policy or spec.policy


def checked_scope(scope: dict[str, Any]) -> dict[str, Any]:
    """*scope* itself, unless it is more than every worker of the run can be handed with every step."""
    if (size := len(orjson.dumps(scope))) > SCOPE_LIMIT:
        hint = "keep what is large in an artifact or a file, and its name in the scope"
        raise TooLarge("SCOPE_TOO_LARGE", f"the scope has {size} bytes, at most {SCOPE_LIMIT}", hint=hint)
    return scope


async def _recount(tx: Connection, row: asyncpg.Record) -> None:
    """Count anew where all steps of a run are counted, and there are more or fewer now."""
    if row["is_counted"]:
        await tx.fetch(store.SQL["recount_run"], row["run"], False)


async def _map_outputs(tx: Connection, place: StepKey) -> dict[str, Any]:
    """What the items gave, in order; left out where it is more than a step may give."""
    items = await tx.fetch(store.SQL["items_of"], *place)
    given = [item["outputs"] for item in items]
    is_whole = len(orjson.dumps(given)) <= DOCUMENT_LIMIT
    return {"count": len(items), "items": given if is_whole else None, "truncated": not is_whole}


def _outcome(row: asyncpg.Record, fence: int, outputs: Mapping[str, Any]) -> StepEnd:
    return StepEnd(row["run"], row["n"], fence, StepStatus.RUNNING, StepStatus.SUCCEEDED, outputs=outputs)


def _skip(row: asyncpg.Record, reason: str) -> StepEnd:
    return StepEnd(row["run"], row["n"], row["fence"], StepStatus.PENDING, StepStatus.SKIPPED, reason=reason)
