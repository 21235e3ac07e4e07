"""The selection of files: when a file is complete, and wrong clocks of the host, the disk and the files."""

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
WRONG_TIMES = [-(2**31), 0, 4_102_444_800, 2**33, 15_032_385_535]
TIMES_OUT_OF_RANGE = [-(2**40), 2**40, 2**50]


def advance(supplier: SupplierFolder, seconds: float) -> None:
    assert isinstance(supplier.tree, LaterTree)
    supplier.tree.later += seconds


def run_and_list(supplier: SupplierFolder) -> list[str]:
    """Run once, and return the files that were moved."""
    return sorted(supplier.run().moved)


def write_file(supplier: SupplierFolder, name: str, content: bytes) -> Path:
    """Write a file with the present time."""
    file = supplier.inbox(name)
    file.write_bytes(content)
    return file


def check_inbox(supplier: SupplierFolder) -> list[str]:
    """Return the readable files, as the watcher does: the ledger remembers what was seen."""
    memory = supplier.ledger()
    readable = select.list_readable(supplier.tree, SUPPLIER, memory, WINDOW)
    ledger.save(supplier.tree, SUPPLIER, memory)
    return [arrival.name for arrival in readable.arrivals]


# When a file is complete.


def test_unchanged_file_is_processed(supplier: SupplierFolder) -> None:
    """I3: a file is processed after it was unchanged for the window; copying it does not make it newer."""
    write_file(supplier, "new.csv", csv(NEW))
    for seconds in (0, WINDOW / 2):
        advance(supplier, seconds)
        outcome = supplier.run()
        assert outcome.reason == "1 file may still be written: new.csv"
    advance(supplier, WINDOW / 2)
    assert run_and_list(supplier) == ["new.csv"]
    assert supplier.facts() == NEW


def test_old_file_is_processed_at_once(supplier: SupplierFolder) -> None:
    """I3: a file that is older than the window need not be seen twice."""
    write_file(supplier, "new.csv", csv(NEW))
    supplier.tree.list_arrivals(SUPPLIER)  # not recorded in the ledger
    advance(supplier, WINDOW + 1)
    assert run_and_list(supplier) == ["new.csv"]


def test_growing_file_waits(supplier: SupplierFolder) -> None:
    """I3: each change of a file starts the window again."""
    file = write_file(supplier, "new.csv", csv(NEW))
    for number in range(5):
        assert run_and_list(supplier) == []
        with file.open("ab") as out:
            out.write(f"S{number},1\n".encode())
        os.utime(file, (0, 0))  # the writer may set the time back; the file still grows
        advance(supplier, WINDOW - 1)
    assert run_and_list(supplier) == []
    advance(supplier, WINDOW)
    assert run_and_list(supplier) == ["new.csv"]
    assert len(supplier.facts() or {}) == 6


def test_overwritten_file_waits(supplier: SupplierFolder) -> None:
    """I3: a file of the same size with another time has changed."""
    file = write_file(supplier, "new.csv", csv(FIRST))
    assert run_and_list(supplier) == []
    advance(supplier, WINDOW - 1)
    file.write_bytes(csv(NEW))
    os.utime(file, (1, 1))
    assert run_and_list(supplier) == []
    advance(supplier, 2)
    assert run_and_list(supplier) == []
    advance(supplier, WINDOW)
    assert run_and_list(supplier) == ["new.csv"]
    assert supplier.facts() == NEW


def test_replaced_file_waits(supplier: SupplierFolder) -> None:
    """I3: another file of the same name, size and time is another file."""
    file = write_file(supplier, "new.csv", csv(FIRST))
    os.utime(file, (1_000_000_000, 1_000_000_000))
    assert run_and_list(supplier) == []
    advance(supplier, WINDOW - 1)
    another = write_file(supplier, ".another", csv(NEW))
    os.utime(another, (1_000_000_000, 1_000_000_000))
    another.replace(file)
    assert run_and_list(supplier) == []
    advance(supplier, 2)
    assert run_and_list(supplier) == []
    advance(supplier, WINDOW)
    assert run_and_list(supplier) == ["new.csv"]
    assert supplier.facts() == NEW


