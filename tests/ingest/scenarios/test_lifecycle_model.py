"""A long life of one supplier, with kills, sweeps and restarts, beside a model of a few plain values."""

from collections import Counter
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

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

from penstock.ingest.run.publish import OnStep, PublishStep
from penstock.ingest.tree import paths
from penstock.ingest.tree.folder import FolderTree
from penstock.kernel.clock import ManualClock
from tests.ingest.supplier_folder import SUPPLIER, Facts, SupplierFolder, csv, digest, quick_folder
from tests.support.crash import Killed, call_at
from tests.support.soak import Campaign, examples, model_examples

DAY = timedelta(days=1)
PLACES = ("inbox", "archive", "obsolete", "duplicates", "broken")
TIMES = st.integers(1, 6)  # few, so that many are equal
STEPS = st.sampled_from(PublishStep)
PICKS = st.integers(0, 1_000)
DEDUPS = st.sampled_from(["accepted", "current"])


class CrashingTree(FolderTree):
    """A dead process writes nothing any more. Every look has a time of its own."""

    def __init__(self, root: Path, looks: list[int]) -> None:
        super().__init__(root)
        self._looks = looks
        self.is_dead = False

    def now(self) -> float:
        self._looks.append(len(self._looks) + 1)
        return float(self._looks[-1])

    def write(self, path: str, data: bytes) -> None:
        if self.is_dead:
            raise Killed
        super().write(path, data)


@dataclass(frozen=True)
class SentFile:
    """A content; what it is good for is told by *steps*: how far a run gets with it."""

    content: bytes
    facts: Facts | None
    is_read: bool = True

    @property
    def sha256(self) -> str:
        return digest(self.content)

    @property
    def steps(self) -> list[PublishStep]:
        if self.facts is None:
            return [
                PublishStep.STARTED,
                *([PublishStep.PROCESSED] if self.is_read else []),
                PublishStep.RECORDED,
                PublishStep.MOVED,
            ]
        order = list(PublishStep)
        return [PublishStep.STARTED, *order[order.index(PublishStep.PROCESSED) :]]


@dataclass
class File:
    """A file in the inbox."""

    name: str
    sent: SentFile
    modified: int


@dataclass
class Memory:
    """What is remembered from run to run, when there was time to write it down."""

    seen: dict[str, int] = field(default_factory=dict)
    failed_runs: int = 0
    unchanged_files: int = 0
    running: "SentFile | str | None" = None  # the file of a run that did not end, or that it had none


