"""Rules of the source tree that import-linter cannot state."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
import penstock.tracking

ROOT = Path(penstock.__file__).parent
PROJECT = ROOT.parent.parent
KERNEL_PAGE = PROJECT / "docs" / "kernel.md"
MODULES = sorted(ROOT.rglob("*.py"))
FOLDERS = sorted({file.parent for file in MODULES})
WIDEST = 20  # entries of a folder beside __init__.py
PART_LAYERS, TOP_LAYERS = 8, 6
PORTS = ("bus", "signals", "storage")
PART = Path(penstock.tracking.__file__).parent
STORE = PART / "store.py"
OTHERS = [file for file in sorted(PART.rglob("*.py")) if file not in (STORE, PART / "lease.py")]
DRIVERS = {"asyncpg", "psycopg", "pymysql", "aiomysql", "sqlalchemy"}
RUN = {"execute", "executemany", "fetch", "fetchrow", "fetchval", "prepare", "cursor"}
SQL = re.compile(r"\b(SELECT|INSERT INTO|UPDATE \w+ SET|DELETE FROM|LISTEN|NOTIFY)\b|\$\d|\w::[a-z]")


@pytest.mark.parametrize("file", [*sorted(ROOT.glob("app/*.py")), ROOT / "settings.py"], ids=lambda file: file.stem)
def test_programs_ask_parts_not_their_tables(file: Path) -> None:
    """T11: the composition root calls functions of the parts and contains no SQL of theirs."""
    assert re.findall(r"\bSQL\b", re.sub(r'"BAD_SQL"', "", file.read_text())) == []


def test_only_the_settings_lie_beside_the_parts() -> None:
    """The top level has the settings and the version; every other module belongs to a package."""
    assert {file.name for file in ROOT.glob("*.py")} == {"__init__.py", "settings.py"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_fits_a_screen(folder: Path) -> None:
    """A folder has at most 20 entries."""
    names = {entry.name for entry in folder.iterdir()} - {"__init__.py", "__pycache__"}
    assert len(names) <= WIDEST, sorted(names)


def test_a_module_is_a_noun() -> None:
    """No module is named by a gerund; tracking and mapping are nouns."""
    names = {entry.stem if entry.suffix else entry.name for entry in (*MODULES, *FOLDERS)}
    assert {name for name in names if name.endswith("ing")} - {"tracking", "mapping"} == set()


def test_a_test_file_names_its_module() -> None:
    """tests/<part>/<folder>/test_<module>[_<aspect>].py; other tests are scenarios, or of the page of the part."""
    files = [file for folder in ROOT.iterdir() for file in (PROJECT / "tests" / folder.name).rglob("test_*.py")]
    mirrors = [file for file in files if "scenarios" not in file.parts and file.name != "test_docs.py"]
    assert len(mirrors) > len(MODULES) // 3
    assert [str(file) for file in mirrors if not _names_a_module(file)] == []


def _names_a_module(test: Path) -> bool:
    folder = ROOT / test.parent.relative_to(PROJECT / "tests")
    names = {entry.stem for entry in folder.iterdir()} | {folder.name}
    subject = test.stem.removeprefix("test_")
    return any(subject == name or subject.startswith(f"{name}_") for name in names)


@pytest.mark.parametrize("part", ["tracking", "refdata", "ingest", "flows", "harvest"])
def test_a_part_has_the_same_modules(part: str) -> None:
    """Background work, periodic tasks, health and the HTTP API have the same names in all five parts."""
    expected = {
        "config.py",
        "contract.py",
        "model.py",
        "metrics.py",
        "runtime.py",
        "maintenance.py",
        "status.py",
        "api",
    }
    assert expected <= {entry.name for entry in (ROOT / part).iterdir()}


def test_layers_are_few() -> None:
    """The import contracts have at most 6 layers at the top and 8 inside a part."""
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {contract["name"]: contract for contract in contracts if contract["type"] == "layers"}
    assert len(layers["Imports go down only"]["layers"]) <= TOP_LAYERS
    assert {
        name: len(contract["layers"]) for name, contract in layers.items() if len(contract["layers"]) > PART_LAYERS
    } == {}
    assert all(contract["exhaustive"] for contract in layers.values())


def test_the_page_of_the_kernel_names_every_module() -> None:
    """docs/kernel.md states the purpose of every module of the kernel, and names no module that does not exist."""
    rows = re.findall(r"^\| (`.+?) \|", KERNEL_PAGE.read_text(), re.MULTILINE)
    named = [name.rstrip("/") for row in rows for name in re.findall(r"`(.+?)`", row)]
    assert sorted(named) == sorted(_kernel_modules())


def _kernel_modules() -> Iterator[str]:
    kernel = ROOT / "kernel"
    yield from PORTS
    for file in kernel.rglob("*.py"):
        path = file.relative_to(kernel)
        if file.stem != "__init__" and path.parts[0] not in PORTS:
            yield str(path.with_suffix(""))


@pytest.mark.parametrize("file", OTHERS, ids=lambda file: str(file.relative_to(PART)))
def test_only_the_store_speaks_the_dialect(file: Path) -> None:
    """T11: another database needs a store and its lease: nothing else has SQL, runs any, or knows a driver."""
    assert list(dialect_of(file.read_text())) == []


def test_the_store_speaks_it() -> None:
    """T11: else the look at all the others would have seen nothing."""
    assert {"asyncpg", "execute", "fetch", "fetchrow", "fetchval", "SELECT"} <= set(dialect_of(STORE.read_text()))


@pytest.mark.parametrize(
    "line",
    [
        "import asyncpg.exceptions",
        "from asyncpg import Record",
        "tx.fetchval(query)",
        "query = 'SELECT 1'",
        "query = f'UPDATE pipeline_tracking SET {column} = 1'",
        "condition = 'shard = ANY ($3)'",
        "today = 'now()::date, at::date'",
    ],
)
def test_dialect_is_seen(line: str) -> None:
    """T11: each of these, in the service or the API, would be in the way of another store."""
    assert list(dialect_of(line))


def dialect_of(source: str) -> Iterator[str]:
    """Drivers that are imported, calls that run statements, and what in a text is SQL."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from DRIVERS & {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            yield from DRIVERS & {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from RUN & {node.func.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (found[0] for found in SQL.finditer(node.value))
