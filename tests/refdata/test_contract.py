"""R27: the published contracts describe the real messages."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker

from penstock.kernel.bus import BusMessage
from penstock.kernel.bus.kafka.dead_letters import name_dead_letter_topic
from penstock.kernel.errors import PenstockError
from penstock.kernel.signals import Resync
from penstock.kernel.signals.redis.group import BODY
from penstock.kernel.telemetry.telemetry import TRACEPARENT
from penstock.refdata import contract
from penstock.refdata.config import KEY_TEMPLATE, RefdataSection
from penstock.refdata.contract import (
    COMMAND_LIMIT,
    INVALIDATIONS,
    ITEM_LIMIT,
    Command,
    CommandItem,
    EventType,
    decode_command,
    encode_command,
    make_message_key,
    split_items,
)
from penstock.refdata.model import MAX_SENT_KEYS
from tests.refdata.harness import RefdataHarness, chunk, command, delete, heard, on_bus, published, upsert
from tests.support.types import Json

ROOT = Path(__file__).parent.parent.parent
CONTRACTS = ROOT / "docs" / "contracts"
COMMAND_FILE, INVALIDATION_FILE = "refdata.command.schema.json", "refdata.invalidation.schema.json"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def document(name: str) -> Json:
    found: Json = json.loads((CONTRACTS / name).read_text())
    return found


COMMAND = Draft202012Validator(document(COMMAND_FILE), format_checker=FormatChecker(["uuid"]))
INVALIDATION = Draft202012Validator(document(INVALIDATION_FILE), format_checker=FormatChecker(["uuid"]))
ASYNCAPI = document("asyncapi.json")


@pytest.mark.full
def test_the_contracts_are_what_the_code_says(tmp_path: Path) -> None:
    """R27: docs/contracts is the output of its generator."""
    subprocess.run([sys.executable, ROOT / "scripts" / "contracts", tmp_path], check=True, timeout=60)
    made, kept = ({file.name: file.read_text() for file in folder.iterdir()} for folder in (tmp_path, CONTRACTS))
    assert made == kept, "docs/contracts is out of date: run `.venv/bin/python scripts/contracts`"


@pytest.mark.parametrize("name", [COMMAND_FILE, INVALIDATION_FILE])
def test_a_schema_is_one(name: str) -> None:
    """R27: the schemas are valid in their JSON Schema dialect and in that of AsyncAPI; each has its own name."""
    schema = document(name)
    Draft202012Validator.check_schema(schema)
    Draft7Validator.check_schema(schema)
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert schema["$id"].startswith("urn:penstock:refdata:")
    assert schema["title"]


SENT = {
    "a delta": command("LOOSE", upsert("a", {"n": 1.50}), delete("b"), sourceRevision=7, chunkIndex=1, chunksTotal=1),
    "a snapshot": command("LOOSE", upsert("a", [None]), event_type="SNAPSHOT", occurredAt="2026-02-27T12:00:00+03:00"),
    "a chunk": chunk("LOOSE", uuid4(), 2, 3, upsert("ключ", "значение"), eventId=str(uuid4())),
    "nothing": command("LOOSE"),
}


async def test_commands_on_the_bus_are_as_published(harness: RefdataHarness) -> None:
    """R9, R27: messages of the API are valid under the schema, with key and headers as in AsyncAPI."""
    for body in SENT.values():
        await harness.refdata.submit("acme", decode_command(body))
    messages = [message async for message in published(harness, len(SENT))]
    for message in messages:
        document = json.loads(message.value)
        assert list(COMMAND.iter_errors(document)) == []
        assert list(payload_of("command").iter_errors(document)) == []
        assert (
            message.key
            == KEY_TEMPLATE.format(**document)
            == make_message_key(document["tenantId"], document["dictCode"])
        )
    declared = ASYNCAPI["components"]["messages"]["command"]
    assert {name for message in messages for name in message.headers} <= set(declared["headers"]["properties"])


async def test_announcements_are_as_published(harness: RefdataHarness) -> None:
    """R15, R27: announcements are valid under the schema, with keys, without keys, and with a trace."""
    async with harness.platform.signals.listen("contracts") as feed:
        assert isinstance(await anext(feed), Resync)
        value, key = on_bus(command("LOOSE", upsert("a", 1), delete("b")))
        await harness.bus.publish([BusMessage(harness.topic, key, value, {TRACEPARENT: TRACE})])
        await harness.send("LOOSE", *(upsert(f"k{number}", number) for number in range(MAX_SENT_KEYS + 1)))
        await harness.apply()
        assert await harness.relay() == 2
        invalidations = [json.loads(item.body) async for item in heard(feed, 2)]
    for invalidation in invalidations:
        assert list(INVALIDATION.iter_errors(invalidation)) == []
    assert [invalidation.get("keys") for invalidation in invalidations] == [["a", "b"], None]
    assert [invalidation.get("traceparent") for invalidation in invalidations] == [TRACE, None]
    known = set(document(INVALIDATION_FILE)["properties"])
    assert [set(invalidation) - known for invalidation in invalidations] == [set(), set()]


WRONG_COMMANDS = {
    "no items": {"items": ...},
    "no dictionary": {"dictCode": ...},
    "an unknown field": {"colour": "red"},
    "another type of event": {"eventType": "MERGE"},
    "a name with a colon": {"dictCode": "A:B"},
    "a name with a line break": {"dictCode": "A\n"},
    "an empty key": {"items": [upsert("", 1)]},
    "a long key": {"items": [upsert("k" * (contract.KEY_LIMIT + 1), 1)]},
    "another operation": {"items": [{"key": "a", "op": "PATCH", "payload": 1}]},
    "an unknown field of an item": {"items": [{**upsert("a", 1), "colour": "red"}]},
    "an id that is none": {"eventId": "seven"},
    "chunk nought": {"chunkIndex": 0},
    "a revision out of range": {"sourceRevision": 2**63},
    "a text for a number": {"sourceRevision": "7"},
    "a list": None,
}


@pytest.mark.parametrize("change", WRONG_COMMANDS.values(), ids=WRONG_COMMANDS)
def test_wrong_commands_are_wrong_to_both(change: Json | None) -> None:
    """R8, R27: the schema rejects exactly the commands that the API rejects."""
    document = changed(json.loads(SENT["a delta"]), change)
    assert not COMMAND.is_valid(document)
    with pytest.raises(PenstockError):
        decode_command(json.dumps(document).encode())


WRONG_INVALIDATIONS = {
    "no version": {"version": ...},
    "a version below nothing": {"version": -1},
    "no tenant": {"tenantId": ...},
    "a tenant with a colon": {"tenantId": "a:b"},
    "an id that is none": {"eventId": "seven"},
    "keys that are none": {"keys": [1]},
    "a list": None,
}


@pytest.mark.parametrize("change", WRONG_INVALIDATIONS.values(), ids=WRONG_INVALIDATIONS)
def test_wrong_announcements_are_wrong_to_both(change: Json | None) -> None:
    """R15, R27: a pod rejects what the schema rejects, and ignores unknown fields."""
    document = {
        "eventId": str(uuid4()),
        "tenantId": "a",
        "dictCode": "B",
        "version": 1,
        "committedAt": "2026-02-27T12:00:01Z",
    }
    for right in (document, {**document, "toCome": True}):
        assert INVALIDATION.is_valid(right)
        assert INVALIDATIONS.decode(json.dumps(right)).version == 1
    wrong = changed(document, change)
    assert not INVALIDATION.is_valid(wrong)
    with pytest.raises(ValueError):
        INVALIDATIONS.decode(json.dumps(wrong))


def changed(document: Json, change: Json | None) -> Any:
    """Return *document* with changed or removed fields; with None, a list."""
    if change is None:
        return [document]
    return {name: value for name, value in {**document, **change}.items() if value is not ...}


JSON_VALUES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner | st.none(), max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
IDS = st.uuids().flatmap(lambda value: st.sampled_from([str(value), value.hex, str(value).upper()]))
KEYS = st.sampled_from(["a", "b/ö", "k" * 512, "ö" * 512, "🦊"])
ITEMS = (
    st.builds(upsert, KEYS, JSON_VALUES)
    | st.builds(delete, KEYS)
    | st.fixed_dictionaries({"key": KEYS, "payload": JSON_VALUES})
)
DELTAS = st.fixed_dictionaries({"eventType": st.just("DELTA"), "items": st.lists(ITEMS, max_size=3)})
SNAPSHOTS = st.builds(
    lambda items: {"eventType": "SNAPSHOT", "items": [upsert(key, payload) for key, payload in items.items()]},
    st.dictionaries(KEYS, JSON_VALUES, max_size=3),
)
CHUNKS = st.builds(
    lambda document, place, snapshot_id: {**document, **place, "snapshotId": snapshot_id},
    SNAPSHOTS,
    st.sampled_from([{"chunkIndex": index, "chunksTotal": 10_000} for index in (1, 2, 10_000)]),
    IDS,
)
ABOUT = st.fixed_dictionaries(
    {"dictCode": st.sampled_from(["A", "a.b-c_1", "x" * 128])},
    optional={
        "eventId": IDS | st.none(),
        "tenantId": st.sampled_from(["acme", None]),
        "source": st.sampled_from(["REST", "KAFKA", None]),
        "sourceRevision": st.sampled_from([0, -(2**63) + 1, 2**63 - 1, None]),
        "occurredAt": st.sampled_from(["2026-02-27T12:00:00Z", "2026-02-27T12:00:00.5+03:00", None]),
        "allowRowDrop": st.booleans(),
    },
)
# One field of another kind, at an edge, or unknown.
FIELDS = [*document(COMMAND_FILE)["properties"], "colour"]
EDGES: st.SearchStrategy[Any] = st.sampled_from(
    ["", "-a", "x" * 129, "A\n", "ä", 0, -1, 1.5, 10_001, 2**63, True, None, [], {}, [{}], [upsert("", 1)]]
)
CHANGES = st.one_of(st.just({}), st.dictionaries(st.sampled_from(FIELDS), EDGES, min_size=1, max_size=1))
COMMANDS = st.builds(
    lambda *parts: {k: v for part in parts for k, v in part.items()}, ABOUT, DELTAS | SNAPSHOTS | CHUNKS, CHANGES
)


@given(COMMANDS)
def test_every_accepted_command_is_valid(body: Json) -> None:
    """R27: every accepted command is valid under the schema in both dialects, also after it was completed."""
    schema = {name: value for name, value in document(COMMAND_FILE).items() if name != "$schema"}
    # Formats are not checked here: more spellings of an id are accepted than the format allows.
    valid = Draft202012Validator(schema).is_valid(body)
    assert Draft7Validator(schema).is_valid(body) == valid
    try:
        taken = decode_command(json.dumps(body).encode())
    except PenstockError:
        return
    assert valid
    assert COMMAND.is_valid(json.loads(encode_command(taken)))


def test_every_reference_of_asyncapi_leads_somewhere() -> None:
    """R27: all references of the document are in it or beside it."""
    found = list(references(ASYNCAPI))
    assert len(found) > 20
    for reference in found:
        file, _, place = reference.partition("#")
        part: Any = document(file) if file else ASYNCAPI
        for name in filter(None, place.split("/")):
            part = part[name]
        assert part


def test_asyncapi_is_of_the_defaults() -> None:
    """R9, R15, R27: its addresses are those of an empty configuration, its operations those of the roles."""
    assert ASYNCAPI["asyncapi"] == "3.0.0"
    section = RefdataSection()
    assert {name: channel["address"] for name, channel in ASYNCAPI["channels"].items()} == {
        "commands": section.kafka.commands_topic,
        "deadCommands": name_dead_letter_topic(section.kafka.commands_topic),
        "invalidations": section.redis.pub_channel,
        "invalidationStream": section.redis.stream_key,
        "changes": f"{contract.PREFIX}/{{tenantId}}/dictionaries/{{dictCode}}/changes",
    }
    key = ASYNCAPI["components"]["messages"]["command"]["bindings"]["kafka"]["key"]
    assert section.kafka.key_template in key["description"]
    roles = {
        (operation["tags"][0]["name"], operation["action"], operation["channel"]["$ref"])
        for operation in ASYNCAPI["operations"].values()
    }
    assert {(role, action, channel.rpartition("/")[2]) for role, action, channel in roles} == {
        ("command-api", "send", "commands"),
        ("kafka-adapter", "send", "commands"),
        ("apply", "send", "commands"),
        ("apply", "receive", "commands"),
        ("apply", "send", "deadCommands"),
        ("relay", "send", "invalidations"),
        ("relay", "send", "invalidationStream"),
        ("query-api", "receive", "invalidations"),
        ("query-api", "receive", "invalidationStream"),
        ("query-api", "send", "changes"),
    }


def test_an_entry_of_the_stream_has_a_body() -> None:
    """R15, R27: an entry of the stream is an invalidation in one field."""
    entry = payload_of("invalidationEntry")
    assert entry.is_valid({BODY: "{}"})
    assert not entry.is_valid({})
    assert ASYNCAPI["components"]["messages"]["invalidationEntry"]["payload"]["properties"][BODY]["contentSchema"]


def test_on_the_bus_a_command_names_its_tenant() -> None:
    """R9, R27: with REST the path names the tenant; on the bus the command does."""
    document = json.loads(SENT["a delta"])
    assert COMMAND.is_valid(document)
    assert not payload_of("command").is_valid(document)
    assert not payload_of("command").is_valid({**document, "tenantId": None})
    assert payload_of("command").is_valid({**document, "tenantId": "acme"})


@given(
    st.lists(
        st.builds(
            lambda key, text: CommandItem(key, payload=msgspec.Raw(msgspec.json.encode(text))),
            st.text(min_size=1, max_size=5),
            st.integers(0, 500_000).map("x".__mul__),
        ),
        max_size=9,
    )
)
def test_chunks_fit_into_commands(items: list[CommandItem]) -> None:
    """R13: the chunks contain every item once and in order, and each fits into one command; there is at least one."""
    chunks = list(split_items(items))
    assert [item for chunk in chunks for item in chunk] == items
    assert len(chunks) == 1 or all(chunks)
    commands = [Command(dict_code="C" * 128, event_type=EventType.SNAPSHOT, items=chunk) for chunk in chunks]
    assert all(len(encode_command(command)) <= COMMAND_LIMIT for command in commands)


def test_a_chunk_has_no_more_items_than_a_command() -> None:
    """R13: small items are split by their number."""
    sizes = [len(chunk) for chunk in split_items([CommandItem("k", payload=msgspec.Raw(b"1"))] * (2 * ITEM_LIMIT + 1))]
    assert sizes == [ITEM_LIMIT, ITEM_LIMIT, 1]


def payload_of(message: str) -> Draft202012Validator:
    """Return the validator of the payload of a message, with the files that it refers to."""
    return Draft202012Validator(whole(ASYNCAPI["components"]["messages"][message]["payload"]))


def whole(part: Any) -> Any:
    """Return *part* with its references replaced by the referenced files."""
    if isinstance(part, dict):
        if part.get("$ref", "").startswith("./"):
            return {name: value for name, value in document(part["$ref"]).items() if not name.startswith("$")}
        return {name: whole(inner) for name, inner in part.items()}
    return [whole(inner) for inner in part] if isinstance(part, list) else part


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from references(inner)
