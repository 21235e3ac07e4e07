"""A random sequence of runs, kills, deletions and restarts of one supplier, compared with a simple model."""

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
from tests.ingest.supplier_folder import SUPPLIER, Facts, SupplierFolder, csv, hash_bytes, open_fast_folder
from tests.support.crash import Killed, call_at
from tests.support.soak import Campaign, examples, model_examples

DAY = timedelta(days=1)
FOLDERS = ("inbox", "archive", "obsolete", "duplicates", "broken")
TIMES = st.integers(1, 6)  # few, so that many are equal
STEPS = st.sampled_from(PublishStep)
PICKS = st.integers(0, 1_000)
DEDUPS = st.sampled_from(["accepted", "current"])


class CrashingTree(FolderTree):
    """The tree of a process that can be killed. Every check of the inbox has its own time."""

    def __init__(self, root: Path, checks: list[int]) -> None:
        super().__init__(root)
        self._checks = checks
        self.is_dead = False

    def read_clock(self) -> float:
        self._checks.append(len(self._checks) + 1)
        return float(self._checks[-1])

    def write(self, path: str, data: bytes) -> None:
        if self.is_dead:
            raise Killed
        super().write(path, data)


@dataclass(frozen=True)
class SentFile:
    """A content, with the *steps* that a run of it reaches."""

    content: bytes
    facts: Facts | None
    is_read: bool = True

    @property
    def sha256(self) -> str:
        return hash_bytes(self.content)

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
    """The expected ledger."""

    seen: dict[str, int] = field(default_factory=dict)
    failed_runs: int = 0
    unchanged_files: int = 0
    running: "SentFile | str | None" = None  # the file of a run that did not end, or that the run had no file


class IngestModel:
    """The expected state of the tree."""

    def __init__(self) -> None:
        self.inbox: dict[str, File] = {}
        self.folders: dict[str, Counter[str]] = {name: Counter() for name in FOLDERS[1:]}
        self.accepted: set[str] = set()
        self.current: SentFile | None = None
        self.fence = 0
        self.published_by_running = False
        self.memory = Memory()
        self.dedup = "accepted"
        self.has_config = True
        self.checks = 0

    def run(self, kill: PublishStep | None) -> None:
        """Run once; with *kill*, the process is killed at that step."""
        memory = deepcopy(self.memory)
        try:
            self._run(memory, call_at(kill))
        except Killed:
            return
        self.memory = memory

    def _run(self, memory: Memory, at: OnStep) -> None:
        at(PublishStep.LOCKED)
        self._recover(memory)
        at(PublishStep.RECOVERED)
        self.checks += 1
        memory.seen = {name: memory.seen.get(name, self.checks) for name in self.inbox}
        if not self.inbox:
            return
        ready = sorted(self.inbox.values(), key=lambda file: (-file.modified, memory.seen[file.name], file.name))
        if not self.has_config:
            self._start(memory, "no file", at)
            at(PublishStep.RECORDED)
            at(PublishStep.MOVED)
            memory.failed_runs += 1
            memory.running = None
            return
        at(PublishStep.COPIED)
        unique = [file for file in ready if not self._is_duplicate(file.sent)]
        chosen = unique[0] if unique else None
        for file in ready:
            if self._is_duplicate(file.sent) or (file is not chosen and chosen and file.sent == chosen.sent):
                memory.unchanged_files += file.sent == self.current
                self._move(file, "duplicates")
            elif file is not chosen:
                self._move(file, "obsolete")
        if chosen is not None:
            at(PublishStep.SORTED)
            self._ingest(memory, chosen, at)

    def _recover(self, memory: Memory) -> None:
        """I10, I16: make everything consistent with the published state, and complete a killed run."""
        if self.current is not None:
            self.accepted.add(self.current.sha256)
        if memory.running is None:
            return
        if self.published_by_running:
            memory.failed_runs = memory.unchanged_files = 0
            remaining = [file for file in self.inbox.values() if file.sent == self.current]
            for file in remaining:
                if file.name == self._running_name:
                    self._move(file, "archive")
        else:
            memory.failed_runs += 1
        memory.running = None

    def _start(self, memory: Memory, sent: "SentFile | str", at: OnStep) -> None:
        memory.running = sent
        self.published_by_running = False
        self.memory = deepcopy(memory)
        at(PublishStep.STARTED)

    def _ingest(self, memory: Memory, file: File, at: OnStep) -> None:
        self._running_name = file.name
        self._start(memory, file.sent, at)
        for step in file.sent.steps[1:]:
            if step is PublishStep.SWITCHED:
                self.current, self.published_by_running = file.sent, True
                self.fence += 1
            elif step is PublishStep.ACCEPTED:
                self.accepted.add(file.sent.sha256)
            elif step is PublishStep.MOVED:
                self._move(file, "archive" if file.sent.facts is not None else "broken")
            at(step)
        memory.running = None
        if file.sent.facts is None:
            memory.failed_runs += 1
        else:
            memory.failed_runs = memory.unchanged_files = 0

    def _is_duplicate(self, sent: SentFile) -> bool:
        """I22: return whether the content is a duplicate."""
        return sent == self.current or (self.dedup == "accepted" and sent.sha256 in self.accepted)

    def _move(self, file: File, folder: str) -> None:
        del self.inbox[file.name]
        self.folders[folder][file.sent.sha256] += 1

    def sweep(self, age: timedelta) -> None:
        """I12: delete expired files; all files have the age by which the clock was advanced."""
        if age > 30 * DAY:
            self.folders = {name: Counter() for name in self.folders}
        if age > 365 * DAY:
            self.accepted &= {self.current.sha256} if self.current else set()

    def count_all_contents(self) -> dict[str, Counter[str]]:
        return {"inbox": Counter(file.sent.sha256 for file in self.inbox.values()), **self.folders}


