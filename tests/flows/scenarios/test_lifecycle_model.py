"""Random lifecycles of runs: workers succeed, fail, stop, and repeat or delay reports, while operators change runs."""

import asyncio
import hashlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.flows import store
from penstock.flows.contract import FlowRunStatus, StepReportKind, StepStatus
from penstock.flows.model import RUN, STEP, ClaimedStep, StepReport
from penstock.kernel.errors import Conflict
from tests.flows.scenarios.engine_model import MAX_LOST, EngineModel
from tests.flows.scenarios.flow_strategies import OTHER_KIND, UNLIKELY, encode_steps, steps
from tests.flows.scenarios.run_model import ModelRefusal, ModelRun, ModelStep
from tests.flows.stepper import LEASE, WORK, FlowsStepper, ProcessDied, attempt_content, flows_stepper, make_report
from tests.services.postgres import fresh_database
from tests.support.soak import Campaign, examples, model_examples

T = TypeVar("T")
NARROW = "narrow"  # a flow with one run at a time
OUTCOMES = [StepReportKind.SUCCEEDED] * 4 + [
    StepReportKind.FAILED,
    StepReportKind.FAILED,
    StepReportKind.CANCELLED,
    StepReportKind.RELEASED,
]
RUN_COUNTS = """
    SELECT r.run_id, r.status, r.open, r.failed, r.is_counted,
           count(*) FILTER (WHERE t.status NOT IN ('SUCCEEDED', 'FAILED', 'SKIPPED', 'CANCELLED')) AS open_steps,
           count(*) FILTER (WHERE t.status NOT IN ('SUCCEEDED', 'FAILED', 'SKIPPED', 'CANCELLED')
                                  AND t.children = '{}') AS open_last_steps,
           count(*) FILTER (WHERE t.status = 'FAILED' AND t.map_n IS NULL) AS failed_steps,
           count(*) FILTER (WHERE t.status IN ('PENDING', 'READY')) AS waiting
    FROM flow_run r LEFT JOIN flow_step t ON t.run = r.id GROUP BY r.id"""
MISCOUNTED_STEPS = """
    SELECT t.run, t.step_id, t.unmet FROM flow_step t
    WHERE t.status = 'PENDING' AND t.unmet <> (
        SELECT count(*) FROM flow_step p
        WHERE p.run = t.run AND p.n = ANY (t.depends_on) AND p.status NOT IN ('SUCCEEDED', 'SKIPPED'))
    OR t.status = 'RUNNING' AND t.kind = 'map' AND t.unmet <> (
        SELECT count(*) FROM flow_step i
        WHERE i.run = t.run AND i.map_n = t.n AND i.status NOT IN ('SUCCEEDED', 'SKIPPED'))"""
STATUSES = """
    SELECT r.run_id, r.status AS run_status, t.step_id, t.status, t.fence, t.artifacts
    FROM flow_run r LEFT JOIN flow_step t ON t.run = r.id"""


@dataclass(frozen=True)
class SentReport:
    """A report that a worker sent, and the step it claimed."""

    claimed: ClaimedStep
    report: StepReport


