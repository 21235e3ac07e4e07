"""R10: messages of external topics become commands, on both buses; invalid ones become dead letters with the reason."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from confluent_kafka import Producer

from penstock.kernel.bus import BusDelivery, BusMessage
from penstock.kernel.errors import PenstockError
from penstock.refdata.commands.external_topics import TopicMapping
from penstock.refdata.config import CommandsSection, ExternalTopicSection
from penstock.refdata.contract import UpdateState
from penstock.refdata.model import CommandEvent
from penstock.refdata.runtime import run_adapter
from penstock.settings import Settings
from tests.refdata.harness import RefdataHarness, create_schemas, opened, refdata_settings, upsert
from tests.services.kafka import Kafka
from tests.support.types import Json

PLAIN: Json = {"tenantId": "=acme", "dictCode": "=LOOSE"}
COMMANDS: Json = {
    "tenantId": "/tenantId",
    "dictCode": "/dictCode",
    "eventType": "/eventType",
    "eventId": "/eventId",
    "sourceRevision": "/sourceRevision",
    "occurredAt": "/occurredAt",
    "snapshotId": "/snapshotId",
    "chunkIndex": "/chunkIndex",
    "chunksTotal": "/chunksTotal",
    "items": "/items",
    "key": "/key",
    "op": "/op",
    "payload": "/payload",
}
CHANGES: Json = {
    "tenantId": "header:tenant",
    "dictCode": "/meta/dict~1code",
    "sourceRevision": "header:revision",
    "items": "/rows",
    "key": "/ids/1",
    "op": "/m~0e/op",
    "payload": "/after",
    "deletes": ["gone", "0"],
}


def delivery(value: bytes, key: str = "k", headers: Mapping[str, str] | None = None, position: int = 7) -> BusDelivery:
    return BusDelivery(BusMessage("theirs", key, value, headers or {}), 1, 3, position, 1)


def mapped(value: bytes | Any, how: Mapping[str, Any] = PLAIN, key: str = "k", **headers: str) -> CommandEvent:
    """Return the event of a message."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return TopicMapping(ExternalTopicSection(topic="theirs", **how)).map_message(delivery(body, key, headers))


def refusal(value: bytes | Any, how: Mapping[str, Any] = PLAIN, key: str = "k", **headers: str) -> str:
    with pytest.raises(PenstockError) as caught:
        mapped(value, how, key, **headers)
    return f"{caught.value.code}: {caught.value.message}"


def items(event: CommandEvent) -> list[tuple[str, str, str]]:
    return [(item.key, item.op.value, item.text) for item in event.command.items]


def test_the_message_is_the_payload_and_its_key_the_key() -> None:
    """R10: with only a tenant and a dictionary, a message is an upsert of its value under its key."""
    event = mapped(b' {"name": "Norway", "n": [1, null]} ', key="NO")
    assert (event.target, event.source) == (("acme", "LOOSE"), "KAFKA")
    assert (event.command.event_type, event.command.tenant_id) == ("DELTA", "acme")
    assert items(event) == [("NO", "UPSERT", '{"name":"Norway","n":[1,null]}')]


def test_fields_come_from_where_the_mapping_says() -> None:
    """R10: constants, pointers with ~0 and ~1 and into lists, headers, lists of items, and values of op that delete."""
    rows = [
        {"ids": [0, "a"], "m~e": {"op": "put"}, "after": {"x": 1}},
        {"ids": [0, "b"], "m~e": {"op": "gone"}},
        {"ids": [0, 12], "m~e": {"op": 0}, "after": None},
        {"ids": [0, "c"], "after": "text"},
    ]
    event = mapped({"meta": {"dict/code": "LOOSE"}, "rows": rows}, CHANGES, tenant="globex", revision="-12")
    assert event.target == ("globex", "LOOSE")
    assert event.command.source_revision == -12
    assert items(event) == [
        ("a", "UPSERT", '{"x":1}'),
        ("b", "DELETE", "null"),
        ("12", "DELETE", "null"),
        ("c", "UPSERT", '"text"'),
    ]


def test_a_message_without_a_value_deletes() -> None:
    """R10: a message without a value is a deletion, as in compacted topics."""
    assert items(mapped(b"", key="NO")) == [("NO", "DELETE", "null")]


