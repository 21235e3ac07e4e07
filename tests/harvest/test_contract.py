"""H6: the messages of harvest, and invalid messages."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.harvest import contract
from penstock.kernel.bus import BusMessage, DeliveryPolicy
from penstock.kernel.tasks.outcome import Failed
from tests.harvest.stepper import FEED, HarvestStepper, harvest_stepper

INVALID = [b"", b"\xff", b"[]", b'{"runId": "no id", "type": "WORK_ITEM"}', b'{"type": "OTHER"}']


@pytest.mark.parametrize("topic", [contract.PLANS, contract.WORK_ITEMS, contract.CONSOLIDATIONS])
async def test_invalid_messages_are_dead_lettered(database_url: str, tmp_path: Path, topic: str) -> None:
    """H6: an invalid message is a dead letter at once, with its error, and runs complete nevertheless."""
    async with harvest_stepper(database_url, tmp_path) as stones:
        await stones.bus.publish([BusMessage(topic, f"k{n}", value) for n, value in enumerate(INVALID)])
        outcomes = [outcome for _ in INVALID for outcome in await stones.deliver(topic)]
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        letters = await stones.bus.read_dead_letters(topic)
        assert [letter.reason.split(":")[0] for letter in letters] == ["BAD_MESSAGE"] * len(INVALID)
        assert {letter.attempts for letter in letters} == {1}
        run_id = await stones.plan_run()
        await stones.finish()
        assert (await stones.run(run_id))["state"] == "completed"


async def test_messages_of_a_run_have_its_trace_id(database_url: str, tmp_path: Path) -> None:
    """H6: all messages of a run have their type, the id of the run and its traceId."""
    async with harvest_stepper(database_url, tmp_path) as stones:
        run_id = await stones.harvest.start(FEED, "test")
        (plan,) = await read_messages(stones, contract.PLANS)
        await stones.drain(contract.PLANS)
        items = await read_messages(stones, contract.WORK_ITEMS)
        await stones.drain(contract.WORK_ITEMS)
        events = await read_messages(stones, contract.WORK_DONE)
        (command,) = await read_messages(stones, contract.CONSOLIDATIONS)
        run = await stones.run(run_id)
    sent = [plan, *items, *events, command]
    parts = run["expected_workers"]
    types = ["PLAN", *["WORK_ITEM"] * parts, *["WORK_DONE"] * parts, "CONSOLIDATE"]
    assert [message["type"] for message in sent] == types
    assert {(message["runId"], message["traceId"]) for message in sent} == {(str(run_id), run["trace_id"])}
    assert {item["partitionId"] for item in items} == {message["partitionId"] for message in events}
    assert {message["status"] for message in events} == {"completed"}
    assert sum(message["recordsProcessed"] for message in events) == 200


async def read_messages(stones: HarvestStepper, topic: str) -> list[dict[str, Any]]:
    """Return the messages of a topic, without settling them."""
    async with stones.bus.subscribe(topic, worker="reader", policy=DeliveryPolicy()) as queue:
        return [msgspec.json.decode(delivery.message.value) for delivery in await queue.take(100)]
