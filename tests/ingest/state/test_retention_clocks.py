"""What goes, and what stays, when the clock goes back or is far off."""

from datetime import timedelta

import pytest

from penstock.ingest.config import IngestRetentionSection
from penstock.ingest.tree import paths
from penstock.kernel.clock import ManualClock
from tests.ingest.later_tree import FIRST, NEW
from tests.ingest.supplier_folder import SUPPLIER, SupplierFolder, csv

DAY = timedelta(days=1)


@pytest.mark.parametrize("jump", [-4000 * DAY, -DAY, timedelta(hours=11)])
def test_gc_removes_nothing_when_the_clock_goes_back(
    supplier: SupplierFolder, clock: ManualClock, jump: timedelta
) -> None:
    """I12: what is not old by the clock stays, and so does what is from the future."""
    supplier.configure(window=0)
    for number in range(3):
        supplier.drop("new.csv", csv({"A": number}), at=number)
        supplier.run()
    supplier.drop("again.csv", csv({"A": 0}))
    supplier.run()
    clock.advance(jump)
    assert supplier.sweep().expired == []
    supplier.check_all_is_well()
    assert supplier.facts() == {"A": 2}


def test_gc_keeps_what_is_current_however_late_it_is(supplier: SupplierFolder, clock: ManualClock) -> None:
    """I12: the current state, its run and its mark stay; all else goes when its time has come."""
    supplier.configure(window=0)
    for number in range(3):
        supplier.drop("new.csv", csv({"A": number}), at=number)
        supplier.run()
        clock.advance(timedelta(minutes=1))
    pointer = supplier.pointer()
    assert pointer is not None
    clock.advance(timedelta(hours=13))
    gone = [one.path for one in supplier.sweep().expired]
    assert sorted(gone) == sorted(paths.state(SUPPLIER, run) for run in supplier.tree.list_runs(SUPPLIER)[:2])
    clock.advance(4000 * DAY)
    supplier.sweep(IngestRetentionSection(state_retention_hours=0))
    assert supplier.tree.list_states(SUPPLIER) == supplier.tree.list_runs(SUPPLIER) == [pointer.run_id]
    assert [file.path for file in supplier.tree.list_files(f"{paths.ACCEPTED}/{SUPPLIER}")] != []
    assert supplier.facts() == {"A": 2}
    supplier.sent.clear()
    supplier.check_all_is_well()


def test_a_state_that_was_replaced_by_a_wrong_clock_stays_its_time(
    supplier: SupplierFolder, clock: ManualClock
) -> None:
    """I12: a state published while the clock was in the past was not replaced in the past."""
    supplier.configure(window=0)
    supplier.drop("new.csv", csv(FIRST), at=1)
    supplier.run()
    clock.advance(-400 * DAY)
    supplier.drop("new.csv", csv(NEW), at=2)
    supplier.run()
    clock.advance(400 * DAY)
    assert supplier.sweep().expired == []
    clock.advance(timedelta(hours=13))
    assert len(supplier.sweep().expired) == 1
