"""H6: the messages of harvest, and what is none."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.harvest import contract
from penstock.kernel.bus import BusMessage, DeliveryPolicy
from penstock.kernel.tasks.outcome import Failed
from tests.harvest.stepper import FEED, HarvestStepper, harvest_stepper

RUBBISH = [b"", b"\xff", b"[]", b'{"runId": "no id", "type": "WORK_ITEM"}', b'{"type": "OTHER"}']


@pytest.mark.parametrize("topic", [contract.PLANS, contract.WORK_ITEMS, contract.CONSOLIDATIONS])
async def test_what_is_no_message_is_set_aside(database_url: str, tmp_path: Path, topic: str) -> None:
    """H6: rubbish is a dead letter that says so at once, and the run beside it completes."""
    async with harvest_stepper(database_url, tmp_path) as stones:
        await stones.bus.publish([BusMessage(topic, f"k{n}", value) for n, value in enumerate(RUBBISH)])
        outcomes = [outcome for _ in RUBBISH for outcome in await stones.deliver(topic)]
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        letters = await stones.bus.dead_letters(topic)
        assert [letter.reason.split(":")[0] for letter in letters] == ["BAD_MESSAGE"] * len(RUBBISH)
        assert {letter.attempts for letter in letters} == {1}
        run_id = await stones.plan_run()
        await stones.finish()
        assert (await stones.run(run_id))["state"] == "completed"


async def test_all_messages_of_a_run_are_of_one_trace(database_url: str, tmp_path: Path) -> None:
    """H6: what is to be fetched, what was, and the order to consolidate have their types, their run and its traceId."""
    async with harvest_stepper(database_url, tmp_path) as stones:
        run_id = await stones.harvest.start(FEED, "test")
        (plan,) = await waiting(stones, contract.PLANS)
        await stones.drain(contract.PLANS)
        items = await waiting(stones, contract.WORK_ITEMS)
        await stones.drain(contract.WORK_ITEMS)
        done = await waiting(stones, contract.WORK_DONE)
        (order,) = await waiting(stones, contract.CONSOLIDATIONS)
        run = await stones.run(run_id)
    sent = [plan, *items, *done, order]
    parts = run["expected_workers"]
    types = ["PLAN", *["WORK_ITEM"] * parts, *["WORK_DONE"] * parts, "CONSOLIDATE"]
    assert [message["type"] for message in sent] == types
    assert {(message["runId"], message["traceId"]) for message in sent} == {(str(run_id), run["trace_id"])}
    assert {item["partitionId"] for item in items} == {message["partitionId"] for message in done}
    assert {message["status"] for message in done} == {"completed"}
    assert sum(message["recordsProcessed"] for message in done) == 200


async def waiting(stones: HarvestStepper, topic: str) -> list[dict[str, Any]]:
    """What is on a topic; it stays there."""
    async with stones.bus.subscribe(topic, worker="reader", policy=DeliveryPolicy()) as queue:
        return [msgspec.json.decode(delivery.message.value) for delivery in await queue.take(100)]