@pytest.mark.parametrize("draft", ["new.csv.tmp", "new.csv.part", "new.csv.TMP", ".new.csv.x7Gh2", ".new.csv"])
@pytest.mark.parametrize("checks", [0, 3])
def test_renamed_draft_is_processed_at_once(supplier: SupplierFolder, draft: str, checks: int) -> None:
    """I3: a file renamed from a draft that was seen is complete, whichever process saw the draft."""
    write_file(supplier, draft, csv(NEW))
    assert run_and_list(supplier) == []
    supplier.inbox(draft).rename(supplier.inbox("new.csv"))
    for _ in range(checks):
        assert check_inbox(supplier) == ["new.csv"]
    assert run_and_list(supplier) == ["new.csv"]


def test_renamed_file_that_changes_waits(supplier: SupplierFolder) -> None:
    """I3: a renamed file that changes afterwards must be unchanged for the window, as any other file."""
    write_file(supplier, "new.csv.tmp", csv(NEW))
    assert run_and_list(supplier) == []
    supplier.inbox("new.csv.tmp").rename(supplier.inbox("new.csv"))
    assert check_inbox(supplier) == ["new.csv"]
    write_file(supplier, "new.csv", csv(LAST) + b"B,")
    assert check_inbox(supplier) == run_and_list(supplier) == []


def test_rename_to_another_name_waits(supplier: SupplierFolder) -> None:
    """I3: a draft of another name, or one that was not seen, does not make a file complete."""
    write_file(supplier, "old.csv.tmp", csv(NEW))
    assert run_and_list(supplier) == []
    supplier.inbox("old.csv.tmp").rename(supplier.inbox("new.csv"))
    assert run_and_list(supplier) == []
    write_file(supplier, "late.csv.tmp", csv(NEW)).rename(supplier.inbox("late.csv"))
    assert run_and_list(supplier) == []


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("name", ["new.csv.tmp", "new.csv.part", "new.csv.PART", ".new.csv", ".tmp"])
def test_temporary_name_is_never_processed(supplier: SupplierFolder, name: str, window: float) -> None:
    """I3: a file with a temporary name is never processed, however old it is."""
    supplier.configure(window=window)
    os.utime(write_file(supplier, name, csv(NEW)), (0, 0))
    for seconds in (0, 10 * WINDOW, 1_000_000):
        advance(supplier, seconds)
        assert run_and_list(supplier) == []
    assert supplier.read_status().unfinished == [name]
    assert supplier.inbox(name).exists()


def test_window_of_zero_processes_at_once(supplier: SupplierFolder) -> None:
    """I3: window 0 is for suppliers that never write in place."""
    supplier.configure(window=0)
    write_file(supplier, "new.csv", csv(NEW))
    assert run_and_list(supplier) == ["new.csv"]


@pytest.mark.parametrize("step", [PublishStep.COPIED, PublishStep.STARTED, PublishStep.SWITCHED, PublishStep.ACCEPTED])
@pytest.mark.parametrize("by_rename", [False, True], ids=["written", "renamed"])
def test_file_replaced_during_a_run_is_for_the_next_run(
    supplier: SupplierFolder, step: PublishStep, by_rename: bool
) -> None:
    """I2, I3: the copied content is published; the file that has its name now is not moved, and is processed next."""
    supplier.configure(window=0)
    write_file(supplier, "new.csv", csv(NEW))

    def replace_file(now: PublishStep) -> None:
        if now is step:
            write_file(supplier, "draft.tmp" if by_rename else "new.csv", csv(LAST))
            if by_rename:
                supplier.inbox("draft.tmp").replace(supplier.inbox("new.csv"))

    outcome = supplier.run(replace_file)
    assert outcome.is_pass
    assert outcome.moved == {}
    assert supplier.facts() == NEW
    assert supplier.inbox("new.csv").read_bytes() == csv(LAST)
    assert run_and_list(supplier) == ["new.csv"]
    assert supplier.facts() == LAST