class IngestModel:
    """What has to be, as the contract says it."""

    def __init__(self) -> None:
        self.inbox: dict[str, File] = {}
        self.places: dict[str, Counter[str]] = {name: Counter() for name in PLACES[1:]}
        self.accepted: set[str] = set()
        self.current: SentFile | None = None
        self.fence = 0
        self.published_by_running = False
        self.memory = Memory()
        self.dedup = "accepted"
        self.has_config = True
        self.looks = 0

    def run(self, kill: PublishStep | None) -> None:
        """One run, dead at *kill*."""
        now = deepcopy(self.memory)
        try:
            self._run(now, call_at(kill))
        except Killed:
            return
        self.memory = now

    def _run(self, now: Memory, at: OnStep) -> None:
        at(PublishStep.LOCKED)
        self._recover(now)
        at(PublishStep.RECOVERED)
        self.looks += 1
        now.seen = {name: now.seen.get(name, self.looks) for name in self.inbox}
        if not self.inbox:
            return
        ready = sorted(self.inbox.values(), key=lambda file: (-file.modified, now.seen[file.name], file.name))
        if not self.has_config:
            self._start(now, "no file", at)
            at(PublishStep.RECORDED)
            at(PublishStep.MOVED)
            now.failed_runs += 1
            now.running = None
            return
        at(PublishStep.COPIED)
        unique = [file for file in ready if not self._is_known(file.sent)]
        chosen = unique[0] if unique else None
        for file in ready:
            if self._is_known(file.sent) or (file is not chosen and chosen and file.sent == chosen.sent):
                now.unchanged_files += file.sent == self.current
                self._move(file, "duplicates")
            elif file is not chosen:
                self._move(file, "obsolete")
        if chosen is not None:
            at(PublishStep.SORTED)
            self._ingest(now, chosen, at)

    def _recover(self, now: Memory) -> None:
        """I10, I16: the current state is the truth; what a killed run left undone is done."""
        if self.current is not None:
            self.accepted.add(self.current.sha256)
        if now.running is None:
            return
        if self.published_by_running:
            now.failed_runs = now.unchanged_files = 0
            left = [file for file in self.inbox.values() if file.sent == self.current]
            for file in left:
                if file.name == self._running_name:
                    self._move(file, "archive")
        else:
            now.failed_runs += 1
        now.running = None

    def _start(self, now: Memory, sent: "SentFile | str", at: OnStep) -> None:
        now.running = sent
        self.published_by_running = False
        self.memory = deepcopy(now)
        at(PublishStep.STARTED)

    def _ingest(self, now: Memory, file: File, at: OnStep) -> None:
        self._running_name = file.name
        self._start(now, file.sent, at)
        for step in file.sent.steps[1:]:
            if step is PublishStep.SWITCHED:
                self.current, self.published_by_running = file.sent, True
                self.fence += 1
            elif step is PublishStep.ACCEPTED:
                self.accepted.add(file.sent.sha256)
            elif step is PublishStep.MOVED:
                self._move(file, "archive" if file.sent.facts is not None else "broken")
            at(step)
        now.running = None
        if file.sent.facts is None:
            now.failed_runs += 1
        else:
            now.failed_runs = now.unchanged_files = 0

    def _is_known(self, sent: SentFile) -> bool:
        """I22."""
        return sent == self.current or (self.dedup == "accepted" and sent.sha256 in self.accepted)

    def _move(self, file: File, supplier: str) -> None:
        del self.inbox[file.name]
        self.places[supplier][file.sent.sha256] += 1

    def sweep(self, age: timedelta) -> None:
        """I12: all files are as old as the clock was put on."""
        if age > 30 * DAY:
            self.places = {name: Counter() for name in self.places}
        if age > 365 * DAY:
            self.accepted &= {self.current.sha256} if self.current else set()

    def everywhere(self) -> dict[str, Counter[str]]:
        return {"inbox": Counter(file.sent.sha256 for file in self.inbox.values()), **self.places}


