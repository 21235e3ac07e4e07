"""What is bound to PostgreSQL, and where it is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock.tracking

PART = Path(penstock.tracking.__file__).parent
STORE = PART / "store.py"
OTHERS = [file for file in sorted(PART.rglob("*.py")) if file not in (STORE, PART / "lease.py")]
DRIVERS = {"asyncpg", "psycopg", "pymysql", "aiomysql", "sqlalchemy"}
RUN = {"execute", "executemany", "fetch", "fetchrow", "fetchval", "prepare", "cursor"}
SQL = re.compile(r"\b(SELECT|INSERT INTO|UPDATE \w+ SET|DELETE FROM|LISTEN|NOTIFY)\b|\$\d|\w::[a-z]")


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
            yield from DRIVERS & {one.name.split(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            yield from DRIVERS & {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from RUN & {node.func.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (found[0] for found in SQL.finditer(node.value))
