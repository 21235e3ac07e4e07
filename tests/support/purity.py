"""Which tests are pure: they start neither a server nor a process, so `make quick` runs them."""

import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.kernel.telemetry.build import find_code_commit

QUICK = "PENSTOCK_QUICK"

# A test is pure when it does not use this fixture and its module imports nothing from these modules.
_DATABASE = "postgres_url"
_MODULES = {
    "multiprocessing",
    "subprocess",
    "tests.deploy.kubernetes.helm_chart",
    "tests.ingest.crash_process",
    "tests.services.kafka",
    "tests.services.mariadb",
    "tests.services.postgres",
    "tests.services.redis",
    "tests.services.s3",
    "tests.support.crash",
    "tests.support.fork_server",
    "tests.support.processes",
}
_NOT_QUICK = re.compile(
    rf"^(?:(?:from|import) (?:{'|'.join(map(re.escape, sorted(_MODULES)))})\b|pytestmark = pytest\.mark\.docs$)",
    re.MULTILINE,
)
_WORKBOOK_READER = "penstock.ingest.extract"  # reads one file in a process of its own, and is the code under test
_STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}


def is_quick() -> bool:
    """Return whether this run is `make quick`."""
    return bool(os.environ.get(QUICK))


def needs_server(item: pytest.Item) -> bool:
    """Return whether a test may start a server or a process."""
    modules = {getattr(item, "module", None), *_modules_of_fixtures(item)}
    return needs_database(item) or any(
        isinstance(module, ModuleType) and _starts_processes(module) for module in modules
    )


def has_no_quick_tests(path: Path) -> bool:
    """Return whether the source of a module says that no test of it is quick, so that it need not be imported."""
    return path.suffix == ".py" and bool(_NOT_QUICK.search(path.read_text(encoding="utf-8")))


def needs_database(item: pytest.Item) -> bool:
    """Return whether a test uses the database server that all tests share."""
    return _DATABASE in getattr(item, "fixturenames", ())


def forbid_processes() -> None:
    """Fail whatever starts a process from now on: a quick test that does is not pure and needs the mark."""
    find_code_commit()  # asks git once per process

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event in _STARTS and _WORKBOOK_READER not in str(args):
            raise RuntimeError(f"{event} in a quick test: its module needs an entry in tests.support.purity")

    sys.addaudithook(refuse)


def _modules_of_fixtures(item: pytest.Item) -> set[ModuleType]:
    """Return the modules that define the fixtures of a test, but for those that every test may use."""
    defined = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009 - pytest has no public way
    names = {fixture.func.__module__ for fixtures in defined for fixture in fixtures}
    return {sys.modules[name] for name in names if name.startswith("tests.") and name != "tests.conftest"}


def _starts_processes(module: ModuleType) -> bool:
    return any(_origin(value) in _MODULES for value in vars(module).values())


def _origin(value: object) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""