def test_a_command_keeps_what_it_says() -> None:
    """R10: a message in the form of §8.1 becomes that command, with its id."""
    document: Json = {
        "eventId": str(uuid4()),
        "tenantId": "tenant-a",
        "dictCode": "COUNTRY",
        "eventType": "SNAPSHOT",
        "sourceRevision": 987654321,
        "snapshotId": str(uuid4()),
        "chunkIndex": 2,
        "chunksTotal": 3,
        "occurredAt": "2026-02-27T12:00:00Z",
        "items": [{"key": "RU", "op": "UPSERT", "payload": {"name": "Russia"}}],
    }
    event = mapped(document, COMMANDS)
    command = event.command
    assert (event.target, str(event.event_id)) == (("tenant-a", "COUNTRY"), document["eventId"])
    assert (command.event_type, command.source_revision, str(command.snapshot_id)) == (
        "SNAPSHOT",
        987654321,
        document["snapshotId"],
    )
    assert (command.chunk_index, command.chunks_total) == (2, 3)
    assert command.occurred_at == datetime(2026, 2, 27, 12, tzinfo=UTC)
    assert items(event) == [("RU", "UPSERT", '{"name":"Russia"}')]


def test_an_id_that_is_missing_is_made_from_the_place() -> None:
    """R10: the id is a UUIDv5 of topic, partition and offset: the same at each delivery, different for each message."""
    section = TopicMapping(ExternalTopicSection(topic="theirs", **PLAIN))
    ids = [section.map_message(delivery(b"1", position=position)).event_id for position in (7, 7, 8)]
    assert ids[0] == ids[1] != ids[2]
    assert ids[0].version == 5
    assert mapped({"eventId": None, **upsert("a", 1)}, {**PLAIN, "eventId": "/eventId"}).event_id == ids[0]


@pytest.mark.parametrize(
    "digits", ["1.10", "123456789012345678901234567890", "0.12345678901234567890123", "-0.0", "1e400", "1E-7"]
)
def test_no_digit_is_lost(digits: str) -> None:
    """R10: numbers keep all digits, at any depth and as keys."""
    ((_, _, text),) = items(mapped(f'{{"n": [{digits}]}}'.encode()))
    found = text.removeprefix('{"n":[').removesuffix("]}")
    assert (Decimal(found), len(found.rstrip("eE+0123456789"))) == (
        Decimal(digits),
        len(digits.rstrip("eE+0123456789")),
    )
    assert Decimal(found).as_tuple() == Decimal(digits).as_tuple()
    ((key, _, _),) = items(mapped(f'{{"id": {digits}}}'.encode(), {**PLAIN, "key": "/id"}))
    assert Decimal(key).as_tuple() == Decimal(digits).as_tuple()


@pytest.mark.parametrize(
    ("value", "how", "key", "problem"),
    [
        (b"{", PLAIN, "k", "MALFORMED: the message is not JSON"),
        (b"\xff", PLAIN, "k", "MALFORMED: the message is not JSON"),
        (b'"\\ud800"', PLAIN, "k", "MALFORMED: the message is not JSON"),
        (b"[" * 100_000, PLAIN, "k", "MALFORMED: the message is not JSON"),
        (b"9" * 5_000, PLAIN, "k", "MALFORMED: the message is not JSON"),
        (b'"' + b"x" * 880_001 + b'"', PLAIN, "k", "COMMAND_TOO_LARGE"),
        (b"[" + b"[0]," * 20_000 + b"[0]]", {**PLAIN, "items": "/", "key": "/0"}, "k", "MALFORMED: Expected `array`"),
        (b"null", PLAIN, "k", "MALFORMED: an UPSERT needs a payload"),
        (b'"a\\u0000"', PLAIN, "k", "MALFORMED: a text contains the character NUL"),
        (b"1", PLAIN, "", "MAPPING_FAILED: key: is missing"),
        (b"1", PLAIN, "k" * 513, "MALFORMED: Expected `str` of length <= 512"),
        (b"{}", {**PLAIN, "payload": "/after"}, "k", "MAPPING_FAILED: payload: /after is missing"),
        (b"{}", {**PLAIN, "tenantId": "/t"}, "k", "MAPPING_FAILED: tenantId: is missing"),
        (b'{"t": null}', {**PLAIN, "tenantId": "/t"}, "k", "MAPPING_FAILED: tenantId: must be text, not NoneType"),
        (b'{"t": true}', {**PLAIN, "tenantId": "/t"}, "k", "MAPPING_FAILED: tenantId: must be text, not bool"),
        (b'{"t": "a:b"}', {**PLAIN, "tenantId": "/t"}, "k", "MALFORMED: Expected `str` matching regex"),
        (b"1", {**PLAIN, "tenantId": "header:tenant"}, "k", "MAPPING_FAILED: tenantId: is missing"),
        (b"", {**PLAIN, "dictCode": "/d"}, "k", "MAPPING_FAILED: dictCode: is missing"),
        (b"", {**PLAIN, "items": "/rows"}, "k", "MAPPING_FAILED: items: /rows is not a list"),
        (b'{"rows": {}}', {**PLAIN, "items": "/rows"}, "k", "MAPPING_FAILED: items: /rows is not a list"),
        (b'{"t": "MERGE"}', {**PLAIN, "eventType": "/t"}, "k", "MALFORMED: Invalid enum value 'MERGE'"),
        (b'{"id": "7"}', {**PLAIN, "eventId": "/id"}, "k", "MALFORMED: Invalid UUID"),
        (b'{"r": "x"}', {**PLAIN, "sourceRevision": "/r"}, "k", "MALFORMED: Expected `int | null`, got `str`"),
        (b'{"r": "007"}', {**PLAIN, "sourceRevision": "/r"}, "k", "MALFORMED: "),
        (b'{"r": 1.5}', {**PLAIN, "sourceRevision": "/r"}, "k", "MALFORMED: Expected `int | null`, got `float`"),
        (b'{"at": "now"}', {**PLAIN, "occurredAt": "/at"}, "k", "MALFORMED: Invalid RFC3339"),
    ],
)
def test_what_cannot_be_mapped_says_why(value: bytes, how: Json, key: str, problem: str) -> None:
    """R10: a missing or wrong field is rejected with a code and its name."""
    assert refusal(value, how, key).startswith(problem)


