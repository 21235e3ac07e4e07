"""kill -9 at every step of a run, before every change it makes on the disk, and at any moment."""

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
from tests.ingest.crash_process import killed_at, run_until, run_until_call, started, sweep_until_call, was_killed
from tests.ingest.supplier_folder import SUPPLIER, Facts, SupplierFolder, csv, digest, quick_folder
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
FILES = 40  # how many one supplier sends in a campaign


@dataclass(frozen=True)
class Scenario:
    """What lies in the inbox, and what has to come of it."""

    drops: list[tuple[str, bytes, float]]  # name, content, when
    ends: dict[str, list[bytes]]  # which contents end where
    old: Facts | None = None
    new: Facts | None = None
    code: FailureCode | None = None
    steps: tuple[PublishStep, ...] = tuple(PublishStep)
    config: dict[str, str] = field(default_factory=dict)

    @property
    def expected(self) -> Facts | None:
        return self.new if self.code is None else self.old

    def prepare(self, root: Path) -> SupplierFolder:
        """The place before the run: with a state if there is to be one, and some failures before it."""
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

    def ended(self) -> dict[str, Counter[str]]:
        """Where all files have to be in the end, those from before among them."""
        before = {"archive": [csv(self.old)] if self.old is not None else [], "broken": [NO_COLUMNS + b"C,3\n"]}
        places = ("inbox", "archive", "obsolete", "duplicates", "broken")
        return {name: Counter(map(digest, [*before.get(name, []), *self.ends.get(name, [])])) for name in places}


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
    with quick_folder() as folder:
        yield folder


@contextmanager
def told(where: str) -> Iterator[None]:
    """A promise that was broken, with the place where the run died."""
    try:
        yield
    except AssertionError as error:
        error.add_note(where)
        raise


def code_of(outcome: RunOutcome) -> FailureCode | None:
    return outcome.manifest.failure.code if outcome.manifest and outcome.manifest.failure else None


def check_the_crash(supplier: SupplierFolder, scenario: Scenario) -> bool:
    """I16: the state is the old or the new one, whole, and every file is somewhere; whether it is the new one."""
    supplier.check_nothing_is_half()
    supplier.check_nothing_is_lost()
    fence_before = 0 if scenario.old is None else 1
    pointer = supplier.pointer()
    is_switched = pointer is not None and pointer.fence > fence_before
    assert supplier.facts() == (scenario.new if is_switched else scenario.old)
    return is_switched


def check_the_next_run(supplier: SupplierFolder, scenario: Scenario, runs_before: int) -> None:
    """I10, I16: the next run simply works, ends what the killed one began, and leaves nothing to do."""
    is_switched = check_the_crash(supplier, scenario)
    was_moved = not any(supplier.inbox().iterdir())
    outcome = supplier.run()
    assert code_of(outcome) is (None if was_moved else scenario.code)
    assert (outcome.manifest is None) == (was_moved or is_switched)
    check_the_end(supplier, scenario)
    runs = [manifest for manifest in supplier.manifests().values() if manifest is not None]
    killed = {run["failure_code"] for run in runs if run["status"] == "FAIL"}
    assert killed <= {"INTERRUPTED", scenario.code and scenario.code.value, "COLUMNS_MISSING"}
    assert len(runs) <= runs_before + 2
    known = supplier.ledger()
    if scenario.code is None:
        assert (known.failed_runs, known.unchanged_files) == (0, 0)
    else:
        assert known.failed_runs == 1 + len(runs) - runs_before  # the one before, and each of these
    assert known.last_run is not None
    assert known.last_run["run_id"] in {run["run_id"] for run in runs}
    assert known.last_run["status"] == ("PASS" if scenario.code is None else "FAIL")


def check_the_end(supplier: SupplierFolder, scenario: Scenario) -> None:
    supplier.check_all_is_well()
    assert supplier.facts() == scenario.expected
    assert supplier.everywhere() == scenario.ended()
    check_why(supplier, scenario)
    pointer = supplier.pointer()
    published = [one for one in (scenario.old, scenario.new) if one is not None]
    assert (pointer.fence if pointer else 0) == len(published)
    further = supplier.run()
    assert (further.manifest, further.moved) == (None, {})
    assert supplier.everywhere() == scenario.ended()


