"""The deletion of expired files with wrong clocks."""

from datetime import timedelta

import pytest

from penstock.ingest.config import IngestRetentionSection
from penstock.ingest.tree import paths
from penstock.kernel.clock import ManualClock
from tests.ingest.later_tree import FIRST, NEW
from tests.ingest.supplier_folder import SUPPLIER, SupplierFolder, csv

DAY = timedelta(days=1)


@pytest.mark.parametrize("jump", [-4000 * DAY, -DAY, timedelta(hours=11)])
def test_clock_that_goes_back_deletes_nothing(supplier: SupplierFolder, clock: ManualClock, jump: timedelta) -> None:
    """I12: files that are not old by the clock stay, and so do files from the future."""
    supplier.configure(window=0)
    for number in range(3):
        supplier.drop("new.csv", csv({"A": number}), at=number)
        supplier.run()
    supplier.drop("again.csv", csv({"A": 0}))
    supplier.run()
    clock.advance(jump)
    assert supplier.sweep().expired == []
    supplier.check_consistency()
    assert supplier.facts() == {"A": 2}


def test_published_state_stays_at_any_time(supplier: SupplierFolder, clock: ManualClock) -> None:
    """I12: the published state, its run and its marker stay; all other files are deleted after their retention."""
    supplier.configure(window=0)
    for number in range(3):
        supplier.drop("new.csv", csv({"A": number}), at=number)
        supplier.run()
        clock.advance(timedelta(minutes=1))
    pointer = supplier.pointer()
    assert pointer is not None
    clock.advance(timedelta(hours=13))
    deleted = [entry.path for entry in supplier.sweep().expired]
    assert sorted(deleted) == sorted(
        paths.make_state_path(SUPPLIER, run) for run in supplier.tree.list_runs(SUPPLIER)[:2]
    )
    clock.advance(4000 * DAY)
    supplier.sweep(IngestRetentionSection(state_retention_hours=0))
    assert supplier.tree.list_states(SUPPLIER) == supplier.tree.list_runs(SUPPLIER) == [pointer.run_id]
    assert [file.path for file in supplier.tree.list_files(f"{paths.ACCEPTED}/{SUPPLIER}")] != []
    assert supplier.facts() == {"A": 2}
    supplier.sent.clear()
    supplier.check_consistency()


def test_state_replaced_under_a_wrong_clock_has_its_retention(supplier: SupplierFolder, clock: ManualClock) -> None:
    """I12: a state that was replaced while the clock was in the past is retained for the full time."""
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
