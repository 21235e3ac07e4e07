"""The write path, end to end in one process, on both buses."""

from uuid import uuid4

import msgspec
import pytest

from penstock.kernel.signals import Resync
from penstock.refdata.contract import UpdateState, decode_command
from tests.refdata.harness import RefdataHarness, chunk, command, delete, heard, on_bus, published, upsert

TENANTS = ["acme", "globex"]


async def test_the_founding_documents_dictionaries_work(harness: RefdataHarness) -> None:
    """R1, R3: COUNTRY and CURRENCY, with the YAML of the founding document, on tables with exactly its columns."""
    country = await harness.send("COUNTRY", upsert("NO", {"name": "Norway"}), upsert("SE", {"name": "Sweden"}))
    krone, yen = {"name": "Krone", "digits": 2}, {"name": "Yen", "digits": 0}
    await harness.send("CURRENCY", upsert("NOK", krone), upsert("JPY", yen))
    await harness.send("COUNTRY", delete("SE"), upsert("DK", {"name": "Denmark"}))
    await harness.apply()
    names = {key: payload["name"] for key, payload in (await harness.items("COUNTRY")).items()}
    assert names == {"NO": "Norway", "DK": "Denmark"}
    assert await harness.items("CURRENCY") == {"NOK": krone, "JPY": yen}
    assert (await harness.version("COUNTRY"), await harness.version("CURRENCY")) == (2, 1)
    update = await harness.update(country)
    assert (update.status, update.committed_version) == (UpdateState.COMMITTED, 1)


async def test_a_snapshot_replaces_all_keys(harness: RefdataHarness) -> None:
    """R13, R4: keys that a SNAPSHOT does not contain are deleted; it is one version."""
    await harness.send("CURRENCY", upsert("NOK", {"name": "Krone", "digits": 2}))
    await harness.send("CURRENCY", upsert("EUR", {"name": "Euro", "digits": 2}), event_type="SNAPSHOT")
    await harness.send("COUNTRY", upsert("NO", {"name": "Norway"}), event_type="SNAPSHOT")
    await harness.apply()
    assert await harness.items("CURRENCY") == {"EUR": {"name": "Euro", "digits": 2}}
    assert list(await harness.items("COUNTRY")) == ["NO"]
    assert await harness.version("CURRENCY") == 2


async def test_another_house_works_with_the_same_artifact(harness: RefdataHarness) -> None:
    """R28, R4: a schema per tenant, numbers as keys, a view with a join, staging and finalizing."""
    await harness.send("PRODUCT", upsert("1", {"brand": 1, "price": 10.5}), upsert("2", {"brand": 2, "price": 3}))
    await harness.send("PRODUCT", upsert("1", {"brand": 1, "price": 7}), tenant="globex")
    await harness.send("PRODUCT", delete("1"))
    await harness.apply()
    assert await harness.items("PRODUCT") == {"2": {"brand": "Rocket", "price": 3.0, "note": ":key"}}
    assert (await harness.items("PRODUCT", "globex"))["1"]["brand"] == "Umbrella"
    whole = uuid4()
    for index in (2, 1):
        body = chunk("PRODUCT", whole, index, 2, upsert(str(index * 10), {"brand": index, "price": index}))
        await harness.refdata.submit("acme", decode_command(body))
    await harness.apply()
    assert sorted(await harness.items("PRODUCT")) == ["10", "20"]
    assert (await harness.version("PRODUCT"), await harness.version("PRODUCT", "globex")) == (3, 1)


async def test_what_lives_in_our_own_table(harness: RefdataHarness) -> None:
    """R2: a dictionary without SQL is stored in dictionary_item, with all digits."""
    await harness.send(
        "LOOSE", upsert("a", 1), upsert("b", {"x": [1, None]}), upsert("a", 2), delete("b"), upsert("c", "t")
    )
    await harness.apply()
    assert await harness.items("LOOSE") == {"a": 2, "c": "t"}
    await harness.send("LOOSE", upsert("c", "t"), event_type="SNAPSHOT")
    await harness.apply()
    assert await harness.items("LOOSE") == {"c": "t"}


@pytest.mark.parametrize("again", [1, 3])
async def test_an_event_counts_once(harness: RefdataHarness, again: int) -> None:
    """R11: a command that is sent repeatedly is applied once, and a FAILED one stays FAILED."""
    event_id, bad = uuid4(), uuid4()
    for _ in range(1 + again):
        await harness.send("LOOSE", upsert("a", 1), eventId=str(event_id))
        await harness.send("CURRENCY", upsert("EUR", {"name": "Euro", "digits": 9}), eventId=str(bad))
    await harness.apply()
    await harness.apply()
    assert await harness.version("LOOSE") == 1
    assert (await harness.update(bad)).status is UpdateState.FAILED
    assert await harness.version("CURRENCY") == 0


async def test_tenants_are_apart_all_the_way(harness: RefdataHarness) -> None:
    """R28: under the same dictionary, key and id each tenant has its own items: on the bus, in tables and signals."""
    same_id = str(uuid4())
    for tenant in TENANTS:
        await harness.send("LOOSE", upsert("k", tenant), tenant=tenant, eventId=same_id)
    carried = {message.key: msgspec.json.decode(message.value) async for message in published(harness, len(TENANTS))}
    assert {key: body["tenantId"] for key, body in carried.items()} == {"acme:LOOSE": "acme", "globex:LOOSE": "globex"}
    async with harness.platform.signals.listen("tenants") as feed:
        assert isinstance(await anext(feed), Resync)
        await harness.apply()
        assert await harness.relay() == len(TENANTS)
        invalidations = [msgspec.json.decode(signal.body) async for signal in heard(feed, len(TENANTS))]
    assert {(invalidation["tenantId"], invalidation["version"]) for invalidation in invalidations} == {
        ("acme", 1),
        ("globex", 1),
    }
    await harness.send("LOOSE", upsert("k", "again"), tenant="globex")
    await harness.send("LOOSE", event_type="SNAPSHOT", tenant="globex")
    await harness.apply()
    assert [await harness.items("LOOSE", tenant) for tenant in TENANTS] == [{"k": "acme"}, {}]
    assert [await harness.version("LOOSE", tenant) for tenant in TENANTS] == [1, 3]


async def test_a_key_of_another_tenant_is_rejected(harness: RefdataHarness) -> None:
    """R28: a message under the key of one tenant cannot change the data of another one."""
    await harness.send("LOOSE", upsert("k", "globex"), tenant="globex")
    smuggled, event_id = command("LOOSE", upsert("k", "acme was here")), uuid4()
    await harness.publish(on_bus(smuggled, "globex", event_id)[0], "acme:LOOSE")
    await harness.apply()
    assert (await harness.update(event_id, "globex")).error_code == "KEY_MISMATCH"
    assert [await harness.items("LOOSE", tenant) for tenant in TENANTS] == [{}, {"k": "globex"}]