def test_file_replaced_during_its_move_is_for_the_next_run(
    supplier: SupplierFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2: a file that is replaced between the last check and the rename stays in the inbox."""
    supplier.configure(window=0)
    write_file(supplier, "new.csv", csv(NEW))
    propose_names = disk.propose_names

    def late(name: str, suffix: str) -> Iterator[str]:
        write_file(supplier, ".another", csv(LAST)).replace(supplier.inbox("new.csv"))
        return propose_names(name, suffix)

    monkeypatch.setattr(disk, "propose_names", late)
    supplier.run()
    monkeypatch.undo()
    assert supplier.facts() == NEW
    assert supplier.inbox("new.csv").read_bytes() == csv(LAST)
    assert run_and_list(supplier) == ["new.csv"]
    assert supplier.facts() == LAST


def test_file_changed_during_the_copy_is_for_the_next_run(
    supplier: SupplierFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: the copy has one content, or is discarded; another readable file is processed instead."""
    supplier.configure(window=0)
    os.utime(write_file(supplier, "old.csv", csv(FIRST)), (1, 1))
    write_file(supplier, "new.csv", csv(NEW))
    fetch = FolderTree.fetch

    def late(tree: FolderTree, arrival: InboxFile, target: Path | None = None) -> str:
        if arrival.name == "new.csv":
            write_file(supplier, "new.csv", csv(LAST))
        return fetch(tree, arrival, target)

    monkeypatch.setattr(FolderTree, "fetch", late)
    assert run_and_list(supplier) == ["old.csv"]
    monkeypatch.undo()
    assert supplier.facts() == FIRST
    assert run_and_list(supplier) == ["new.csv"]
    assert supplier.facts() == LAST


# Clocks.


@pytest.mark.parametrize("seconds", [*WRONG_TIMES, *TIMES_OUT_OF_RANGE])
def test_wrong_time_of_a_file(supplier: SupplierFolder, seconds: int) -> None:
    """I3: a file with a time far in the past or the future, or out of range, is processed."""
    file = write_file(supplier, "new.csv", csv(NEW))
    try:
        os.utime(file, (seconds, seconds))
    except OverflowError:
        pytest.skip("Python cannot set such a time here")
    assert run_and_list(supplier) == []
    advance(supplier, WINDOW)
    assert run_and_list(supplier) == ["new.csv"]
    assert supplier.facts() == NEW


def test_newest_file_by_its_own_time_wins(supplier: SupplierFolder) -> None:
    """I2: the newest file by its own time wins, even if that time is wrong; the clock of the host does not matter."""
    for name, facts, seconds in (("a.csv", FIRST, 10**9), ("b.csv", LAST, 4 * 10**9), ("c.csv", NEW, 2 * 10**9)):
        os.utime(write_file(supplier, name, csv(facts)), (seconds, seconds))
    assert run_and_list(supplier) == []
    advance(supplier, WINDOW)
    assert run_and_list(supplier) == ["a.csv", "b.csv", "c.csv"]
    assert supplier.facts() == LAST


@pytest.mark.parametrize("back", [WINDOW, 3600, 400 * 86_400])
def test_clock_of_the_disk_goes_back(supplier: SupplierFolder, back: float) -> None:
    """I3: a file that was seen before the clock went back waits for one more window, not until the old time."""
    write_file(supplier, "new.csv", csv(NEW))
    assert run_and_list(supplier) == []
    advance(supplier, -back)
    assert run_and_list(supplier) == []
    advance(supplier, WINDOW - 1)
    assert run_and_list(supplier) == []
    advance(supplier, 1)
    assert run_and_list(supplier) == ["new.csv"]


@pytest.mark.parametrize("back", [timedelta(seconds=1), 3 * DAY, 4000 * DAY])
def test_clock_of_the_host_goes_back(supplier: SupplierFolder, clock: ManualClock, back: timedelta) -> None:
    """I11, I13, I16: runs continue, fences grow, no age is negative, and no run ends before it started."""
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
        age = supplier.read_status().age_seconds
        assert age is not None
        assert age >= 0
        clock.advance(-back)
        age = supplier.read_status().age_seconds
        assert age is not None
        assert age >= 0
    assert supplier.facts() == {"A": 4}
    supplier.check_consistency()