def check_why(supplier: SupplierFolder, scenario: Scenario) -> None:
    """I6: a file that was published or put aside as broken has a run that tells so."""
    noted = {
        (manifest["input_sha256"], manifest["failure_code"])
        for manifest in supplier.manifests().values()
        if manifest is not None
    }
    for folder, code in (("archive", None), ("broken", scenario.code and scenario.code.value)):
        for content in scenario.ends.get(folder, []):
            assert (digest(content), code) in noted


@pytest.mark.full
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_may_die_at_every_step(folder: Path, name: str) -> None:
    """I10, I16: killed after each step; the state is the old or the new one, nothing is lost, the next run works."""
    scenario = SCENARIOS[name]
    before = scenario.prepare(folder / "before")
    died = []
    for step in PublishStep:
        supplier = before.copy(folder / step.value)
        with told(f"killed at {step.value}"):
            if killed_at(run_until, supplier.root, step):
                died.append(step)
                assert check_the_crash(supplier, scenario) == (scenario.code is None and step in AFTER_SWITCH)
                check_the_next_run(supplier, scenario, len(before.manifests()))
                assert supplier.drafts() == []
            else:
                check_the_end(supplier, scenario)
    assert set(died) == set(scenario.steps)


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_may_die_before_every_change(folder: Path, name: str, campaign: Campaign) -> None:
    """I2, I16: killed before each rename, link, sync, … of the disk: between two of them nothing is lost."""
    campaign.counts_items = True
    scenario = SCENARIOS[name]
    before = scenario.prepare(folder / "before")
    stride = examples(random.randint(13, 19), soak=1)
    number = random.randint(1, stride)
    while True:
        supplier = before.copy(folder / str(number))
        with told(f"killed before change {number}"):
            if not killed_at(run_until_call, supplier.root, number):
                check_the_end(supplier, scenario)
                return
            check_the_next_run(supplier, scenario, len(before.manifests()))
            supplier.clock = ManualClock(supplier.clock.now() + timedelta(days=8))
            supplier.sweep()
            assert supplier.drafts() == []
            supplier.check_all_is_well()
        campaign.end_round(faults=1)
        number += stride


@pytest.mark.parametrize(
    "step", [PublishStep.STARTED, PublishStep.STATE_STORED, PublishStep.SWITCHED, PublishStep.ACCEPTED]
)
def test_a_run_may_die_again_and_again(folder: Path, step: PublishStep) -> None:
    """I16: a run that ends what a killed one began may be killed, too; every run is noted all the same."""
    scenario = SCENARIOS["crowd"]
    supplier = scenario.prepare(folder / "place")
    for again in (step, PublishStep.RECOVERED, step, PublishStep.STARTED):
        killed_at(run_until, supplier.root, again)
        check_the_crash(supplier, scenario)
    supplier.run()
    check_the_end(supplier, scenario)


def test_what_changed_after_a_crash_is_another_file(folder: Path) -> None:
    """I10: a file that has the name of the one that was published before the crash is not taken for it."""
    scenario = SCENARIOS["second"]
    supplier = scenario.prepare(folder / "place")
    assert killed_at(run_until, supplier.root, PublishStep.SWITCHED)
    supplier.inbox("first.csv").rename(supplier.inbox("another.csv"))
    supplier.drop("first.csv", csv(OLDER), at=99)
    outcome = supplier.run()
    assert outcome.is_pass
    assert supplier.facts() == OLDER
    supplier.check_all_is_well()
    assert supplier.everywhere()["inbox"] == Counter()


