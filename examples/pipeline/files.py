"""Where a stage finds what the one before it left, and how a file comes into being: whole or not at all."""

import os
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4


def ingested_file(folder: Path, name: str) -> Path:
    """All events of a file, as event-ingest leaves them."""
    return folder / f"{name}.event-ingest.txt"


def events_file(folder: Path, name: str, shard: int) -> Path:
    """Return the path of the events of a shard, which shard-splitter writes."""
    return folder / f"{name}.shard-{shard}.jsonl"


def rows_file(folder: Path, name: str, shard: int) -> Path:
    """Return the path of the rows of a shard, which shard-worker writes."""
    return folder / f"{name}.shard-{shard}.rows.jsonl"


def write_whole(path: Path, lines: Iterable[bytes]) -> None:
    """Let *path* appear with all *lines*, safe on disk, or not at all; writing it again replaces it."""
    # A name of its own: a worker whose lease ran out may still be writing the same file.
    draft = path.with_name(f".{uuid4().hex}.tmp")
    try:
        with draft.open("xb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Sync the new name too: `done` is reported after this, and must stay true after a power failure."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
