"""Which tests are pure: they start neither a server nor a process, so `make quick` runs them."""

import os
import sys
from types import ModuleType
from typing import Any

import pytest

QUICK = "PENSTOCK_QUICK"
# A test is pure when it does not use this fixture and its module imports nothing from these modules.
_DATABASE = "postgres_url"
_MODULES = {
    "multiprocessing",
    "subprocess",
    "tests.support.fork_server",
    "tests.services.kafka",
    "tests.services.mariadb",
    "tests.support.processes",
    "tests.services.redis",
    "tests.services.s3",
}
_WORKBOOK_READER = "penstock.ingest.extract"  # reads one file in a process of its own, and is the code under test
_STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}


def is_quick() -> bool:
    """Return whether this run is `make quick`."""
    return bool(os.environ.get(QUICK))


def needs_server(item: pytest.Item) -> bool:
    """Return whether a test may start a server or a process."""
    module = getattr(item, "module", None)
    return needs_database(item) or (isinstance(module, ModuleType) and _starts_processes(module))


def needs_database(item: pytest.Item) -> bool:
    """Return whether a test uses the database server that all tests share."""
    return _DATABASE in getattr(item, "fixturenames", ())


def forbid_processes() -> None:
    """Fail whatever starts a process from now on: a quick test that does is not pure and needs the mark."""

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event in _STARTS and _WORKBOOK_READER not in str(args):
            raise RuntimeError(f"{event} in a quick test: its module needs an entry in tests.support.purity")

    sys.addaudithook(refuse)


def _starts_processes(module: ModuleType) -> bool:
    return any(_origin(value) in _MODULES for value in vars(module).values())


def _origin(value: object) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""
