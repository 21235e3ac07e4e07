"""Files of items, and their conversion into commands that fit into a message of the bus."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import msgspec
from msgspec import UNSET, Raw

from penstock.kernel.errors import Invalid, NotFound
from penstock.kernel.text import is_storable
from penstock.refdata.contract import Command, CommandItem, EventType, Op, split_items


def read_items(file: Path, key_column: str | None = None) -> list[CommandItem]:
    """Read the items in *file*: a JSON list of `{"key", "payload"}`, a JSON object by key, JSON lines, or CSV."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise NotFound(
            "FILE_UNREADABLE", f"cannot read {file}: {error.strerror}", hint="check its path and permissions"
        ) from error
    try:
        return _parse_items(file.suffix.lower(), content, key_column)
    except UnicodeDecodeError as error:
        hint = "convert it, e.g. `iconv -f windows-1251 -t utf-8`"
        problem = f"{file} is not UTF-8: see the byte at position {error.start}"
        raise Invalid("FILE_MALFORMED", problem, hint=hint) from error
    except (msgspec.DecodeError, RecursionError, ValueError, csv.Error) as error:
        hint = 'write a list of {"key": …, "payload": …}, an object by key, JSON lines (.jsonl), or .csv with --key'
        raise Invalid("FILE_MALFORMED", f"{file} is malformed: {error}", hint=hint) from error


def _parse_items(suffix: str, content: bytes, key_column: str | None) -> list[CommandItem]:
    if not content.strip():
        raise ValueError("the file is empty; write [] for no items")
    if suffix == ".csv":
        return _parse_csv(content.decode("utf-8-sig"), key_column)
    if suffix in (".jsonl", ".ndjson"):
        return [msgspec.json.decode(line, type=CommandItem) for line in content.split(b"\n") if line.strip()]
    if content.lstrip()[:1] != b"{":
        return msgspec.json.decode(content, type=list[CommandItem])
    payloads = msgspec.json.decode(content, type=dict[str, Raw])
    if len(payloads) < len(json.loads(content, object_pairs_hook=list)):
        raise ValueError("a key occurs twice")
    return [CommandItem(key, payload=payload) for key, payload in payloads.items()]


def _parse_csv(text: str, key_column: str | None) -> list[CommandItem]:
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    if key_column is None or key_column not in (rows.fieldnames or []):
        hint = f"name the column of the keys with --key; the columns are: {', '.join(rows.fieldnames or [])}"
        problem = "the column of the keys is not given" if key_column is None else f"there is no column {key_column!r}"
        raise Invalid("KEY_COLUMN_MISSING", problem, hint=hint)
    items: list[CommandItem] = []
    for row in rows:
        if None in row or None in row.values():
            raise ValueError(f"line {rows.line_num} has another number of cells than the header")
        items.append(CommandItem(row[key_column], payload=Raw(msgspec.json.encode(row))))
    return items


def make_snapshot_commands(
    code: str, items: Sequence[CommandItem], snapshot_id: UUID, revision: int | None
) -> list[Command]:
    """Return the commands that replace all items of a dictionary by *items*."""
    pieces = list(split_items(items))
    return [
        Command(
            dict_code=code,
            event_type=EventType.SNAPSHOT,
            items=piece,
            source_revision=revision,
            snapshot_id=snapshot_id,
            chunk_index=index,
            chunks_total=len(pieces),
        )
        for index, piece in enumerate(pieces, start=1)
    ]


def make_delta_commands(code: str, items: Sequence[CommandItem], revision: int | None) -> list[Command]:
    """Return the commands that insert, replace or delete *items* and leave all others unchanged."""
    return [
        Command(dict_code=code, event_type=EventType.DELTA, items=piece, source_revision=revision)
        for piece in split_items(items)
    ]


def make_item(key: str, payload: str | None) -> CommandItem:
    """Return an item of the command line; without a payload it deletes its key."""
    if not is_storable(key):
        raise Invalid(
            "KEY_MALFORMED",
            f"the key is not valid text: {key!r}",
            hint="encode the key as UTF-8, without control characters",
        )
    if payload is None:
        return CommandItem(key, Op.DELETE, UNSET)
    try:
        msgspec.json.decode(payload.encode(errors="surrogateescape"))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        hint = """quote the JSON for the shell: '{"name": "Norway"}'"""
        raise Invalid("PAYLOAD_MALFORMED", f"the payload is not JSON: {error}", hint=hint) from error
    return CommandItem(key, Op.UPSERT, Raw(payload.encode()))