def test_a_number_beyond_all_bounds_breaks_nothing() -> None:
    """R10: numbers that Python cannot represent are passed on or rejected, as PostgreSQL would reject them."""
    with contextlib.suppress(PenstockError):
        assert mapped(b"1e99999999999999999999")


@pytest.mark.parametrize("depth", [200, 300, 900, *range(930, 1000, 3), 2_000])
def test_what_is_nested_deeply_passes_or_is_refused(depth: int) -> None:
    """R10: no depth of nesting makes the mapping fail."""
    with contextlib.suppress(PenstockError):
        assert mapped(b"[" * depth + b"]" * depth)


@pytest.fixture
async def settings(database_url: str, bus_kind: str, request: pytest.FixtureRequest) -> Settings:
    """Return three external topics: plain messages, commands, lists of changes."""
    await create_schemas(database_url)
    broker = request.getfixturevalue("broker") if bus_kind == "kafka" else None
    if broker is not None:
        broker.needs_real("makes no topics when it is asked to")
    mark = os.urandom(4).hex()
    topics = [{"topic": f"theirs.{mark}.{n}", **how} for n, how in enumerate((PLAIN, COMMANDS, CHANGES))]
    commands = CommandsSection.model_validate({"commandsTopic": f"refdata.test.{mark}", "externalTopics": topics})
    known = refdata_settings(database_url, broker)
    return known.model_copy(update={"refdata": known.refdata.model_copy(update={"kafka": commands})})


@pytest.fixture
async def harness(settings: Settings) -> AsyncIterator[RefdataHarness]:
    async with opened(settings) as harness:
        yield harness


async def post(harness: RefdataHarness, number: int, value: bytes, key: str = "k", **headers: str) -> None:
    await harness.bus.publish([BusMessage(topic(harness, number), key, value, headers)])


def topic(harness: RefdataHarness, number: int) -> str:
    return harness.platform.section.kafka.external_topics[number].topic


async def adapted(harness: RefdataHarness) -> None:
    """Convert all messages of the external topics to commands, and apply them."""
    async with asyncio.timeout(60), run_adapter(harness.platform):
        for section in harness.platform.section.kafka.external_topics:
            while await harness.bus.count_backlog(section.topic):
                pass
    await harness.apply()


async def test_the_lag_of_every_topic_is_exported(harness: RefdataHarness) -> None:
    """R26: the lag of every topic with workers is exported."""
    topics = [section.topic for section in harness.platform.section.kafka.external_topics]
    lags = [f'kafka_consumer_lag{{topic="{topic}"}}' for topic in topics]
    async with asyncio.timeout(60), run_adapter(harness.platform):
        while not all(lag in harness.platform.telemetry.format_metrics().decode() for lag in lags):
            await harness.bus.count_backlog(topics[0])


