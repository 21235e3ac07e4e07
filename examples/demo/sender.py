"""mysql-sender without MySQL: a shard's database is a file of SQLite; each row arrives exactly once all the same."""

import sqlite3
from contextlib import closing
from pathlib import Path

from examples.pipeline.events import read_rows
from examples.pipeline.files import rows_file

from penstock.tracking.sdk import Item

_TABLES = """
    CREATE TABLE IF NOT EXISTS event (
        event_id TEXT PRIMARY KEY, user_id TEXT, kind TEXT, amount_cents INTEGER, at TEXT
    );
    CREATE TABLE IF NOT EXISTS sent_file (filename TEXT, shard INTEGER, PRIMARY KEY (filename, shard));
"""


def send(item: Item, folder: Path) -> None:
    """Keep the rows of a shard and a line in the ledger, both or neither; a shard in the ledger was sent before."""
    rows = read_rows(rows_file(folder, item.filename, item.shard))
    with closing(sqlite3.connect(_database(folder, item.shard))) as database, database:
        database.executescript(_TABLES)
        ledger = "INSERT OR IGNORE INTO sent_file (filename, shard) VALUES (?, ?)"
        if database.execute(ledger, (item.filename, item.shard)).rowcount:
            database.executemany("INSERT INTO event VALUES (:event_id, :user_id, :kind, :amount_cents, :at)", rows)


def arrived(folder: Path, shards: int) -> list[str]:
    """The ids of all events in all shards, as often as they are there."""
    found: list[str] = []
    for shard in range(shards):
        with closing(sqlite3.connect(_database(folder, shard))) as database:
            found += [name for (name,) in database.execute("SELECT event_id FROM event")]
    return sorted(found)


def _database(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard}.db"
