"""The events of the demo, and the files that the stages of its pipeline pass on."""

import json
import random
import zlib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

Json = dict[str, Any]


def make_events(count: int) -> list[Json]:
    """Return *count* events, the same each time."""
    chance = random.Random(3)  # noqa: S311 - sample data
    return [
        {
            "event_id": f"e-{number:04d}",
            "user_id": f"u-{chance.randrange(200)}",
            "kind": chance.choice(["order", "refund", "visit"]),
            "amount_cents": chance.randrange(50_000),
            "at": f"2026-11-17T0{chance.randrange(6)}:{chance.randrange(60):02d}:00+03:00",
        }
        for number in range(count)
    ]


def write_documents(path: Path, documents: Iterable[Json]) -> None:
    """Write *documents* to *path*, a line each, whole or not at all: a process may be killed at any point."""
    draft = path.with_name(f".{uuid4().hex}.tmp")
    draft.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    draft.replace(path)


def copy_events(raw: Path, folder: Path) -> None:
    """Write the events of a raw file, as event-ingest leaves them."""
    write_documents(_make_ingested_path(folder, raw.stem), _read_documents(raw))


def split_shard(folder: Path, name: str, shard: int, shards: int) -> None:
    """Write the events of one shard, as shard-splitter leaves them."""
    events = _read_documents(_make_ingested_path(folder, name))
    # crc32 is the same in every process; hash() is not.
    ours = [event for event in events if zlib.crc32(event["user_id"].encode()) % shards == shard]
    write_documents(_make_events_path(folder, name, shard), ours)


def make_rows(folder: Path, name: str, shard: int) -> None:
    """Write the rows of one shard, with times in UTC, as shard-worker leaves them."""
    events = _read_documents(_make_events_path(folder, name, shard))
    rows = ({**event, "at": datetime.fromisoformat(event["at"]).astimezone(UTC).isoformat()} for event in events)
    write_documents(_make_rows_path(folder, name, shard), rows)


def read_rows(folder: Path, name: str, shard: int) -> list[Json]:
    """Return the rows of one shard."""
    return _read_documents(_make_rows_path(folder, name, shard))


def _read_documents(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _make_ingested_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.jsonl"


def _make_events_path(folder: Path, name: str, shard: int) -> Path:
    return folder / f"{name}.shard-{shard}.jsonl"


def _make_rows_path(folder: Path, name: str, shard: int) -> Path:
    return folder / f"{name}.shard-{shard}.rows.jsonl"
