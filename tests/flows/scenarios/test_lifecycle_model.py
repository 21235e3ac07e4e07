"""Random lives of runs: workers that succeed, fail, vanish, come twice and come late, and people who interfere."""

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
from tests.flows.scenarios.flow_strategies import OTHER, SELDOM, steps, written
from tests.flows.scenarios.run_model import ModelRefusal, ModelRun, ModelStep
from tests.flows.stepper import LEASE, WORK, FlowsStepper, ProcessDied, attempt_content, flows_stepper, make_report
from tests.services.postgres import fresh_database
from tests.support.soak import Campaign, examples, model_examples

T = TypeVar("T")
NARROW = "narrow"  # a flow with one run at a time
SAID = [StepReportKind.SUCCEEDED] * 4 + [
    StepReportKind.FAILED,
    StepReportKind.FAILED,
    StepReportKind.CANCELLED,
    StepReportKind.RELEASED,
]
COUNTED = """
    SELECT r.run_id, r.status, r.open, r.failed, r.is_counted,
           count(*) FILTER (WHERE t.status NOT IN ('SUCCEEDED', 'FAILED', 'SKIPPED', 'CANCELLED')) AS unended,
           count(*) FILTER (WHERE t.status NOT IN ('SUCCEEDED', 'FAILED', 'SKIPPED', 'CANCELLED')
                                  AND t.children = '{}') AS last,
           count(*) FILTER (WHERE t.status = 'FAILED' AND t.map_n IS NULL) AS has_failed,
           count(*) FILTER (WHERE t.status IN ('PENDING', 'READY')) AS waiting
    FROM flow_run r LEFT JOIN flow_step t ON t.run = r.id GROUP BY r.id"""
MISCOUNTED = """
    SELECT t.run, t.step_id, t.unmet FROM flow_step t
    WHERE t.status = 'PENDING' AND t.unmet <> (
        SELECT count(*) FROM flow_step p
        WHERE p.run = t.run AND p.n = ANY (t.depends_on) AND p.status NOT IN ('SUCCEEDED', 'SKIPPED'))
    OR t.status = 'RUNNING' AND t.kind = 'map' AND t.unmet <> (
        SELECT count(*) FROM flow_step i
        WHERE i.run = t.run AND i.map_n = t.n AND i.status NOT IN ('SUCCEEDED', 'SKIPPED'))"""
STANDING = """
    SELECT r.run_id, r.status AS run_status, t.step_id, t.status, t.fence, t.artifacts
    FROM flow_run r LEFT JOIN flow_step t ON t.run = r.id"""


@dataclass(frozen=True)
class MadeReport:
    """A report that was made, with what was written before."""

    held: ClaimedStep
    said: StepReport


