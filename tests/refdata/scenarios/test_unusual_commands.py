"""Edges between the parts of the way in: ids, versions of what nobody writes, large batches."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

import pytest

from penstock.kernel.bus import Message
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Conflict, Corrupt
from penstock.refdata.apply import definitions
from penstock.refdata.commands import commit_waiter
from penstock.refdata.config import RefdataSection
from penstock.refdata.contract import Status, decode
from penstock.refdata.dictionaries.catalogue import Catalogue
from penstock.refdata.model import Dict
from tests.refdata.harness import RefdataHarness, chunk, command, on_bus, upsert


@pytest.fixture
def bus_kind() -> str:
    return "postgres"


async def test_an_id_of_another_dictionary_is_not_lost_in_silence(harness: RefdataHarness) -> None:
    """R11: under an id that was another dictionary's nothing is applied, and a dead letter says so."""
    event_id = uuid4()
    for code, payload in (("LOOSE", 1), ("COUNTRY", {"name": "Norway"})):
        await harness.publish(*on_bus(command(code, upsert("NO", payload)), event_id=event_id))
    await harness.apply()
    await harness.publish(*on_bus(command("COUNTRY", upsert("NO", {"name": "Norway"})), event_id=event_id))
    await harness.apply()
    assert (await harness.version("LOOSE"), await harness.version("COUNTRY")) == (1, 0)
    assert [reason.partition(":")[0] for reason in await harness.dead()] == ["EVENT_ID_REUSED"] * 2
    assert (await harness.update(event_id)).status is Status.COMMITTED


async def test_a_repeated_command_is_answered_when_its_dictionary_is_gone(harness: RefdataHarness) -> None:
    """R8: the same id and body get the same answer, also after the dictionary was taken out."""
    event_id = str(uuid4())
    await harness.send("LOOSE", upsert("a", 1), eventId=event_id)
    await harness.apply()
    harness.refdata.catalogue.replace(RefdataSection())
    again = await harness.refdata.submit("acme", decode(command("LOOSE", upsert("a", 1), eventId=event_id)))
    assert (again.status, again.committed_version) == (Status.COMMITTED, 1)
    with pytest.raises(Conflict):
        await harness.refdata.submit("acme", decode(command("LOOSE", upsert("a", 2), eventId=event_id)))


async def test_what_nobody_writes_has_versions_too(harness: RefdataHarness) -> None:
    """R1: another loadSql of a read-only dictionary is another version, for known tenants and for who loaded it."""
    brand = Dict("acme", "BRAND")
    assert (await harness.refdata.catalogue.get(brand).provider.load_all(harness.db, brand)).version == 0
    known = harness.refdata.catalogue.all()
    assert await definitions.register(harness.db, known, ["globex"]) == 0
    other = {
        "code": "BRAND",
        "loadSql": "select label as k, to_jsonb(id) as v from acme.brand where :tenantId = 'acme'",
    }
    changed = Catalogue(RefdataSection.model_validate({"dictionaries": [other]}))
    assert await definitions.register(harness.db, changed.all(), ["globex"]) == 1
    loaded = await changed.get(brand).provider.load_all(harness.db, brand)
    assert (loaded.version, set(loaded.items)) == (1, {"Anvil", "Rocket"})
    assert await harness.version("BRAND", "globex") == 1


async def test_a_null_payload_fails_the_load(harness: RefdataHarness) -> None:
    """R3: a v that is null is no JSON."""
    sql = "select :tenantId as k, null::jsonb as v"
    catalogue = Catalogue(RefdataSection.model_validate({"dictionaries": [{"code": "BAD", "loadSql": sql}]}))
    with pytest.raises(Corrupt, match="null v"):
        await catalogue.get(Dict("acme", "BAD")).provider.load_all(harness.db, Dict("acme", "BAD"))


async def test_large_messages_come_in_small_batches(harness: RefdataHarness) -> None:
    """R11: a batch is bounded by bytes as well as by number, and everything comes in the end."""
    whole, text = uuid4(), "x" * 400_000
    for index in range(1, 25):
        body = chunk("LOOSE", whole, index, 24, upsert(f"a{index}", text), upsert(f"b{index}", text))
        await harness.refdata.submit("acme", decode(body))
    async with harness.bus.subscribe(harness.topic, worker="looks") as queue:
        taken = await queue.take(100)
        assert 1 < len(taken) < 10
        await queue.settle([(delivery, None) for delivery in taken])
    await harness.apply()
    assert len(await harness.items("LOOSE")) == 48


async def test_a_snapshot_with_too_many_items_ends_at_once(harness: RefdataHarness) -> None:
    """R13: it is refused with the chunk that is one too many, not kept until the last."""
    whole = uuid4()
    first = await harness.refdata.submit("acme", decode(chunk("LOOSE", whole, 1, 3, upsert("a", 1), upsert("b", 2))))
    await harness.apply(max_items=1)
    update = await harness.update(first.event_id)
    assert (update.status, update.error_code) == (Status.FAILED, "SNAPSHOT_TOO_LARGE")
    late = await harness.refdata.submit("acme", decode(chunk("LOOSE", whole, 2, 3, upsert("c", 1))))
    await harness.apply()
    assert (await harness.update(late.event_id)).error_code == "SNAPSHOT_TOO_LARGE"


async def test_no_commit_is_too_quick_to_be_heard(harness: RefdataHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R6: who waits hears of a commit that came before its publisher had the answer, whoever else is waiting."""
    monkeypatch.setattr(commit_waiter, "_LOOK_AGAIN", 60)  # the net must not catch it
    publish, waiting = harness.bus.publish, asyncio.Event()

    async def and_apply(messages: Sequence[Message], *, tx: Connection | None = None) -> None:
        await publish(messages, tx=tx)
        if tx is not None:  # the bus calls itself
            return
        if waiting.is_set():
            await harness.apply()
        waiting.set()

    monkeypatch.setattr(harness.bus, "publish", and_apply)
    other = decode(command("COUNTRY", upsert("NO", {"name": "Norway"})))
    slow = asyncio.create_task(harness.refdata.submit("globex", other, timedelta(seconds=30)))
    await waiting.wait()
    update = await harness.refdata.submit("acme", decode(command("LOOSE", upsert("a", 1))), timedelta(seconds=10))
    assert update.status is Status.COMMITTED
    assert (await slow).status is Status.COMMITTED
