"""A file of items, read exactly, and cut into commands the bus can carry."""

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
from penstock.refdata.contract import Command, CommandItem, EventType, Op, chunk_items


def read_items(file: Path, key_column: str | None = None) -> list[CommandItem]:
    """The items in *file*: a JSON list of `{"key", "payload"}`, a JSON object, the same by lines, or CSV."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise NotFound("FILE_UNREADABLE", f"cannot read {file}: {error.strerror}", hint="check its name") from error
    try:
        return _items(file.suffix.lower(), content, key_column)
    except (msgspec.DecodeError, RecursionError, ValueError, csv.Error) as error:
        hint = 'a list of {"key": …, "payload": …}, an object by key, JSON lines (.jsonl), or .csv with --key'
        raise Invalid("FILE_MALFORMED", f"{file} cannot be read: {error}", hint=hint) from error


def _items(kind: str, content: bytes, key_column: str | None) -> list[CommandItem]:
    if not content.strip():
        raise ValueError("it is empty; [] says that there is nothing")
    if kind == ".csv":
        return _csv_items(content.decode("utf-8-sig"), key_column)
    if kind in (".jsonl", ".ndjson"):
        return [msgspec.json.decode(line, type=CommandItem) for line in content.split(b"\n") if line.strip()]
    if content.lstrip()[:1] != b"{":
        return msgspec.json.decode(content, type=list[CommandItem])
    found = msgspec.json.decode(content, type=dict[str, Raw])
    if len(found) < len(json.loads(content, object_pairs_hook=list)):
        raise ValueError("a key is in it twice")
    return [CommandItem(key, payload=payload) for key, payload in found.items()]


def _csv_items(text: str, key_column: str | None) -> list[CommandItem]:
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    if key_column is None or key_column not in (rows.fieldnames or []):
        hint = f"name one of its columns with --key: {', '.join(rows.fieldnames or [])}"
        raise Invalid("KEY_COLUMN_MISSING", "which column is the key?", hint=hint)
    items: list[CommandItem] = []
    for row in rows:
        if None in row or None in row.values():
            raise ValueError(f"line {rows.line_num} has not as many cells as the head")
        items.append(CommandItem(row[key_column], payload=Raw(msgspec.json.encode(row))))
    return items


def snapshot_commands(
    code: str, items: Sequence[CommandItem], snapshot_id: UUID, revision: int | None
) -> list[Command]:
    """The commands that make *items* all there is."""
    pieces = list(chunk_items(items))
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


def delta_commands(code: str, items: Sequence[CommandItem], revision: int | None) -> list[Command]:
    """The commands that put *items* beside what there is."""
    return [
        Command(dict_code=code, event_type=EventType.DELTA, items=piece, source_revision=revision)
        for piece in chunk_items(items)
    ]


def item(key: str, payload: str | None) -> CommandItem:
    """One item of the command line; without a payload its key is deleted."""
    if not is_storable(key):
        raise Invalid("KEY_MALFORMED", f"the key is no text: {key!r}", hint="give it in UTF-8")
    if payload is None:
        return CommandItem(key, Op.DELETE, UNSET)
    try:
        msgspec.json.decode(payload.encode(errors="surrogateescape"))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        hint = """quote it for the shell: '{"name": "Norway"}'"""
        raise Invalid("PAYLOAD_MALFORMED", f"the payload is not JSON: {error}", hint=hint) from error
    return CommandItem(key, Op.UPSERT, Raw(payload.encode()))
