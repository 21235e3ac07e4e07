"""Clocks that go back or are far off, ours and the files'; and when a file is finished."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from penstock.ingest.model import InboxFile
from penstock.ingest.run import ledger, select
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.tree import disk
from penstock.ingest.tree.folder import FolderTree
from penstock.kernel.clock import ManualClock
from tests.ingest.later_tree import FIRST, NEW, WINDOW, LaterTree
from tests.ingest.supplier_folder import SUPPLIER, Facts, SupplierFolder, csv

DAY = timedelta(days=1)
LAST: Facts = {"A": 3}
FAR_OFF = [-(2**31), 0, 4_102_444_800, 2**33, 15_032_385_535]
NO_CALENDAR = [-(2**40), 2**40, 2**50]


def advance(supplier: SupplierFolder, seconds: float) -> None:
    assert isinstance(supplier.tree, LaterTree)
    supplier.tree.later += seconds


def taken(supplier: SupplierFolder) -> list[str]:
    """The files that went on by now."""
    return sorted(supplier.run().moved)


def write(supplier: SupplierFolder, name: str, content: bytes) -> Path:
    """A file that is written just now."""
    file = supplier.inbox(name)
    file.write_bytes(content)
    return file


def ready(supplier: SupplierFolder) -> list[str]:
    """As the watcher looks: what was seen is remembered."""
    known = supplier.ledger()
    found = select.list_readable(supplier.tree, SUPPLIER, known, WINDOW)
    ledger.save(supplier.tree, SUPPLIER, known)
    return [arrival.name for arrival in found.arrivals]


# When a file is finished.


def test_a_file_is_taken_when_it_stays_unchanged(supplier: SupplierFolder) -> None:
    """I3: not before it is as it was for the window; the copying of it does not make it any newer."""
    write(supplier, "new.csv", csv(NEW))
    for seconds in (0, WINDOW / 2):
        advance(supplier, seconds)
        outcome = supplier.run()
        assert outcome.reason == "1 file may still be written: new.csv"
    advance(supplier, WINDOW / 2)
    assert taken(supplier) == ["new.csv"]
    assert supplier.facts() == NEW


def test_an_old_file_is_taken_at_once(supplier: SupplierFolder) -> None:
    """I3: a file that was there for long need not be seen twice."""
    write(supplier, "new.csv", csv(NEW))
    supplier.tree.list_arrivals(SUPPLIER)  # nobody remembers it
    advance(supplier, WINDOW + 1)
    assert taken(supplier) == ["new.csv"]


def test_a_growing_file_is_not_taken(supplier: SupplierFolder) -> None:
    """I3: as long as it grows, the window begins anew."""
    file = write(supplier, "new.csv", csv(NEW))
    for number in range(5):
        assert taken(supplier) == []
        with file.open("ab") as out:
            out.write(f"S{number},1\n".encode())
        os.utime(file, (0, 0))  # whoever writes it may set its time back; it grows all the same
        advance(supplier, WINDOW - 1)
    assert taken(supplier) == []
    advance(supplier, WINDOW)
    assert taken(supplier) == ["new.csv"]
    assert len(supplier.facts() or {}) == 6


def test_a_file_written_over_is_not_taken(supplier: SupplierFolder) -> None:
    """I3: as long as before, but with another time."""
    file = write(supplier, "new.csv", csv(FIRST))
    assert taken(supplier) == []
    advance(supplier, WINDOW - 1)
    file.write_bytes(csv(NEW))
    os.utime(file, (1, 1))
    assert taken(supplier) == []
    advance(supplier, 2)
    assert taken(supplier) == []
    advance(supplier, WINDOW)
    assert taken(supplier) == ["new.csv"]
    assert supplier.facts() == NEW


def test_a_file_that_was_replaced_is_not_taken(supplier: SupplierFolder) -> None:
    """I3: another file of the same name, size and time is another file."""
    file = write(supplier, "new.csv", csv(FIRST))
    os.utime(file, (1_000_000_000, 1_000_000_000))
    assert taken(supplier) == []
    advance(supplier, WINDOW - 1)
    another = write(supplier, ".another", csv(NEW))
    os.utime(another, (1_000_000_000, 1_000_000_000))
    another.replace(file)
    assert taken(supplier) == []
    advance(supplier, 2)
    assert taken(supplier) == []
    advance(supplier, WINDOW)
    assert taken(supplier) == ["new.csv"]
    assert supplier.facts() == NEW


@pytest.mark.parametrize("draft", ["new.csv.tmp", "new.csv.part", "new.csv.TMP", ".new.csv.x7Gh2", ".new.csv"])
@pytest.mark.parametrize("looks", [0, 3])
def test_a_file_that_got_its_name_at_the_end_is_taken_at_once(supplier: SupplierFolder, draft: str, looks: int) -> None:
    """I3: renamed from a draft that was seen, it is finished; whoever looks first need not be who takes it."""
    write(supplier, draft, csv(NEW))
    assert taken(supplier) == []
    supplier.inbox(draft).rename(supplier.inbox("new.csv"))
    for _ in range(looks):
        assert ready(supplier) == ["new.csv"]
    assert taken(supplier) == ["new.csv"]


def test_what_is_written_after_it_got_its_name_is_not_finished(supplier: SupplierFolder) -> None:
    """I3: a file that was renamed, and is then written, has to stay unchanged like any other."""
    write(supplier, "new.csv.tmp", csv(NEW))
    assert taken(supplier) == []
    supplier.inbox("new.csv.tmp").rename(supplier.inbox("new.csv"))
    assert ready(supplier) == ["new.csv"]
    write(supplier, "new.csv", csv(LAST) + b"B,")
    assert ready(supplier) == taken(supplier) == []


def test_another_name_is_another_file(supplier: SupplierFolder) -> None:
    """I3: a draft of something else says nothing, nor does a draft that nobody saw."""
    write(supplier, "old.csv.tmp", csv(NEW))
    assert taken(supplier) == []
    supplier.inbox("old.csv.tmp").rename(supplier.inbox("new.csv"))
    assert taken(supplier) == []
    write(supplier, "late.csv.tmp", csv(NEW)).rename(supplier.inbox("late.csv"))
    assert taken(supplier) == []


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("name", ["new.csv.tmp", "new.csv.part", "new.csv.PART", ".new.csv", ".tmp"])
def test_what_says_it_is_unfinished_is_never_taken(supplier: SupplierFolder, name: str, window: float) -> None:
    """I3: however old it is."""
    supplier.configure(window=window)
    os.utime(write(supplier, name, csv(NEW)), (0, 0))
    for seconds in (0, 10 * WINDOW, 1_000_000):
        advance(supplier, seconds)
        assert taken(supplier) == []
    assert supplier.standing().unfinished == [name]
    assert supplier.inbox(name).exists()


def test_without_a_window_a_file_is_taken_as_it_is(supplier: SupplierFolder) -> None:
    """I3: window 0 is for suppliers who never write in place."""
    supplier.configure(window=0)
    write(supplier, "new.csv", csv(NEW))
    assert taken(supplier) == ["new.csv"]


@pytest.mark.parametrize("step", [PublishStep.COPIED, PublishStep.STARTED, PublishStep.SWITCHED, PublishStep.ACCEPTED])
@pytest.mark.parametrize("by_rename", [False, True], ids=["written", "renamed"])
def test_a_file_replaced_under_a_run_is_for_the_next(
    supplier: SupplierFolder, step: PublishStep, by_rename: bool
) -> None:
    """I2, I3: what was copied is published; what has its name by now is not moved with it, and comes next."""
    supplier.configure(window=0)
    write(supplier, "new.csv", csv(NEW))

    def come(now: PublishStep) -> None:
        if now is step:
            write(supplier, "draft.tmp" if by_rename else "new.csv", csv(LAST))
            if by_rename:
                supplier.inbox("draft.tmp").replace(supplier.inbox("new.csv"))

    outcome = supplier.run(come)
    assert outcome.is_pass
    assert outcome.moved == {}
    assert supplier.facts() == NEW
    assert supplier.inbox("new.csv").read_bytes() == csv(LAST)
    assert taken(supplier) == ["new.csv"]
    assert supplier.facts() == LAST


def test_a_file_replaced_amid_its_move_is_for_the_next(
    supplier: SupplierFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2: between the last look at a file and its rename, too."""
    supplier.configure(window=0)
    write(supplier, "new.csv", csv(NEW))
    names = disk.propose_names

    def late(name: str, suffix: str) -> Iterator[str]:
        write(supplier, ".another", csv(LAST)).replace(supplier.inbox("new.csv"))
        return names(name, suffix)

    monkeypatch.setattr(disk, "propose_names", late)
    supplier.run()
    monkeypatch.undo()
    assert supplier.facts() == NEW
    assert supplier.inbox("new.csv").read_bytes() == csv(LAST)
    assert taken(supplier) == ["new.csv"]
    assert supplier.facts() == LAST


