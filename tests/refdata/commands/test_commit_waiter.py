"""Writers that wait for a commit are notified."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from penstock.kernel.bus import BusMessage
from penstock.kernel.db.database import Connection
from penstock.refdata.commands import commit_waiter
from penstock.refdata.contract import UpdateState, decode_command
from tests.refdata.harness import RefdataHarness, command, upsert


@pytest.fixture
def bus_kind() -> str:
    return "postgres"


async def test_no_commit_is_too_quick_to_be_heard(harness: RefdataHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R6: a writer is notified of a commit that happened before the response of the bus, also while others wait."""
    monkeypatch.setattr(commit_waiter, "_POLL", 60)  # the net must not catch it
    publish, waiting = harness.bus.publish, asyncio.Event()

    async def and_apply(messages: Sequence[BusMessage], *, tx: Connection | None = None) -> None:
        await publish(messages, tx=tx)
        if tx is not None:  # the bus calls itself
            return
        if waiting.is_set():
            await harness.apply()
        waiting.set()

    monkeypatch.setattr(harness.bus, "publish", and_apply)
    other = decode_command(command("COUNTRY", upsert("NO", {"name": "Norway"})))
    slow = asyncio.create_task(harness.refdata.submit("globex", other, timedelta(seconds=30)))
    await waiting.wait()
    update = await harness.refdata.submit(
        "acme", decode_command(command("LOOSE", upsert("a", 1))), timedelta(seconds=10)
    )
    assert update.status is UpdateState.COMMITTED
    assert (await slow).status is UpdateState.COMMITTED