class FlowsLifecycle(RuleBasedStateMachine):
    """Several runs at once; the engine and the plain model execute the same operations."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.folder = TemporaryDirectory()
        self.model = EngineModel()
        self.flows = self.run(self._open())
        self.model.limits[NARROW] = 1
        self.claimed: list[ClaimedStep] = []  # claims of workers, including lost ones
        self.sent: list[SentReport] = []
        self.fences: dict[tuple[str, str], int] = {}
        self.started: set[tuple[str, str, int]] = set()

    async def _open(self) -> FlowsStepper:
        url = await self.stack.enter_async_context(fresh_database(self.url))
        return await self.stack.enter_async_context(flows_stepper(url, Path(self.folder.name), max_lost=MAX_LOST))

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # a first error must not be hidden by a second one
                self._drain()
        finally:
            self.run(self.stack.aclose())
            self.loop.close()
            self.folder.cleanup()

    # Runs.

    @initialize(drawn=steps(), fails_fast=UNLIKELY)
    def create_first(self, drawn: dict[str, ModelStep], fails_fast: bool) -> None:
        self.create(drawn, fails_fast)

    @precondition(lambda self: len(self.model.runs) < 8)
    @rule(drawn=steps(), fails_fast=UNLIKELY)
    def create(self, drawn: dict[str, ModelStep], fails_fast: bool) -> None:
        name = f"run{len(self.model.runs)}"
        self.run(self.flows.start(encode_steps(drawn), name, policy={"failFast": fails_fast}))
        self.model.create(ModelRun(name, drawn, is_fail_fast=fails_fast))

    @precondition(lambda self: len(self.model.runs) < 8)
    @rule(drawn=steps(3), twice=st.booleans())
    def create_narrow(self, drawn: dict[str, ModelStep], twice: bool) -> None:
        for _ in range(2 if twice else 1):
            name = f"run{len(self.model.runs)}"
            self.flows.catalogue.add(NARROW, encode_steps(drawn), maxActiveRuns=1)
            self.run(self.flows.start(None, name, flow=NARROW))
            self.model.create(ModelRun(name, {step_id: step.copy() for step_id, step in drawn.items()}, NARROW))

    def _start_waiting_runs(self) -> None:
        self.run(self.flows.maintenance.start_waiting_runs())
        self.model.start_waiting_runs()

    # Workers.

    @rule(capacity=st.integers(1, 3), workers=st.integers(1, 3), kinds=st.sampled_from([[WORK], [WORK, OTHER_KIND]]))
    def claim(self, capacity: int, workers: int, kinds: list[str]) -> None:
        """F4: workers claim in turn, so that an example is repeatable; test_races covers concurrent claims."""
        for n in range(workers):
            ready = [step for _, step in self.model.steps() if step.status is StepStatus.READY and step.kind in kinds]
            claims = self.run(self.flows.engine.claim(f"w{n}", dict.fromkeys(kinds, capacity), limit=capacity))
            assert len(claims) == min(capacity, len(ready))
            for claimed in claims:
                self._check_claim(claimed)

    def _check_claim(self, claimed: ClaimedStep) -> None:
        """F4: a step is claimed once under a fence, with its own inputs."""
        run, step = self._find_step(claimed)
        self.model.claim(run, step)
        assert (claimed.fence, claimed.attempt) == (step.fence, step.attempts)
        if step.parent_map is not None:
            assert claimed.inputs == {"item": step.item}
        if step.required_output is not None:
            assert claimed.inputs == {"v": run.steps[step.required_output].outputs["v"]}
        assert (claimed.run_id, claimed.step_id, claimed.fence) not in self.started
        self.started.add((claimed.run_id, claimed.step_id, claimed.fence))
        self.claimed.append(claimed)

    def _find_step(self, claimed: ClaimedStep) -> tuple[ModelRun, ModelStep]:
        run = self.model.runs[claimed.run_id]
        return run, run.steps[claimed.step_id]

    @precondition(lambda self: self.claimed)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(OUTCOMES),
        v=st.integers(0, 1),
        writes=UNLIKELY,
        dies=UNLIKELY,
        is_local=UNLIKELY,
    )
    def end_step(
        self, data: st.DataObject, outcome: StepReportKind, v: int, writes: bool, dies: bool, is_local: bool
    ) -> None:
        """F5, F6: a worker reports a step that it claimed, also if the claim is lost."""
        claimed = self.claimed.pop(data.draw(st.integers(0, len(self.claimed) - 1)))
        outputs = {"v": v, "list": [v] * v} if outcome is StepReportKind.SUCCEEDED else {}
        if writes:
            self.run(self.flows.write(claimed))
        artifacts = ("out.txt",) if writes else ()
        sent = SentReport(claimed, make_report(claimed, outcome, outputs=outputs, artifacts=artifacts))
        self.sent.append(sent)
        if is_local and outcome is StepReportKind.SUCCEEDED:
            self._settle_and_claim(sent)
        else:
            self._report(sent, dies=dies)

    @rule(v=st.integers(0, 1))
    def complete_steps(self, v: int) -> None:
        """Workers claim steps and complete all that they own."""
        self.claim(3, 1, [WORK, OTHER_KIND])
        for claimed in [claimed for claimed in self.claimed if self._find_step(claimed)[1].fence == claimed.fence]:
            self.claimed.remove(claimed)
            self.sent.append(SentReport(claimed, make_report(claimed, outputs={"v": v, "list": [1, 2]})))
            self._report(self.sent[-1])

    def _settle_and_claim(self, sent: SentReport) -> None:
        """F5: report as the work loop does, which claims the steps that the report makes ready."""
        run, step = self._find_step(sent.claimed)
        settled = self.flows.work_source.settle("w", [(sent.claimed, sent.report)], [WORK, OTHER_KIND], 2)
        answers, claims = self.run(settled)
        content = attempt_content(sent.claimed) if sent.report.artifacts else None
        assert list(answers) == [self.model.report(run, step, sent.report, content, dies=False)]
        assert len(claims) <= 2
        for claimed in claims:
            self._check_claim(claimed)

    def _report(self, sent: SentReport, *, dies: bool = False) -> None:
        run, step = self._find_step(sent.claimed)
        content = attempt_content(sent.claimed) if sent.report.artifacts else None
        self.flows.storage.is_dying = dies
        has_died = False
        try:
            answer = self.run(self.flows.engine.report([sent.report], "w"))[0]
        except ProcessDied:
            has_died = True
        finally:
            self.flows.storage.is_dying = False
        expected = self.model.report(run, step, sent.report, content, dies=dies)
        assert has_died or answer is expected
        assert not has_died or step.sealed is not None

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), is_same=st.booleans(), writes=st.booleans())
    def repeat_report(self, data: st.DataObject, is_same: bool, writes: bool) -> None:
        """F4, F5: a repeated, contradicting or late report changes nothing, and neither do late artifacts."""
        sent = self.sent[data.draw(st.integers(0, len(self.sent) - 1))]
        if not is_same:
            # Contradict the report; a report after an accepted success is a failure, never another success.
            outcome = (
                StepReportKind.FAILED if sent.report.outcome is StepReportKind.SUCCEEDED else StepReportKind.SUCCEEDED
            )
            sent = SentReport(sent.claimed, make_report(sent.claimed, outcome, outputs={"v": 1}))
        _, step = self._find_step(sent.claimed)
        is_claimed = step.is_claimed and step.fence == sent.claimed.fence
        if writes and not is_claimed and step.sealed is None:
            self.run(self.flows.write(sent.claimed, data=b"late"))
        if not is_claimed:
            before = self.run(self.flows.fingerprint())
            is_sealed = step.sealed is not None
            self._report(sent)
            assert is_sealed or self.run(self.flows.fingerprint()) == before

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        """F9: a heartbeat answers for each step whether the worker still owns it and must stop."""
        self._heartbeat([claimed for claimed in self.claimed if data.draw(st.booleans())])

    def _heartbeat(self, claims: Sequence[ClaimedStep]) -> None:
        names = {(claimed.run_id, claimed.step_id, claimed.fence): claimed for claimed in claims}
        expected = {}
        for name, claimed in names.items():
            run, step = self._find_step(claimed)
            if step.is_claimed and step.fence == claimed.fence:
                expected[name] = run.must_stop(step)
        assert self.run(self.flows.engine.heartbeat(list(names))) == expected

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def lose_workers(self, data: st.DataObject) -> None:
        """F11: the leases of some workers expire; these workers can still report later."""
        self._lose_workers_except([claimed for claimed in self.claimed if data.draw(st.booleans())])

    def _lose_workers_except(self, alive: Sequence[ClaimedStep]) -> None:
        for _ in range(2):
            self._heartbeat(alive)
            self.flows.clock.advance(0.7 * LEASE)
        names = {(claimed.run_id, claimed.step_id, claimed.fence) for claimed in alive}
        lost = []
        for run, step in self.model.steps():
            is_renewed = (run.name, step.name, step.fence) in names and not run.must_stop(step)
            if step.is_claimed and not is_renewed:
                lost.append((run, step))
        assert self.run(self.flows.engine.reap()) == len(lost)
        self.model.expire(lost)

    def _publish_sealed(self) -> None:
        """F6: another process publishes the artifacts of a process that died."""
        self.flows.clock.advance(timedelta(seconds=11))
        self.run(self.flows.maintenance.publish_sealed())
        for run, step in list(self.model.steps()):
            self.model.publish(run, step)

    # Operators.

    @precondition(lambda self: self.model.runs)
    @rule(data=st.data(), action=st.sampled_from(["cancel", "retry", "retry", "retry step", "skip", "skip", "resume"]))
    def operate(self, data: st.DataObject, action: str) -> None:
        """F9, F10, F19: an operator cancels, retries, skips or resumes."""
        run = self.model.runs[data.draw(st.sampled_from(sorted(self.model.runs)))]
        name = (
            data.draw(st.sampled_from(sorted(run.steps))) if run.steps and action not in ("cancel", "retry") else None
        )
        if name is None and action in ("skip", "retry step", "resume"):
            return
        operations = self.flows.operations
        match action:
            case "cancel":
                self._apply(operations.cancel(run.name, "tester"), lambda: self.model.cancel(run))
            case "skip":
                self._apply(operations.skip(run.name, str(name), "tester"), lambda: self.model.skip(run, str(name)))
            case "resume":
                if len(self.model.runs) < 10 and run.steps[str(name)].parent_map is None:
                    new = f"run{len(self.model.runs)}"
                    self.run(operations.resume(run.name, str(name), "tester", new))
                    self.model.resume(run, str(name), new)
            case _:
                self._apply(operations.retry(run.name, "tester", name), lambda: self.model.retry(run, name))

    def _apply(self, operation: Awaitable[object], apply_to_model: Callable[[], None]) -> None:
        """The engine refuses an operation if and only if the model does; a refused operation changes nothing."""
        try:
            apply_to_model()
        except ModelRefusal:
            before = self.run(self.flows.fingerprint())
            with pytest.raises(Conflict):
                self.run(operation)
            assert self.run(self.flows.fingerprint()) == before
        else:
            self.run(operation)

    # Periodic tasks.

    @rule(task=st.sampled_from(["start_waiting_runs", "publish_sealed", "settle_sub_runs", "repair"]))
    def run_periodic_task(self, task: str) -> None:
        getattr(self, f"_{task}")()

    def _settle_sub_runs(self) -> None:
        """F14: the end of every inner run is reported to its outer step."""
        while self.run(self.flows.db.fetch(store.SQL["unreported_runs"], 1)):
            rows = self.run(self.flows.db.fetch("SELECT run_id FROM flow_run ORDER BY id"))
            self.run(self.flows.maintenance.settle_sub_runs())
            assert self.model.settle_sub_runs([row["run_id"] for row in rows])

    def _repair(self) -> None:
        """F3: there is nothing to repair, and a repair changes nothing."""
        before = self.run(self.flows.fingerprint())
        assert self.run(self.flows.maintenance.repair()) == 0
        assert self.run(self.flows.fingerprint()) == before

    # Invariants.

    @invariant()
    def statuses_match_the_model(self) -> None:
        """F1–F11, F14: the statuses of all runs and steps match the model, and fences never decrease."""
        rows = self.run(self.flows.db.fetch(STATUSES))
        runs = {row["run_id"]: row["run_status"] for row in rows}
        steps = {
            (row["run_id"], row["step_id"]): (row["status"], row["fence"]) for row in rows if row["step_id"] is not None
        }
        assert runs == {run.name: run.status for run in self.model.runs.values()}
        assert steps == {(run.name, step.name): (step.status, step.fence) for run, step in self.model.steps()}
        for name, (_, fence) in steps.items():
            assert fence >= self.fences.get(name, 0)
            self.fences[name] = fence

    @invariant()
    def counters_match_the_steps(self) -> None:
        """F3: the counters of runs and steps match their rows."""
        assert self.run(self.flows.db.fetch(MISCOUNTED_STEPS)) == []
        for row in self.run(self.flows.db.fetch(RUN_COUNTS)):
            if row["status"] in ("PENDING", "RUNNING"):
                open_steps = row["open_steps"] if row["is_counted"] else row["open_last_steps"]
                assert (row["open"], row["failed"]) == (open_steps, row["failed_steps"]), row["run_id"]
            else:
                assert row["waiting"] == 0, row["run_id"]

    @invariant()
    def artifacts_are_of_accepted_attempts(self) -> None:
        """F6: a published artifact has the content of the accepted attempt, and its checksum."""
        for row in self.run(self.flows.db.fetch(STATUSES)):
            if row["step_id"] is None:
                continue
            step = self.model.runs[row["run_id"]].steps[row["step_id"]]
            artifacts = row["artifacts"] or []
            contents = [self.run(self.flows.storage.get(artifact["path"])).data for artifact in artifacts]
            assert contents == ([] if step.artifact is None else [step.artifact])
            checksums = [(artifact["sha256"], artifact["size"]) for artifact in artifacts]
            assert checksums == [(hashlib.sha256(data).hexdigest(), len(data)) for data in contents]

    @invariant()
    def history_has_only_allowed_moves(self) -> None:
        """F3, F18: the state machines allow every move; only the engine makes steps READY."""
        reached: dict[str, StepStatus] = {}
        for subject, source, target, actor in self.run(self.flows.moves(STEP.name)):
            assert reached.get(subject, StepStatus.PENDING) == source, subject
            assert STEP.can(StepStatus(source), StepStatus(target))
            assert target != StepStatus.READY or actor == "advance"
            reached[subject] = StepStatus(target)
        for run, step in self.model.steps():
            assert reached.get(f"{run.name}/{step.name}", StepStatus.PENDING) is step.status
        runs: dict[str, FlowRunStatus] = {}
        for subject, source, target, _ in self.run(self.flows.moves(RUN.name)):
            assert runs.get(subject, FlowRunStatus.PENDING) == source
            assert RUN.can(FlowRunStatus(source), FlowRunStatus(target))
            runs[subject] = FlowRunStatus(target)
        assert all(runs.get(run.name, FlowRunStatus.PENDING) is run.status for run in self.model.runs.values())

    def _drain(self) -> None:
        """Every run ends, and every ready step is claimed, once the workers work correctly."""
        self._lose_workers_except([])
        for _ in range(100):
            self._publish_sealed()
            self._start_waiting_runs()
            self._settle_sub_runs()
            self.complete_steps(1)
            if all(run.status in RUN.groups["ended"] for run in self.model.runs.values()):
                break
        self.statuses_match_the_model()
        self.counters_match_the_steps()
        self.history_has_only_allowed_moves()
        self.artifacts_are_of_accepted_attempts()
        assert all(run.status in RUN.groups["ended"] for run in self.model.runs.values())
        assert not any(step.status in STEP.groups["waiting"] for _, step in self.model.steps())


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
def test_random_lifecycles_match_the_model(postgres_url: str, campaign: Campaign) -> None:
    """F1–F11, F14, F16, F19: statuses, fences, counters, history and artifacts match the model in any order."""
    campaign.rounds = model_examples(8, soak=1_000)

    class FlowsCase(FlowsLifecycle):
        url = postgres_url

    run_state_machine_as_test(
        FlowsCase,
        settings=settings(
            max_examples=campaign.rounds,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