class IngestLifecycle(RuleBasedStateMachine):
    """What a supplier, an operator and bad luck may do, in any order."""

    @initialize()
    def begin(self) -> None:
        self.stack = ExitStack()
        self.clock = ManualClock(datetime.now(UTC))
        self.age = timedelta(0)
        self.supplier = SupplierFolder(self.stack.enter_context(quick_folder()), self.clock)
        self.model = IngestModel()
        self.looks: list[int] = []
        self.sent: list[SentFile] = []
        self.names = 0
        self.restart()

    def drop(self, sent: SentFile, modified: int, letter: str = "m") -> None:
        self.names += 1
        name = f"{letter}{self.names}.csv"
        self.supplier.drop(name, sent.content, at=modified)
        self.model.inbox[name] = File(name, sent, modified)
        self.sent.append(sent)

    def good(self) -> SentFile:
        facts = {"A": self.names, "B": 1}
        return SentFile(csv(facts), facts)

    @rule(modified=TIMES, letter=st.sampled_from("az"))
    def drop_a_new_one(self, modified: int, letter: str) -> None:
        self.drop(self.good(), modified, letter)

    @rule(modified=TIMES)
    def drop_two_at_once(self, modified: int) -> None:
        self.drop(self.good(), modified, "z")
        self.drop(self.good(), modified, "a")

    @rule(modified=TIMES)
    @precondition(lambda self: self.model.current is not None)
    def drop_the_current_one(self, modified: int) -> None:
        assert self.model.current is not None
        self.drop(self.model.current, modified)

    @rule(modified=TIMES, pick=PICKS)
    @precondition(lambda self: self.sent)
    def drop_one_again(self, modified: int, pick: int) -> None:
        self.drop(self.sent[pick % len(self.sent)], modified)

    @rule(modified=TIMES)
    def drop_what_the_gate_refuses(self, modified: int) -> None:
        self.drop(SentFile(b"name,amount\nA,%d\n" % self.names, None, is_read=False), modified)

    @rule(modified=TIMES)
    def drop_bad_rows(self, modified: int) -> None:
        self.drop(SentFile(csv([("A", "x"), ("B", f"y{self.names}")]), None), modified)

    @rule(dedup=DEDUPS)
    def configure(self, dedup: str) -> None:
        self.model.dedup, self.model.has_config = dedup, True
        self.supplier.configure(dedup=dedup)

    @rule(dies=st.booleans(), step=STEPS)
    def run_without_a_configuration(self, dies: bool, step: PublishStep) -> None:
        self.model.has_config = False
        (self.supplier.root / paths.config(SUPPLIER)).unlink()
        self.run_and_die(step) if dies else self.run()
        self.configure(self.model.dedup)

    @rule(modified=TIMES)
    def publish(self, modified: int) -> None:
        self.drop(self.good(), modified)
        self.run()

    @rule(pick=PICKS, dedup=DEDUPS, dies=st.booleans(), step=STEPS)
    @precondition(lambda self: self.older())
    def go_back(self, pick: int, dedup: str, dies: bool, step: PublishStep) -> None:
        self.configure(dedup)
        self.drop(self.older()[pick % len(self.older())], 7)
        self.run_and_die(step) if dies else self.run()

    def older(self) -> list[SentFile]:
        """What was accepted, and is not current."""
        return [one for one in self.sent if one.sha256 in self.model.accepted and one != self.model.current]

    @rule()
    def run(self) -> None:
        before = self.model.fence
        outcome = self.supplier.run()
        self.model.run(None)
        has_published = outcome.manifest is not None and outcome.is_pass
        # What a killed run published before is counted by then.
        assert self.model.fence == before + has_published
        self.check_what_is_remembered()

    @rule(step=STEPS)
    def run_and_die(self, step: PublishStep) -> None:
        tree = CrashingTree(self.supplier.root, self.looks)
        self.supplier.tree = tree

        def on_step(now: PublishStep) -> None:
            if now is step:
                tree.is_dead = True
                raise Killed

        try:
            self.supplier.run(on_step)
        except Killed:
            self.model.run(step)
        else:
            self.model.run(None)
        self.restart()
        self.check_what_is_remembered()

    @rule(forward=st.sampled_from([timedelta(hours=1), timedelta(hours=13), 8 * DAY, 31 * DAY, 400 * DAY]))
    def sweep(self, forward: timedelta) -> None:
        self.clock.advance(forward)
        self.age += forward
        self.supplier.sweep()
        self.model.sweep(self.age)

    @rule()
    def restart(self) -> None:
        self.supplier.tree = CrashingTree(self.supplier.root, self.looks)

    def check_what_is_remembered(self) -> None:
        """I13."""
        known, expected = self.supplier.ledger(), self.model.memory
        assert (known.failed_runs, known.unchanged_files) == (expected.failed_runs, expected.unchanged_files)
        assert (known.running is None) == (expected.running is None)
        standing = self.supplier.standing()
        assert sorted(standing.inbox) == sorted(self.model.inbox)
        assert standing.age_seconds is None or standing.age_seconds >= 0

    @invariant()
    def the_state_is_the_models(self) -> None:
        if not hasattr(self, "supplier"):
            return
        current = self.model.current
        assert self.supplier.facts() == (current.facts if current else None)
        pointer = self.supplier.pointer()
        assert (pointer.fence if pointer else 0) == self.model.fence
        self.supplier.check_nothing_is_half()

    @invariant()
    def every_file_is_where_it_belongs(self) -> None:
        if not hasattr(self, "supplier"):
            return
        assert self.supplier.everywhere() == self.model.everywhere()
        marks = self.supplier.tree.list_files(f"{paths.ACCEPTED}/{SUPPLIER}")
        assert {Path(mark.path).stem for mark in marks} == self.model.accepted

    def teardown(self) -> None:
        if not hasattr(self, "supplier"):
            return
        with self.stack:
            self.configure("accepted")
            while self.model.inbox or self.model.memory.running is not None:
                self.run()
            self.every_file_is_where_it_belongs()
            self.supplier.sent = sum(self.model.everywhere().values(), Counter())
            self.supplier.check_all_is_well()


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
def test_whatever_happens_all_is_as_the_contract_says(campaign: Campaign) -> None:
    """I2, I6, I10-I13, I16, I22: after any walk the state, every file, every mark and every count are the model's."""
    campaign.rounds, campaign.counts_items = model_examples(25, soak=500), True
    run_state_machine_as_test(
        IngestLifecycle,
        settings=settings(
            max_examples=campaign.rounds,
            stateful_step_count=examples(40, soak=50),
            suppress_health_check=list(HealthCheck),
        ),
    )
