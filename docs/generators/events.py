"""Generate the reference of messages, streams and state machines."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.generators.api import api_document, pods_document
from docs.generators.kinds import kind_of
from docs.generators.machines import MACHINES
from docs.generators.text import code, describe, page, table

from penstock.kernel.machine import StateMachine
from penstock.kernel.states.event_stream import EVENT_STREAM

CONTRACTS = Path(__file__).parent.parent / "contracts"
Json = Mapping[str, Any]


def events() -> str:
    """Return the page: messages by channel, streams by route, moves by machine."""
    return page(
        "Events",
        "Messages are delivered at least once; a repeated message has no further effect. [Concepts](../concepts.md) "
        "explains "
        "the guarantee.",
        "## Messages and signals",
        "Messages of refdata. The contracts are an [AsyncAPI](../contracts/asyncapi.json) document and JSON Schemas "
        "of the "
        "[command](../contracts/refdata.command.schema.json) and the "
        "[invalidation](../contracts/refdata.invalidation.schema.json).",
        *_channels(_contract("asyncapi.json")),
        "## Streams over HTTP",
        "Server-sent events. A client that reconnects with `Last-Event-ID` continues after the last event it received.",
        table(["route", "events"], [*_streams(api_document()), *_streams(pods_document())]),
        "## State machines",
        "Every change of state (move) is written to the journal in its transaction: machine, subject, old state, new "
        "state, "
        "actor, time, reason and fence. Histories and the streams above contain the same entries. Ingest without a "
        "database "
        "stores the manifests of its runs instead.",
        *(_machine(name, machines) for name, machines in MACHINES.items()),
    )


def _contract(name: str) -> Json:
    document: Json = json.loads((CONTRACTS / name).read_text())
    return document


def _channels(document: Json) -> Iterator[str]:
    for name, channel in document["channels"].items():
        here = f"#/channels/{name}"
        operations = [item for item in document["operations"].values() if item["channel"]["$ref"] == here]
        yield f"### {channel['address']}\n\n{describe(channel['description'])}"
        rows = ((code(item["tags"][0]["name"]), f"{item['action']}s", describe(item["summary"])) for item in operations)
        yield table(["role", "action", "purpose"], rows)
        for message in channel["messages"].values():
            yield from _message(document["components"]["messages"][message["$ref"].rpartition("/")[2]])


def _message(message: Json) -> Iterator[str]:
    yield f"**{message['title']}.** {describe(message.get('description'))}".rstrip()
    rows = [*_fields(message.get("headers", {}), "header "), *_fields(_whole(message.get("payload", {})))]
    yield table(["field", "type", "presence", "description"], rows)


def _whole(schema: Json) -> Json:
    """Return the schema with its references resolved and all required fields."""
    parts = [_contract(part["$ref"]) if "$ref" in part else part for part in schema.get("allOf", [schema])]
    required = [name for part in parts for name in part.get("required", [])]
    return {**parts[0], "required": required}


def _fields(schema: Json, kind: str = "") -> Iterator[tuple[str, str, str, str]]:
    for name, field in schema.get("properties", {}).items():
        is_required = "required" if name in schema.get("required", []) else ""
        yield (
            kind + code(name),
            kind_of(field, schema.get("$defs", {})),
            is_required,
            describe(field.get("description")),
        )


def _streams(document: Json) -> Iterator[tuple[str, str]]:
    for path, methods in document["paths"].items():
        answer = methods.get("get", {}).get("responses", {}).get("200", {})
        response = document["components"].get("responses", {}).get(answer.get("$ref", "").rpartition("/")[2], answer)
        if EVENT_STREAM in response.get("content", {}):
            yield code(f"GET {path}"), describe(methods["get"].get("description") or methods["get"].get("summary"))


def _machine(name: str, machines: Sequence[StateMachine[Any]]) -> str:
    machine = machines[0]
    names = ", ".join(code(alias.name) for alias in machines)
    moves = [
        (code(move.name), ", ".join(code(source.value) for source in move.sources), code(move.target.value))
        for move in machine.moves.values()
    ]
    finals = ", ".join(code(state.value) for state in machine.finals)
    return "\n\n".join(
        [
            f"### {name}",
            f"Name in the journal: {names}. Initial state: {code(machine.initial.value)}. "
            + (f"Final states: {finals}." if finals else "No state is final."),
            f"![State machine](../images/machines/{name}.svg)",
            table(["move", "from", "to"], moves),
        ]
    )
