"""H6: the messages of harvest, and what is none."""

from pathlib import Path

import pytest

from penstock.harvest import contract
from penstock.kernel.bus import Message
from penstock.kernel.outcome import Failed
from tests.harvest.crank import crank

RUBBISH = [b"", b"\xff", b"[]", b'{"runId": "no id", "type": "WORK_ITEM"}', b'{"type": "OTHER"}']


@pytest.mark.parametrize("topic", [contract.PLANS, contract.WORK_ITEMS, contract.CONSOLIDATIONS])
async def test_what_is_no_message_is_set_aside(database_url: str, tmp_path: Path, topic: str) -> None:
    """H6: rubbish is a dead letter that says so at once, and the run beside it completes."""
    async with crank(database_url, tmp_path) as stones:
        await stones.bus.publish([Message(topic, f"k{n}", value) for n, value in enumerate(RUBBISH)])
        outcomes = [one for _ in RUBBISH for one in await stones.deliver(topic)]
        assert all(isinstance(one, Failed) for one in outcomes)
        letters = await stones.bus.dead_letters(topic)
        assert [letter.reason.split(":")[0] for letter in letters] == ["BAD_MESSAGE"] * len(RUBBISH)
        assert {letter.attempts for letter in letters} == {1}
        run_id = await stones.planned()
        await stones.finish()
        assert (await stones.run(run_id))["state"] == "completed"
