"""Edge cases of the write path: ids, versions of dictionaries without writes, large batches."""

from uuid import uuid4

import pytest

from penstock.refdata.contract import UpdateState, decode_command
from tests.refdata.harness import RefdataHarness, chunk, command, on_bus, upsert


@pytest.fixture
def bus_kind() -> str:
    return "postgres"


async def test_an_id_of_another_dictionary_is_not_lost_in_silence(harness: RefdataHarness) -> None:
    """R11: a command with the id of another dictionary's is not applied, and becomes a dead letter with the reason."""
    event_id = uuid4()
    for code, payload in (("LOOSE", 1), ("COUNTRY", {"name": "Norway"})):
        await harness.publish(*on_bus(command(code, upsert("NO", payload)), event_id=event_id))
    await harness.apply()
    await harness.publish(*on_bus(command("COUNTRY", upsert("NO", {"name": "Norway"})), event_id=event_id))
    await harness.apply()
    assert (await harness.version("LOOSE"), await harness.version("COUNTRY")) == (1, 0)
    assert [reason.partition(":")[0] for reason in await harness.dead()] == ["EVENT_ID_REUSED"] * 2
    assert (await harness.update(event_id)).status is UpdateState.COMMITTED


async def test_large_messages_come_in_small_batches(harness: RefdataHarness) -> None:
    """R11: a batch is limited by bytes as well as by number, and all its messages are applied."""
    whole, text = uuid4(), "x" * 400_000
    for index in range(1, 25):
        body = chunk("LOOSE", whole, index, 24, upsert(f"a{index}", text), upsert(f"b{index}", text))
        await harness.refdata.submit("acme", decode_command(body))
    async with harness.bus.subscribe(harness.topic, worker="looks") as queue:
        taken = await queue.take(100)
        assert 1 < len(taken) < 10
        await queue.settle([(delivery, None) for delivery in taken])
    await harness.apply()
    assert len(await harness.items("LOOSE")) == 48
