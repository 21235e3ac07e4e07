"""The reference of what Penstock tells: messages, streams, and the moves the journal keeps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.generators.api import api_document, pods_document
from docs.generators.kinds import kind_of
from docs.generators.machines import MACHINES
from docs.generators.text import code, page, said, table

from penstock.kernel.machine import StateMachine
from penstock.kernel.states.event_stream import EVENT_STREAM

CONTRACTS = Path(__file__).parent.parent / "contracts"
Json = Mapping[str, Any]


def events() -> str:
    """Messages by channel, streams by route, moves by machine."""
    return page(
        "Events",
        "Delivery is at least once; what comes twice counts once. How that is meant is told in "
        "[concepts](../concepts.md).",
        "## Messages and signals",
        "Of refdata, as [AsyncAPI](../contracts/asyncapi.json) has them, with JSON Schemas of the "
        "[command](../contracts/refdata.command.schema.json) and the "
        "[invalidation](../contracts/refdata.invalidation.schema.json).",
        *_channels(_contract("asyncapi.json")),
        "## Streams over HTTP",
        "Server-sent events; a client that comes back with `Last-Event-ID` goes on where it was.",
        table(["", ""], [*_streams(api_document()), *_streams(pods_document())]),
        "## State machines",
        "Every move is kept in the journal, in the transaction that makes it: which machine, of what, from where to "
        "where, by whom, when, why, and under which fence. Histories and the streams above tell it on. An ingest "
        "without a database has the manifests of its runs instead.",
        *(_machine(name, alike) for name, alike in MACHINES.items()),
    )


def _contract(name: str) -> Json:
    document: Json = json.loads((CONTRACTS / name).read_text())
    return document


def _channels(document: Json) -> Iterator[str]:
    for name, channel in document["channels"].items():
        here = f"#/channels/{name}"
        does = [one for one in document["operations"].values() if one["channel"]["$ref"] == here]
        yield f"### {channel['address']}\n\n{said(channel['description'])}"
        rows = ((code(doe["tags"][0]["name"]), f"{doe['action']}s", said(doe["summary"])) for doe in does)
        yield table(["role", "", ""], rows)
        for message in channel["messages"].values():
            yield from _message(document["components"]["messages"][message["$ref"].rpartition("/")[2]])


def _message(message: Json) -> Iterator[str]:
    yield f"**{message['title']}.** {said(message.get('description'))}".rstrip()
    rows = [*_fields(message.get("headers", {}), "header "), *_fields(_whole(message.get("payload", {})))]
    yield table(["field", "kind", "", ""], rows)


def _whole(schema: Json) -> Json:
    """A schema with what it refers to, and what it asks for besides."""
    parts = [_contract(one["$ref"]) if "$ref" in one else one for one in schema.get("allOf", [schema])]
    required = [name for part in parts for name in part.get("required", [])]
    return {**parts[0], "required": required}


def _fields(schema: Json, kind: str = "") -> Iterator[tuple[str, str, str, str]]:
    for name, field in schema.get("properties", {}).items():
        is_required = "required" if name in schema.get("required", []) else ""
        yield kind + code(name), kind_of(field, schema.get("$defs", {})), is_required, said(field.get("description"))


def _streams(document: Json) -> Iterator[tuple[str, str]]:
    for path, methods in document["paths"].items():
        answer = methods.get("get", {}).get("responses", {}).get("200", {})
        kept = document["components"].get("responses", {}).get(answer.get("$ref", "").rpartition("/")[2], answer)
        if EVENT_STREAM in kept.get("content", {}):
            yield code(f"GET {path}"), said(methods["get"].get("description") or methods["get"].get("summary"))


def _machine(name: str, alike: Sequence[StateMachine[Any]]) -> str:
    machine = alike[0]
    names = ", ".join(code(one.name) for one in alike)
    moves = [
        (code(move.name), ", ".join(code(source.value) for source in move.sources), code(move.target.value))
        for move in machine.moves.values()
    ]
    finals = ", ".join(code(state.value) for state in machine.finals)
    return "\n\n".join(
        [
            f"### {name}",
            f"In the journal as {names}. It begins as {code(machine.initial.value)}"
            + (f"; final: {finals}." if finals else "; no state is final."),
            f"![How it moves](../images/machines/{name}.svg)",
            table(["move", "from", "to"], moves),
        ]
    )
