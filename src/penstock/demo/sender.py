"""The last stage of the demo's pipeline: rows go to SQLite instead of MySQL, each exactly once."""

import sqlite3
from contextlib import closing
from pathlib import Path

from penstock.demo.event_files import read_rows

_TABLES = """
    CREATE TABLE IF NOT EXISTS event (
        event_id TEXT PRIMARY KEY, user_id TEXT, kind TEXT, amount_cents INTEGER, at TEXT
    );
    CREATE TABLE IF NOT EXISTS sent_file (filename TEXT, shard INTEGER, PRIMARY KEY (filename, shard));
"""


def send_shard(folder: Path, name: str, shard: int) -> None:
    """Write the rows of a shard and a ledger entry in one transaction; a shard in the ledger is not written again."""
    rows = read_rows(folder, name, shard)
    with closing(sqlite3.connect(_make_database_path(folder, shard))) as database, database:
        database.executescript(_TABLES)
        ledger = "INSERT OR IGNORE INTO sent_file (filename, shard) VALUES (?, ?)"
        if database.execute(ledger, (name, shard)).rowcount:
            database.executemany("INSERT INTO event VALUES (:event_id, :user_id, :kind, :amount_cents, :at)", rows)


def list_sent_events(folder: Path, shards: int) -> list[str]:
    """Return the ids of the events in all shards, sorted; an event that was sent twice occurs twice."""
    ids: list[str] = []
    for shard in range(shards):
        with closing(sqlite3.connect(_make_database_path(folder, shard))) as database:
            ids += [name for (name,) in database.execute("SELECT event_id FROM event")]
    return sorted(ids)


def _make_database_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard}.db"