@pytest.mark.parametrize("runs_again", [True, False])
def test_a_file_that_came_back_stays_accepted(folder: Path, runs_again: bool) -> None:
    """I10, I12, I22: accepted again by a run that was killed after the switch, its mark is not swept as the old one.

    The sweep may come before the next run, which would renew the mark.
    """
    supplier = SupplierFolder(folder)
    supplier.configure(dedup="current")
    for number, facts in enumerate((FIRST, NEW)):
        supplier.drop(f"{number}.csv", csv(facts), at=number)
        supplier.run()
    supplier.drop("back.csv", csv(FIRST), at=9)
    assert killed_at(run_until, supplier.root, PublishStep.SWITCHED)
    if runs_again:
        supplier.run()
    supplier.clock = ManualClock(supplier.clock.now() + timedelta(days=400))
    supplier.sweep()
    supplier.sent = Counter() if runs_again else Counter([digest(csv(FIRST))])  # the file is still in the inbox
    marks = supplier.tree.list_files(f"{paths.ACCEPTED}/{SUPPLIER}")
    assert [Path(mark.path).stem for mark in marks] == [digest(csv(FIRST))]
    supplier.run()
    supplier.check_all_is_well()
    assert supplier.facts() == FIRST


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
def test_a_sweep_may_die_before_every_change(folder: Path, campaign: Campaign) -> None:
    """I12, I16: what a killed gc leaves is whole or gone; the next one ends it, and the current state stays."""
    scenario = SCENARIOS["crowd"]
    before = scenario.prepare(folder / "before")
    assert killed_at(run_until, before.root, PublishStep.STATE_STORED)  # a state that nobody will publish
    before.run()
    campaign.counts_items, forward = True, timedelta(days=400)
    stride = examples(random.randint(5, 9), soak=1)
    number = random.randint(1, stride)
    while True:
        supplier = before.copy(folder / str(number))
        was_cut = killed_at(sweep_until_call, supplier.root, number, forward)
        with told(f"killed before change {number}"):
            supplier.check_nothing_is_half()
            assert supplier.facts() == scenario.new
            assert not killed_at(sweep_until_call, supplier.root, 0, forward)
            pointer = supplier.pointer()
            assert pointer is not None
            assert supplier.tree.list_states(SUPPLIER) == supplier.tree.list_runs(SUPPLIER) == [pointer.run_id]
            assert not sum(supplier.everywhere().values(), Counter())
            supplier.drop("old.csv", csv(OLDER))
            assert supplier.run().is_pass
            supplier.sent = Counter([digest(csv(OLDER))])
            supplier.check_all_is_well()
        if not was_cut:
            return
        campaign.end_round(faults=1)
        number += stride


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
def test_a_run_may_die_at_any_moment(folder: Path, campaign: Campaign) -> None:
    """I16: killed from outside, whatever it is doing; round after round the state is that of one whole file."""
    campaign.counts_items = True
    kills, folders = examples(4, soak=300), itertools.count()
    while campaign.faults < kills:  # a run that ended before the kill is a round, but no fault
        (root := folder / str(next(folders))).mkdir()
        kill_runs(SupplierFolder(root), campaign, kills)


def kill_runs(supplier: SupplierFolder, campaign: Campaign, kills: int) -> None:
    """Kill runs of one supplier and run again after each; FILES of them, because every round reads all that is kept."""
    published: dict[int, Facts] = {}
    for number in range(FILES):
        facts = {f"S{row}": row * number for row in range(30_000)}
        name = f"{random.choice(['price', 'stock'])}.csv"
        supplier.drop(name, csv(facts), at=number)
        supplier.drop("again.csv", csv(facts), at=number - 1)
        process = started(run_until, supplier.root, None)
        process.join(random.uniform(0.0, 0.9))
        process.kill()
        was_cut = was_killed(process)
        with told(f"round {number}, killed: {was_cut}"):
            supplier.check_nothing_is_half()
            supplier.check_nothing_is_lost()
            assert supplier.facts() in (facts, published.get(number - 1))
            supplier.run()
            published[number] = facts
            assert supplier.facts() == facts
            supplier.check_all_is_well()
            pointer = supplier.pointer()
            assert pointer is not None
            assert pointer.fence == number + 1
            assert supplier.everywhere()["archive"][digest(csv(facts))] == 1
            assert supplier.everywhere()["inbox"] == Counter()
        campaign.end_round(faults=was_cut)
        if campaign.faults >= kills:
            return
        if number % 20 == 19:
            supplier.sweep()
