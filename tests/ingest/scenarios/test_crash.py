"""Runs killed with SIGKILL at every step, before every change of the disk, and at random times."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.run.hooks import RunOutcome
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.tree import paths
from penstock.kernel.clock import ManualClock
from tests.ingest.crash_process import (
    run_and_die,
    run_until,
    run_until_call,
    start_process,
    sweep_until_call,
    was_killed,
)
from tests.ingest.supplier_folder import SUPPLIER, Facts, SupplierFolder, csv, hash_bytes, open_fast_folder
from tests.support.soak import Campaign, examples

FIRST: Facts = {"A": 1, "B": 2, "C": 3}
NEW: Facts = {"A": 10, "B": 2, "D": 4}
OLDER: Facts = {"A": 5}
NO_COLUMNS = b"name,amount\nA,1\nB,2\n"
BAD_ROWS = csv([("A", "x"), ("B", "y"), ("C", 3)])
REPEATED = csv([("A", 10), ("B", "none"), ("D", 4), ("E", 5), ("A", 11)])
AFTER_SWITCH = (PublishStep.SWITCHED, PublishStep.RECORDED, PublishStep.ACCEPTED, PublishStep.MOVED)
GATE_STEPS = (
    PublishStep.LOCKED,
    PublishStep.RECOVERED,
    PublishStep.COPIED,
    PublishStep.SORTED,
    PublishStep.STARTED,
    PublishStep.RECORDED,
    PublishStep.MOVED,
)
QUALITY_STEPS = (*GATE_STEPS, PublishStep.PROCESSED)
FILES = 40  # files of one supplier in a campaign


@dataclass(frozen=True)
class Scenario:
    """The files of the inbox, and the expected result."""

    drops: list[tuple[str, bytes, float]]  # name, content, time
    ends: dict[str, list[bytes]]  # contents by the folder in which they end
    old: Facts | None = None
    new: Facts | None = None
    code: FailureCode | None = None
    steps: tuple[PublishStep, ...] = tuple(PublishStep)
    config: dict[str, str] = field(default_factory=dict)

    @property
    def expected(self) -> Facts | None:
        return self.new if self.code is None else self.old

    def prepare(self, root: Path) -> SupplierFolder:
        """Return the folder before the run: with the old state, if any, and a failed run."""
        root.mkdir()
        supplier = SupplierFolder(root)
        if self.old is not None:
            supplier.drop("first.csv", csv(self.old))
            supplier.run()
        supplier.drop("wrong.csv", NO_COLUMNS + b"C,3\n")
        supplier.run()
        supplier.configure(**self.config)  # type: ignore[arg-type]
        for name, content, at in self.drops:
            supplier.drop(name, content, at)
        return supplier

    def expected_contents(self) -> dict[str, Counter[str]]:
        """Return the expected contents of all folders at the end."""
        before = {"archive": [csv(self.old)] if self.old is not None else [], "broken": [NO_COLUMNS + b"C,3\n"]}
        folders = ("inbox", "archive", "obsolete", "duplicates", "broken")
        return {name: Counter(map(hash_bytes, [*before.get(name, []), *self.ends.get(name, [])])) for name in folders}


CROWD: list[tuple[str, bytes, float]] = [
    ("same again.csv", csv(FIRST), 50),
    ("new.csv", csv(NEW), 40),
    ("new too.csv", csv(NEW), 30),
    ("older.csv", csv(OLDER), 20),
    ("first.csv", csv(FIRST), 10),
]
SCENARIOS = {
    "first": Scenario([("new.csv", csv(NEW), 9)], {"archive": [csv(NEW)]}, new=NEW),
    "second": Scenario([("first.csv", csv(NEW), 9)], {"archive": [csv(NEW)]}, old=FIRST, new=NEW),
    "gate": Scenario(
        [("wrong.csv", NO_COLUMNS, 9)],
        {"broken": [NO_COLUMNS]},
        old=FIRST,
        code=FailureCode.COLUMNS_MISSING,
        steps=GATE_STEPS,
    ),
    "quality": Scenario(
        [("bad.csv", BAD_ROWS, 9)],
        {"broken": [BAD_ROWS]},
        old=FIRST,
        code=FailureCode.DQ_TOO_MANY_BAD_ROWS,
        steps=QUALITY_STEPS,
    ),
    "crowd": Scenario(
        CROWD,
        {"archive": [csv(NEW)], "obsolete": [csv(OLDER)], "duplicates": [csv(FIRST), csv(FIRST), csv(NEW)]},
        old=FIRST,
        new=NEW,
    ),
    "held": Scenario(
        [("new.csv", REPEATED, 9)],
        {"archive": [REPEATED]},
        old=FIRST,
        new={"A": 10, "B": 2, "D": 4, "E": 5},
        config={"on_bad_row": "hold_last"},
    ),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_fast_folder() as folder:
        yield folder


@contextmanager
def annotate(note: str) -> Iterator[None]:
    """Add *note* to a failed assertion."""
    try:
        yield
    except AssertionError as error:
        error.add_note(note)
        raise


def read_code(outcome: RunOutcome) -> FailureCode | None:
    return outcome.manifest.failure.code if outcome.manifest and outcome.manifest.failure else None


def check_the_crash(supplier: SupplierFolder, scenario: Scenario) -> bool:
    """I16: check that no file is lost and that the state is complete; return whether it is the new one."""
    supplier.check_states_are_complete()
    supplier.check_no_file_is_lost()
    fence_before = 0 if scenario.old is None else 1
    pointer = supplier.pointer()
    is_switched = pointer is not None and pointer.fence > fence_before
    assert supplier.facts() == (scenario.new if is_switched else scenario.old)
    return is_switched


def check_the_next_run(supplier: SupplierFolder, scenario: Scenario, runs_before: int) -> None:
    """I10, I16: check that the next run completes the killed run, and leaves nothing to do."""
    is_switched = check_the_crash(supplier, scenario)
    was_moved = not any(supplier.inbox().iterdir())
    outcome = supplier.run()
    assert read_code(outcome) is (None if was_moved else scenario.code)
    assert (outcome.manifest is None) == (was_moved or is_switched)
    check_the_end(supplier, scenario)
    runs = [manifest for manifest in supplier.read_manifests().values() if manifest is not None]
    killed = {run["failure_code"] for run in runs if run["status"] == "FAIL"}
    assert killed <= {"INTERRUPTED", scenario.code and scenario.code.value, "COLUMNS_MISSING"}
    assert len(runs) <= runs_before + 2
    memory = supplier.ledger()
    if scenario.code is None:
        assert (memory.failed_runs, memory.unchanged_files) == (0, 0)
    else:
        assert memory.failed_runs == 1 + len(runs) - runs_before  # the earlier run, and each of these
    assert memory.last_run is not None
    assert memory.last_run["run_id"] in {run["run_id"] for run in runs}
    assert memory.last_run["status"] == ("PASS" if scenario.code is None else "FAIL")


def check_the_end(supplier: SupplierFolder, scenario: Scenario) -> None:
    supplier.check_consistency()
    assert supplier.facts() == scenario.expected
    assert supplier.count_all_contents() == scenario.expected_contents()
    check_manifests(supplier, scenario)
    pointer = supplier.pointer()
    published = [facts for facts in (scenario.old, scenario.new) if facts is not None]
    assert (pointer.fence if pointer else 0) == len(published)
    further = supplier.run()
    assert (further.manifest, further.moved) == (None, {})
    assert supplier.count_all_contents() == scenario.expected_contents()


def check_manifests(supplier: SupplierFolder, scenario: Scenario) -> None:
    """I6: check that every published or rejected file has a run with its code."""
    recorded = {
        (manifest["input_sha256"], manifest["failure_code"])
        for manifest in supplier.read_manifests().values()
        if manifest is not None
    }
    for folder, code in (("archive", None), ("broken", scenario.code and scenario.code.value)):
        for content in scenario.ends.get(folder, []):
            assert (hash_bytes(content), code) in recorded


@pytest.mark.full
@pytest.mark.parametrize("name", SCENARIOS)
def test_run_killed_at_every_step(folder: Path, name: str) -> None:
    """I10, I16: the state is the old or the new one, nothing is lost, and the next run works."""
    scenario = SCENARIOS[name]
    before = scenario.prepare(folder / "before")
    killed = []
    for step in PublishStep:
        supplier = before.copy(folder / step.value)
        with annotate(f"killed at {step.value}"):
            if run_and_die(run_until, supplier.root, step):
                killed.append(step)
                assert check_the_crash(supplier, scenario) == (scenario.code is None and step in AFTER_SWITCH)
                check_the_next_run(supplier, scenario, len(before.read_manifests()))
                assert supplier.list_drafts() == []
            else:
                check_the_end(supplier, scenario)
    assert set(killed) == set(scenario.steps)


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@pytest.mark.parametrize("name", SCENARIOS)
def test_run_killed_before_every_change_of_the_disk(folder: Path, name: str, campaign: Campaign) -> None:
    """I2, I16: between any two renames, links, syncs … of the disk nothing is lost."""
    campaign.counts_items = True
    scenario = SCENARIOS[name]
    before = scenario.prepare(folder / "before")
    stride = examples(random.randint(13, 19), soak=1)
    number = random.randint(1, stride)
    while True:
        supplier = before.copy(folder / str(number))
        with annotate(f"killed before change {number}"):
            if not run_and_die(run_until_call, supplier.root, number):
                check_the_end(supplier, scenario)
                return
            check_the_next_run(supplier, scenario, len(before.read_manifests()))
            supplier.clock = ManualClock(supplier.clock.now() + timedelta(days=8))
            supplier.sweep()
            assert supplier.list_drafts() == []
            supplier.check_consistency()
        campaign.end_round(faults=1)
        number += stride


@pytest.mark.parametrize(
    "step", [PublishStep.STARTED, PublishStep.STATE_STORED, PublishStep.SWITCHED, PublishStep.ACCEPTED]
)
def test_runs_killed_repeatedly(folder: Path, step: PublishStep) -> None:
    """I16: a run that recovers a killed run may be killed too; every run is recorded."""
    scenario = SCENARIOS["crowd"]
    supplier = scenario.prepare(folder / "tree")
    for again in (step, PublishStep.RECOVERED, step, PublishStep.STARTED):
        run_and_die(run_until, supplier.root, again)
        check_the_crash(supplier, scenario)
    supplier.run()
    check_the_end(supplier, scenario)


def test_file_replaced_after_a_crash_is_processed(folder: Path) -> None:
    """I10: a new file with the name of the file that was published before the crash is processed."""
    scenario = SCENARIOS["second"]
    supplier = scenario.prepare(folder / "tree")
    assert run_and_die(run_until, supplier.root, PublishStep.SWITCHED)
    supplier.inbox("first.csv").rename(supplier.inbox("another.csv"))
    supplier.drop("first.csv", csv(OLDER), at=99)
    outcome = supplier.run()
    assert outcome.is_pass
    assert supplier.facts() == OLDER
    supplier.check_consistency()
    assert supplier.count_all_contents()["inbox"] == Counter()


@pytest.mark.parametrize("runs_again", [True, False])
def test_marker_of_a_file_sent_again_does_not_expire(folder: Path, runs_again: bool) -> None:
    """I10, I12, I22: the marker of a file that was accepted again by a killed run does not expire with the old run.

    Expired files may be deleted before the next run, which would write the marker again.
    """
    supplier = SupplierFolder(folder)
    supplier.configure(dedup="current")
    for number, facts in enumerate((FIRST, NEW)):
        supplier.drop(f"{number}.csv", csv(facts), at=number)
        supplier.run()
    supplier.drop("back.csv", csv(FIRST), at=9)
    assert run_and_die(run_until, supplier.root, PublishStep.SWITCHED)
    if runs_again:
        supplier.run()
    supplier.clock = ManualClock(supplier.clock.now() + timedelta(days=400))
    supplier.sweep()
    supplier.sent = Counter() if runs_again else Counter([hash_bytes(csv(FIRST))])  # the file is still in the inbox
    markers = supplier.tree.list_files(f"{paths.ACCEPTED}/{SUPPLIER}")
    assert [Path(marker.path).stem for marker in markers] == [hash_bytes(csv(FIRST))]
    supplier.run()
    supplier.check_consistency()
    assert supplier.facts() == FIRST


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
def test_gc_killed_before_every_change_of_the_disk(folder: Path, campaign: Campaign) -> None:
    """I12, I16: a killed gc leaves complete or deleted files; the next gc completes it; the state stays."""
    scenario = SCENARIOS["crowd"]
    before = scenario.prepare(folder / "before")
    assert run_and_die(run_until, before.root, PublishStep.STATE_STORED)  # a state that is never published
    before.run()
    campaign.counts_items, forward = True, timedelta(days=400)
    stride = examples(random.randint(5, 9), soak=1)
    number = random.randint(1, stride)
    while True:
        supplier = before.copy(folder / str(number))
        was_cut = run_and_die(sweep_until_call, supplier.root, number, forward)
        with annotate(f"killed before change {number}"):
            supplier.check_states_are_complete()
            assert supplier.facts() == scenario.new
            assert not run_and_die(sweep_until_call, supplier.root, 0, forward)
            pointer = supplier.pointer()
            assert pointer is not None
            assert supplier.tree.list_states(SUPPLIER) == supplier.tree.list_runs(SUPPLIER) == [pointer.run_id]
            assert not sum(supplier.count_all_contents().values(), Counter())
            supplier.drop("old.csv", csv(OLDER))
            assert supplier.run().is_pass
            supplier.sent = Counter([hash_bytes(csv(OLDER))])
            supplier.check_consistency()
        if not was_cut:
            return
        campaign.end_round(faults=1)
        number += stride


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
def test_run_killed_at_random_times(folder: Path, campaign: Campaign) -> None:
    """I16: after every kill the state is that of one complete file."""
    campaign.counts_items = True
    kills, folders = examples(4, soak=300), itertools.count()
    while campaign.faults < kills:  # a run that ended before the kill is a round, but no fault
        (root := folder / str(next(folders))).mkdir()
        kill_runs(SupplierFolder(root), campaign, kills)


def kill_runs(supplier: SupplierFolder, campaign: Campaign, kills: int) -> None:
    """Kill FILES runs of one supplier and run again after each; more would be slow, as every round reads all files."""
    published: dict[int, Facts] = {}
    for number in range(FILES):
        facts = {f"S{row}": row * number for row in range(30_000)}
        name = f"{random.choice(['price', 'stock'])}.csv"
        supplier.drop(name, csv(facts), at=number)
        supplier.drop("again.csv", csv(facts), at=number - 1)
        process = start_process(run_until, supplier.root, None)
        process.join(random.uniform(0.0, 0.9))
        process.kill()
        was_cut = was_killed(process)
        with annotate(f"round {number}, killed: {was_cut}"):
            supplier.check_states_are_complete()
            supplier.check_no_file_is_lost()
            assert supplier.facts() in (facts, published.get(number - 1))
            supplier.run()
            published[number] = facts
            assert supplier.facts() == facts
            supplier.check_consistency()
            pointer = supplier.pointer()
            assert pointer is not None
            assert pointer.fence == number + 1
            assert supplier.count_all_contents()["archive"][hash_bytes(csv(facts))] == 1
            assert supplier.count_all_contents()["inbox"] == Counter()
        campaign.end_round(faults=was_cut)
        if campaign.faults >= kills:
            return
        if number % 20 == 19:
            supplier.sweep()