def test_a_file_changed_while_it_is_copied_is_for_the_next(
    supplier: SupplierFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: the copy is of one content, or is none; another file that is ready is taken meanwhile."""
    supplier.configure(window=0)
    os.utime(write(supplier, "old.csv", csv(FIRST)), (1, 1))
    write(supplier, "new.csv", csv(NEW))
    take = FolderTree.fetch

    def late(tree: FolderTree, arrival: InboxFile, target: Path | None = None) -> str:
        if arrival.name == "new.csv":
            write(supplier, "new.csv", csv(LAST))
        return take(tree, arrival, target)

    monkeypatch.setattr(FolderTree, "fetch", late)
    assert taken(supplier) == ["old.csv"]
    monkeypatch.undo()
    assert supplier.facts() == FIRST
    assert taken(supplier) == ["new.csv"]
    assert supplier.facts() == LAST


# Clocks.


@pytest.mark.parametrize("seconds", [*FAR_OFF, *NO_CALENDAR])
def test_the_time_of_a_file_may_be_anything(supplier: SupplierFolder, seconds: int) -> None:
    """I3: a time far in the past or the future, or that no calendar has, does not keep a file from being taken."""
    file = write(supplier, "new.csv", csv(NEW))
    try:
        os.utime(file, (seconds, seconds))
    except OverflowError:
        pytest.skip("Python cannot set such a time here")
    assert taken(supplier) == []
    advance(supplier, WINDOW)
    assert taken(supplier) == ["new.csv"]
    assert supplier.facts() == NEW


def test_the_time_of_a_file_orders_it(supplier: SupplierFolder) -> None:
    """I2: the newest by its time wins, be it far off; the clock of this machine does not matter."""
    for name, facts, seconds in (("a.csv", FIRST, 10**9), ("b.csv", LAST, 4 * 10**9), ("c.csv", NEW, 2 * 10**9)):
        os.utime(write(supplier, name, csv(facts)), (seconds, seconds))
    assert taken(supplier) == []
    advance(supplier, WINDOW)
    assert taken(supplier) == ["a.csv", "b.csv", "c.csv"]
    assert supplier.facts() == LAST


@pytest.mark.parametrize("back", [WINDOW, 3600, 400 * 86_400])
def test_the_clock_of_the_disk_may_go_back(supplier: SupplierFolder, back: float) -> None:
    """I3: a file that was seen before the clock went back waits for one window more, not until the old time is back."""
    write(supplier, "new.csv", csv(NEW))
    assert taken(supplier) == []
    advance(supplier, -back)
    assert taken(supplier) == []
    advance(supplier, WINDOW - 1)
    assert taken(supplier) == []
    advance(supplier, 1)
    assert taken(supplier) == ["new.csv"]


@pytest.mark.parametrize("back", [timedelta(seconds=1), 3 * DAY, 4000 * DAY])
def test_our_clock_may_go_back(supplier: SupplierFolder, clock: ManualClock, back: timedelta) -> None:
    """I11, I13, I16: runs go on, fences grow, no age is negative, and no run ends before it began."""
    supplier.configure(window=0)
    for number in range(1, 5):
        supplier.drop("new.csv", csv({"A": number}), at=number)
        outcome = supplier.run(lambda step: clock.advance(-back) if step is PublishStep.STARTED else None)
        assert outcome.is_pass
        assert outcome.manifest is not None
        assert outcome.manifest.finished_at >= outcome.manifest.started_at
        pointer = supplier.pointer()
        assert pointer is not None
        assert pointer.fence == number
        age = supplier.standing().age_seconds
        assert age is not None
        assert age >= 0
        clock.advance(-back)
        age = supplier.standing().age_seconds
        assert age is not None
        assert age >= 0
    assert supplier.facts() == {"A": 4}
    supplier.check_all_is_well()
