"""Fixtures of the tests of deliveries: a server with a dictionary and flows."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from penstock.ingest.deliver.deliveries import TargetDeliveries
from penstock.ingest.model import DeliveryResult
from penstock.ingest.supplier import load_supplier
from penstock.ingest.tree import paths
from penstock.ingest.tree.async_bridge import AsyncBridge
from penstock.kernel.clock import ManualClock
from tests.ingest.deliver.receivers import FLOW, OTHER_FLOW, Dictionary
from tests.ingest.harness import SUPPLIER, IngestHarness
from tests.services.postgres import module_database
from tests.support.processes import Up
from tests.support.settings import write_config


@pytest.fixture
def deliver(harness: IngestHarness, clock: ManualClock) -> Iterator[Callable[[], dict[str, DeliveryResult]]]:
    """Return a function that delivers the published state by the present configuration."""
    with closing(AsyncBridge()) as bridge:

        def deliver() -> dict[str, DeliveryResult]:
            config, _ = load_supplier(harness.root / paths.make_config_path(SUPPLIER))
            return TargetDeliveries(harness.tree, SUPPLIER, config, bridge, clock).deliver()

        yield deliver


@pytest.fixture(scope="module")
def server_database() -> Iterator[str]:
    """Yield the URL of a database for the server of the module."""
    with module_database() as url:
        yield url


@pytest.fixture(scope="module")
def up(server_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    config = {
        "database": {"url": server_database},
        "refdata": {"dictionaries": [{"code": "PRICES"}]},
        "flows": {"folder": str(folder / "flows")},
    }
    write_config(folder, config)
    (folder / "flows").mkdir()
    for name in (FLOW, OTHER_FLOW):
        (folder / "flows" / f"{name}.yaml").write_text(json.dumps({"name": name}))
    with Up(folder) as up:
        yield up


@pytest.fixture
def dictionary(up: Up) -> Dictionary:
    return Dictionary(up)