class IngestLifecycle(RuleBasedStateMachine):
    """The actions of suppliers and operators, and faults, in any order."""

    @initialize()
    def begin(self) -> None:
        self.stack = ExitStack()
        self.clock = ManualClock(datetime.now(UTC))
        self.age = timedelta(0)
        self.supplier = SupplierFolder(self.stack.enter_context(open_fast_folder()), self.clock)
        self.model = IngestModel()
        self.checks: list[int] = []
        self.sent: list[SentFile] = []
        self.names = 0
        self.restart()

    def drop(self, sent: SentFile, modified: int, letter: str = "m") -> None:
        self.names += 1
        name = f"{letter}{self.names}.csv"
        self.supplier.drop(name, sent.content, at=modified)
        self.model.inbox[name] = File(name, sent, modified)
        self.sent.append(sent)

    def make_valid_file(self) -> SentFile:
        facts = {"A": self.names, "B": 1}
        return SentFile(csv(facts), facts)

    @rule(modified=TIMES, letter=st.sampled_from("az"))
    def drop_new_file(self, modified: int, letter: str) -> None:
        self.drop(self.make_valid_file(), modified, letter)

    @rule(modified=TIMES)
    def drop_two_files(self, modified: int) -> None:
        self.drop(self.make_valid_file(), modified, "z")
        self.drop(self.make_valid_file(), modified, "a")

    @rule(modified=TIMES)
    @precondition(lambda self: self.model.current is not None)
    def drop_published_file(self, modified: int) -> None:
        assert self.model.current is not None
        self.drop(self.model.current, modified)

    @rule(modified=TIMES, pick=PICKS)
    @precondition(lambda self: self.sent)
    def drop_earlier_file(self, modified: int, pick: int) -> None:
        self.drop(self.sent[pick % len(self.sent)], modified)

    @rule(modified=TIMES)
    def drop_file_for_the_gate(self, modified: int) -> None:
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
        (self.supplier.root / paths.make_config_path(SUPPLIER)).unlink()
        self.run_and_die(step) if dies else self.run()
        self.configure(self.model.dedup)

    @rule(modified=TIMES)
    def publish(self, modified: int) -> None:
        self.drop(self.make_valid_file(), modified)
        self.run()

    @rule(pick=PICKS, dedup=DEDUPS, dies=st.booleans(), step=STEPS)
    @precondition(lambda self: self.list_older())
    def go_back(self, pick: int, dedup: str, dies: bool, step: PublishStep) -> None:
        self.configure(dedup)
        self.drop(self.list_older()[pick % len(self.list_older())], 7)
        self.run_and_die(step) if dies else self.run()

    def list_older(self) -> list[SentFile]:
        """Return the files that were accepted, without the published one."""
        accepted, current = self.model.accepted, self.model.current
        return [file for file in self.sent if file.sha256 in accepted and file != current]

    @rule()
    def run(self) -> None:
        before = self.model.fence
        outcome = self.supplier.run()
        self.model.run(None)
        has_published = outcome.manifest is not None and outcome.is_pass
        # A publication by a killed run is counted already.
        assert self.model.fence == before + has_published
        self.check_memory()

    @rule(step=STEPS)
    def run_and_die(self, step: PublishStep) -> None:
        tree = CrashingTree(self.supplier.root, self.checks)
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
        self.check_memory()

    @rule(forward=st.sampled_from([timedelta(hours=1), timedelta(hours=13), 8 * DAY, 31 * DAY, 400 * DAY]))
    def sweep(self, forward: timedelta) -> None:
        self.clock.advance(forward)
        self.age += forward
        self.supplier.sweep()
        self.model.sweep(self.age)

    @rule()
    def restart(self) -> None:
        self.supplier.tree = CrashingTree(self.supplier.root, self.checks)

    def check_memory(self) -> None:
        """I13: check the ledger and the status."""
        memory, expected = self.supplier.ledger(), self.model.memory
        assert (memory.failed_runs, memory.unchanged_files) == (expected.failed_runs, expected.unchanged_files)
        assert (memory.running is None) == (expected.running is None)
        status = self.supplier.read_status()
        assert sorted(status.inbox) == sorted(self.model.inbox)
        assert status.age_seconds is None or status.age_seconds >= 0

    @invariant()
    def state_is_that_of_the_model(self) -> None:
        if not hasattr(self, "supplier"):
            return
        current = self.model.current
        assert self.supplier.facts() == (current.facts if current else None)
        pointer = self.supplier.pointer()
        assert (pointer.fence if pointer else 0) == self.model.fence
        self.supplier.check_states_are_complete()

    @invariant()
    def files_are_those_of_the_model(self) -> None:
        if not hasattr(self, "supplier"):
            return
        assert self.supplier.count_all_contents() == self.model.count_all_contents()
        markers = self.supplier.tree.list_files(f"{paths.ACCEPTED}/{SUPPLIER}")
        assert {Path(marker.path).stem for marker in markers} == self.model.accepted

    def teardown(self) -> None:
        if not hasattr(self, "supplier"):
            return
        with self.stack:
            self.configure("accepted")
            while self.model.inbox or self.model.memory.running is not None:
                self.run()
            self.files_are_those_of_the_model()
            self.supplier.sent = sum(self.model.count_all_contents().values(), Counter())
            self.supplier.check_consistency()


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
def test_random_sequences_agree_with_the_model(campaign: Campaign) -> None:
    """I2, I6, I10-I13, I16, I22: state, files, markers and counts are always those of the model."""
    campaign.rounds, campaign.counts_items = model_examples(25, soak=500), True
    run_state_machine_as_test(
        IngestLifecycle,
        settings=settings(
            max_examples=campaign.rounds,
            stateful_step_count=examples(40, soak=50),
            suppress_health_check=list(HealthCheck),
        ),
    )
