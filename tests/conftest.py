"""What tests stand on: real servers, started once per run and shared by all its processes."""

import asyncio
import gc
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings

from penstock.kernel.clock import ManualClock
from penstock.kernel.db import Database
from penstock.kernel.embedded import embedded_postgres
from tests.services.memory import MemoryFolder
from tests.services.postgres import SERVER_URL, SETTINGS, fresh_database, make_template

settings.register_profile("penstock", deadline=None)  # the machine is noisy; time is measured by benchmarks
settings.load_profile("penstock")
# Hundreds of programs are started here: compiled once, each starts in half the time, whatever the shell is set to.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Nobody here speaks TLS. But httpx reads all the world's certificates for every request, and aiohttp for every program,
# which takes longer than most requests do. Here the world has one, whose key nobody has.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("services") / "nobody.pem")


def pytest_configure(config: pytest.Config) -> None:
    """Start PostgreSQL in the process that leads the run; the others inherit its address."""
    if SERVER_URL not in os.environ:
        server = _SharedPostgres()
        os.environ[SERVER_URL] = server.url
        config.add_cleanup(server.stop)


def pytest_collection_finish() -> None:
    """Nobody need look for garbage among thousands of tests and their modules, over and over."""
    gc.collect()
    gc.freeze()


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
        try:
            async with embedded_postgres(self._folder.path, settings=SETTINGS) as url:
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
