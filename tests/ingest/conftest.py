"""Fixtures of the tests of ingest; a module may override them."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.app.platform import open_ingest_workspace
from penstock.ingest.api.queries import IngestViews
from penstock.ingest.workspace import IngestWorkspace
from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.settings import Settings
from tests.ingest.harness import KEYED, IngestHarness
from tests.ingest.later_tree import WINDOW, LaterTree
from tests.ingest.supplier_folder import SupplierFolder, open_fast_folder


@pytest.fixture
def harness(tmp_path: Path) -> IngestHarness:
    return IngestHarness(tmp_path / "root", KEYED)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(datetime.now(UTC))


@pytest.fixture
def supplier(clock: ManualClock) -> Iterator[SupplierFolder]:
    with open_fast_folder() as folder:
        supplier = SupplierFolder(folder, clock)
        supplier.tree = LaterTree(folder)
        supplier.configure(window=WINDOW)
        yield supplier


@pytest.fixture
def configured(harness: IngestHarness, database_url: str) -> Settings:
    return Settings.model_validate({"database": {"url": database_url}, "ingest": {"root": str(harness.root)}})


@pytest.fixture
def workspace(configured: Settings) -> Iterator[IngestWorkspace]:
    with open_ingest_workspace(configured, uses_database=True) as workspace:
        yield workspace


@pytest.fixture
def views(db: Database, workspace: IngestWorkspace, configured: Settings) -> IngestViews:
    return IngestViews(db, workspace.tree, configured.ingest)