async def test_messages_of_others_are_applied(harness: RefdataHarness) -> None:
    """R10: three topics, three mappings, one dictionary; in order, and with all digits."""
    event_id = uuid4()
    await post(harness, 0, b"1.10", key="a")
    await post(harness, 0, b"123456789012345678901234567890", key="b")
    await post(harness, 0, b"3", key="c")
    await post(harness, 0, b"", key="c")
    fields = {"eventId": str(event_id), "tenantId": "acme", "dictCode": "CURRENCY", "eventType": "DELTA"}
    currency = upsert("NOK", {"name": "Krone", "digits": 2})
    await post(harness, 1, msgspec.json.encode({**fields, "items": [currency]}))
    rows = [
        {"ids": [0, "x"], "after": {"x": 1}},
        {"ids": [0, "y"], "after": 2},
        {"ids": [0, "y"], "m~e": {"op": "gone"}},
    ]
    changes = msgspec.json.encode({"meta": {"dict/code": "LOOSE"}, "rows": rows})
    await post(harness, 2, changes, tenant="globex", revision="5")
    await adapted(harness)
    query = "SELECT item_key, payload::text FROM dictionary_item WHERE tenant_id = 'acme' AND NOT deleted"
    kept = {row[0]: row[1] for row in await harness.db.fetch(query)}
    assert kept == {"a": "1.10", "b": "123456789012345678901234567890"}
    assert await harness.items("LOOSE", "globex") == {"x": {"x": 1}}
    update = await harness.update(event_id)
    assert (update.status, update.committed_version) == (UpdateState.COMMITTED, 1)
    assert await harness.items("CURRENCY") == {"NOK": {"name": "Krone", "digits": 2}}
    assert await harness.version("LOOSE") == 4


async def test_what_cannot_be_mapped_is_set_aside(harness: RefdataHarness) -> None:
    """R10: a rejected message becomes a dead letter of its topic, and the partition continues."""
    bad = {b"{": "MALFORMED", b"\xff\xfe": "MALFORMED", b"null": "MALFORMED", b'"\\u0000"': "MALFORMED"}
    await post(harness, 0, b"0", key="a")
    for number, value in enumerate(bad, start=1):
        await post(harness, 0, value, key="a")
        await post(harness, 0, str(number).encode(), key="a")
    await post(harness, 1, b'{"tenantId": "acme", "dictCode": "BRAND", "eventType": "DELTA", "items": []}')
    await adapted(harness)
    assert await harness.items("LOOSE") == {"a": len(bad)}
    assert await harness.version("LOOSE") == len(bad) + 1
    letters = await harness.bus.read_dead_letters(topic(harness, 0))
    assert [(letter.message.value, letter.reason.partition(":")[0]) for letter in letters] == list(bad.items())
    assert [reason.partition(":")[0] for reason in await harness.dead()] == ["DICTIONARY_READ_ONLY"]
    assert (
        await harness.db.fetchval("SELECT error_code FROM update_request WHERE dict_code = 'BRAND'")
        == "DICTIONARY_READ_ONLY"
    )


@pytest.mark.parametrize("value", [b"1e99999999999999999999", b"[" * 300 + b"]" * 300])
async def test_what_breaks_the_adapter_does_not_stop_it(harness: RefdataHarness, value: bytes) -> None:
    """R10: numbers and depths that libraries do not expect are rejected or accepted; the next messages are applied."""
    await post(harness, 0, value, key="a")
    await post(harness, 0, b"1", key="b")
    async with asyncio.timeout(8):
        await adapted(harness)
    assert (await harness.items("LOOSE"))["b"] == 1


async def test_a_message_that_is_read_twice_counts_once(harness: RefdataHarness) -> None:
    """R10: a message that is handled again after a crash is the same event, as its id is derived from its position."""
    section = TopicMapping(harness.platform.section.kafka.external_topics[0])
    events = [section.map_message(delivery(b"1", "a")), section.map_message(delivery(b"1", "a"))]
    for event in events:
        await harness.refdata.submit_all([event, event])
    await harness.apply()
    assert await harness.version("LOOSE") == 1
    assert (await harness.update(events[0].event_id)).committed_version == 1


@pytest.mark.parametrize("bus_kind", ["kafka"])  # PostgreSQL's bus has no such messages
async def test_a_tombstone_of_kafka(harness: RefdataHarness, broker: Kafka) -> None:
    """R10: messages without a value, with a key that is not text, or without a key, as other systems send them."""
    await harness.bus.publish([BusMessage(topic(harness, 0), "z", b"0")])  # so that the topic is there
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for key, value in ((b"a", b"1"), (b"a", None), (None, b"1"), (b"\xff", b"2")):
        producer.produce(topic(harness, 0), key=key, value=value, partition=0)
    assert producer.flush(10) == 0
    await adapted(harness)
    assert await harness.items("LOOSE") == {"z": 0}
    reasons = [letter.reason for letter in await harness.bus.read_dead_letters(topic(harness, 0))]
    # Invalid bytes are replaced, so two such keys could be equal: such keys are rejected.
    assert reasons == ["MAPPING_FAILED: key: is missing", "MAPPING_FAILED: key: is not UTF-8"]