class FlowsLifecycle(RuleBasedStateMachine):
    """Several runs at once; the engine and the plain model are told the same."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.folder = TemporaryDirectory()
        self.world = EngineModel()
        self.flows = self.run(self._opened())
        self.world.limits[NARROW] = 1
        self.held: list[ClaimedStep] = []  # what some worker thinks is its own
        self.told: list[MadeReport] = []
        self.fences: dict[tuple[str, str], int] = {}
        self.ran: set[tuple[str, str, int]] = set()

    async def _opened(self) -> FlowsStepper:
        url = await self.stack.enter_async_context(fresh_database(self.url))
        return await self.stack.enter_async_context(flows_stepper(url, Path(self.folder.name), max_lost=MAX_LOST))

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # what went wrong first is what is told
                self._drain()
        finally:
            self.run(self.stack.aclose())
            self.loop.close()
            self.folder.cleanup()

    # Runs.

    @initialize(drawn=steps(), fails_fast=SELDOM)
    def begin(self, drawn: dict[str, ModelStep], fails_fast: bool) -> None:
        self.create(drawn, fails_fast)

    @precondition(lambda self: len(self.world.runs) < 8)
    @rule(drawn=steps(), fails_fast=SELDOM)
    def create(self, drawn: dict[str, ModelStep], fails_fast: bool) -> None:
        name = f"run{len(self.world.runs)}"
        self.run(self.flows.start(written(drawn), name, policy={"failFast": fails_fast}))
        self.world.create(ModelRun(name, drawn, is_fail_fast=fails_fast))

    @precondition(lambda self: len(self.world.runs) < 8)
    @rule(drawn=steps(3), twice=st.booleans())
    def create_narrow(self, drawn: dict[str, ModelStep], twice: bool) -> None:
        for _ in range(2 if twice else 1):
            name = f"run{len(self.world.runs)}"
            self.flows.catalogue.add(NARROW, written(drawn), maxActiveRuns=1)
            self.run(self.flows.start(None, name, flow=NARROW))
            self.world.create(ModelRun(name, {one: step.copied() for one, step in drawn.items()}, NARROW))

    def _start_waiting_runs(self) -> None:
        self.run(self.flows.maintenance.start_waiting_runs())
        self.world.start_waiting_runs()

    # Workers.

    @rule(capacity=st.integers(1, 3), workers=st.integers(1, 3), kinds=st.sampled_from([[WORK], [WORK, OTHER]]))
    def claim(self, capacity: int, workers: int, kinds: list[str]) -> None:
        """F4: one after the other, for a walk must be repeatable; at once is a matter of the races."""
        for n in range(workers):
            ready = [step for _, step in self.world.steps() if step.status is StepStatus.READY and step.kind in kinds]
            found = self.run(self.flows.engine.claim(f"w{n}", dict.fromkeys(kinds, capacity), limit=capacity))
            assert len(found) == min(capacity, len(ready))
            for one in found:
                self._is_handed(one)

    def _is_handed(self, one: ClaimedStep) -> None:
        """F4: a step is handed out once under a fence, with the inputs that are its own."""
        run, step = self._known(one)
        self.world.claim(run, step)
        assert (one.fence, one.attempt) == (step.fence, step.attempts)
        if step.of_map is not None:
            assert one.inputs == {"item": step.item}
        if step.needs is not None:
            assert one.inputs == {"v": run.steps[step.needs].outputs["v"]}
        assert (one.run_id, one.step_id, one.fence) not in self.ran
        self.ran.add((one.run_id, one.step_id, one.fence))
        self.held.append(one)

    def _known(self, one: ClaimedStep) -> tuple[ModelRun, ModelStep]:
        run = self.world.runs[one.run_id]
        return run, run.steps[one.step_id]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), said=st.sampled_from(SAID), v=st.integers(0, 1), leaves=SELDOM, dies=SELDOM, hands=SELDOM)
    def end(self, data: st.DataObject, said: StepReportKind, v: int, leaves: bool, dies: bool, hands: bool) -> None:
        """F5, F6: a worker ends what it holds, or thinks it holds."""
        one = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        outputs = {"v": v, "list": [v] * v} if said is StepReportKind.SUCCEEDED else {}
        if leaves:
            self.run(self.flows.write(one))
        told = MadeReport(one, make_report(one, said, outputs=outputs, artifacts=("out.txt",) if leaves else ()))
        self.told.append(told)
        if hands and said is StepReportKind.SUCCEEDED:
            self._hand_in(told)
        else:
            self._report(told, dies=dies)

    @rule(v=st.integers(0, 1))
    def go_on(self, v: int) -> None:
        """Workers do what they should."""
        self.claim(3, 1, [WORK, OTHER])
        for one in [one for one in self.held if self._known(one)[1].fence == one.fence]:
            self.held.remove(one)
            self.told.append(MadeReport(one, make_report(one, outputs={"v": v, "list": [1, 2]})))
            self._report(self.told[-1])

    def _hand_in(self, told: MadeReport) -> None:
        """F5: as the work loop does it: what the report frees is taken at once."""
        run, step = self._known(told.held)
        settled = self.flows.work_source.settle("w", [(told.held, told.said)], [WORK, OTHER], 2)
        answers, handed = self.run(settled)
        written_here = attempt_content(told.held) if told.said.artifacts else None
        assert list(answers) == [self.world.report(run, step, told.said, written_here, dies=False)]
        assert len(handed) <= 2
        for one in handed:
            self._is_handed(one)

    def _report(self, told: MadeReport, *, dies: bool = False) -> None:
        run, step = self._known(told.held)
        written_here = attempt_content(told.held) if told.said.artifacts else None
        self.flows.storage.is_dying = dies
        has_died = False
        try:
            answer = self.run(self.flows.engine.report([told.said], "w"))[0]
        except ProcessDied:
            has_died = True
        finally:
            self.flows.storage.is_dying = False
        expected = self.world.report(run, step, told.said, written_here, dies=dies)
        assert has_died or answer is expected
        assert not has_died or step.sealed is not None

    @precondition(lambda self: self.told)
    @rule(data=st.data(), as_before=st.booleans(), writes=st.booleans())
    def say_again(self, data: st.DataObject, as_before: bool, writes: bool) -> None:
        """F4, F5: repeated, or contradicted, at any time after; whatever is written then is not seen."""
        told = self.told[data.draw(st.integers(0, len(self.told) - 1))]
        if not as_before:
            # Nobody who has been believed says the opposite with success.
            said = StepReportKind.FAILED if told.said.outcome is StepReportKind.SUCCEEDED else StepReportKind.SUCCEEDED
            told = MadeReport(told.held, make_report(told.held, said, outputs={"v": 1}))
        _, step = self._known(told.held)
        is_held = step.is_held and step.fence == told.held.fence
        if writes and not is_held and step.sealed is None:
            self.run(self.flows.write(told.held, data=b"late"))
        if not is_held:
            before = self.run(self.flows.fingerprint())
            is_sealed = step.sealed is not None
            self._report(told)
            assert is_sealed or self.run(self.flows.fingerprint()) == before

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        """F9: whoever still holds a step learns whether it is to stop; the others, that they do not."""
        self._beat([one for one in self.held if data.draw(st.booleans())])

    def _beat(self, some: Sequence[ClaimedStep]) -> None:
        names = {(one.run_id, one.step_id, one.fence): one for one in some}
        expected = {}
        for name, one in names.items():
            run, step = self._known(one)
            if step.is_held and step.fence == one.fence:
                expected[name] = run.is_to_stop(step)
        assert self.run(self.flows.engine.heartbeat(list(names))) == expected

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        """F11: some workers are not heard of any more; they may still come back and report."""
        self._vanish_but([one for one in self.held if data.draw(st.booleans())])

    def _vanish_but(self, beating: Sequence[ClaimedStep]) -> None:
        for _ in range(2):
            self._beat(beating)
            self.flows.clock.advance(0.7 * LEASE)
        names = {(one.run_id, one.step_id, one.fence) for one in beating}
        lost = []
        for run, step in self.world.steps():
            is_kept = (run.name, step.name, step.fence) in names and not run.is_to_stop(step)
            if step.is_held and not is_kept:
                lost.append((run, step))
        assert self.run(self.flows.engine.reap()) == len(lost)
        self.world.expire(lost)

    def _publish_sealed(self) -> None:
        """F6: what a process that died had not published is published by another."""
        self.flows.clock.advance(timedelta(seconds=11))
        self.run(self.flows.maintenance.publish_sealed())
        for run, step in list(self.world.steps()):
            self.world.publish(run, step)

    # People.

    @precondition(lambda self: self.world.runs)
    @rule(data=st.data(), act=st.sampled_from(["cancel", "retry", "retry", "retry step", "skip", "skip", "resume"]))
    def interfere(self, data: st.DataObject, act: str) -> None:
        """F9, F10, F19."""
        run = self.world.runs[data.draw(st.sampled_from(sorted(self.world.runs)))]
        name = data.draw(st.sampled_from(sorted(run.steps))) if run.steps and act not in ("cancel", "retry") else None
        if name is None and act in ("skip", "retry step", "resume"):
            return
        people = self.flows.operations
        match act:
            case "cancel":
                self._both(people.cancel(run.name, "tester"), lambda: self.world.cancel(run))
            case "skip":
                self._both(people.skip(run.name, str(name), "tester"), lambda: self.world.skip(run, str(name)))
            case "resume":
                if len(self.world.runs) < 10 and run.steps[str(name)].of_map is None:
                    new = f"run{len(self.world.runs)}"
                    self.run(people.resume(run.name, str(name), "tester", new))
                    self.world.resume(run, str(name), new)
            case _:
                self._both(people.retry(run.name, "tester", name), lambda: self.world.retry(run, name))

    def _both(self, act: Awaitable[object], plain: Callable[[], None]) -> None:
        """The engine refuses what the model refuses, and then nothing has changed."""
        try:
            plain()
        except ModelRefusal:
            before = self.run(self.flows.fingerprint())
            with pytest.raises(Conflict):
                self.run(act)
            assert self.run(self.flows.fingerprint()) == before
        else:
            self.run(act)

    # What flows do by themselves.

    @rule(which=st.sampled_from(["start_waiting_runs", "publish_sealed", "settle_sub_runs", "repair"]))
    def do_chore(self, which: str) -> None:
        getattr(self, f"_{which}")()

    def _settle_sub_runs(self) -> None:
        """F14."""
        while self.run(self.flows.db.fetch(store.SQL["unreported_runs"], 1)):
            rows = self.run(self.flows.db.fetch("SELECT run_id FROM flow_run ORDER BY id"))
            self.run(self.flows.maintenance.settle_sub_runs())
            assert self.world.settle_sub_runs([row["run_id"] for row in rows])

    def _repair(self) -> None:
        """F3: there is nothing to be repaired, and so nothing is touched."""
        before = self.run(self.flows.fingerprint())
        assert self.run(self.flows.maintenance.repair()) == 0
        assert self.run(self.flows.fingerprint()) == before

    # What must always be so.

    @invariant()
    def everything_stands_as_the_model_says(self) -> None:
        """F1–F11, F14: the statuses of all runs and steps, and their fences."""
        rows = self.run(self.flows.db.fetch(STANDING))
        runs = {row["run_id"]: row["run_status"] for row in rows}
        found = {
            (row["run_id"], row["step_id"]): (row["status"], row["fence"]) for row in rows if row["step_id"] is not None
        }
        assert runs == {run.name: run.status for run in self.world.runs.values()}
        assert found == {(run.name, step.name): (step.status, step.fence) for run, step in self.world.steps()}
        for name, (_, fence) in found.items():
            assert fence >= self.fences.get(name, 0)
            self.fences[name] = fence

    @invariant()
    def counters_are_the_truth(self) -> None:
        """F3: what is counted is what is."""
        assert self.run(self.flows.db.fetch(MISCOUNTED)) == []
        for row in self.run(self.flows.db.fetch(COUNTED)):
            if row["status"] in ("PENDING", "RUNNING"):
                unended = row["unended"] if row["is_counted"] else row["last"]
                assert (row["open"], row["failed"]) == (unended, row["has_failed"]), row["run_id"]
            else:
                assert row["waiting"] == 0, row["run_id"]

    @invariant()
    def artifacts_are_the_winners(self) -> None:
        """F6: what is published is what the attempt that counts wrote, and its checksum says so."""
        for row in self.run(self.flows.db.fetch(STANDING)):
            if row["step_id"] is None:
                continue
            step = self.world.runs[row["run_id"]].steps[row["step_id"]]
            found = [self.run(self.flows.storage.get(one["path"])).data for one in row["artifacts"] or []]
            assert found == ([] if step.artifact is None else [step.artifact])
            checksums = [(one["sha256"], one["size"]) for one in row["artifacts"] or []]
            assert checksums == [(hashlib.sha256(data).hexdigest(), len(data)) for data in found]

    @invariant()
    def history_is_what_the_machines_allow(self) -> None:
        """F3, F18: every move is one that is declared; no worker made anything READY."""
        reached: dict[str, StepStatus] = {}
        for subject, source, target, actor in self.run(self.flows.moves(STEP.name)):
            assert reached.get(subject, StepStatus.PENDING) == source, subject
            assert STEP.can(StepStatus(source), StepStatus(target))
            assert target != StepStatus.READY or actor == "advance"
            reached[subject] = StepStatus(target)
        for run, step in self.world.steps():
            assert reached.get(f"{run.name}/{step.name}", StepStatus.PENDING) is step.status
        runs: dict[str, FlowRunStatus] = {}
        for subject, source, target, _ in self.run(self.flows.moves(RUN.name)):
            assert runs.get(subject, FlowRunStatus.PENDING) == source
            assert RUN.can(FlowRunStatus(source), FlowRunStatus(target))
            runs[subject] = FlowRunStatus(target)
        assert all(runs.get(run.name, FlowRunStatus.PENDING) is run.status for run in self.world.runs.values())

    def _drain(self) -> None:
        """Every run ends, and every step that has its turn is handed out, when workers do what they should."""
        self._vanish_but([])
        for _ in range(100):
            self._publish_sealed()
            self._start_waiting_runs()
            self._settle_sub_runs()
            self.go_on(1)
            if all(run.status in RUN.groups["ended"] for run in self.world.runs.values()):
                break
        self.everything_stands_as_the_model_says()
        self.counters_are_the_truth()
        self.history_is_what_the_machines_allow()
        self.artifacts_are_the_winners()
        assert all(run.status in RUN.groups["ended"] for run in self.world.runs.values())
        assert not any(step.status in STEP.groups["waiting"] for _, step in self.world.steps())


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
def test_every_life_is_as_the_plain_model_has_it(postgres_url: str, campaign: Campaign) -> None:
    """F1–F11, F14, F16, F19: statuses, fences, counters, history and artifacts, whatever comes in whatever order."""
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
