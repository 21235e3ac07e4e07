"""Appliers that freeze past their session and wake up: others took over, and nothing is applied twice."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.refdata.role_processes import RoleProcesses, housed, load
from tests.services.kafka import Kafka
from tests.support.waiting import becomes

FROZEN = {"apply.1": "taken", "apply.2": "noted", "apply.3": "written", "apply.4": "applied"}
AWAKE = "apply.5"


@pytest.fixture
async def house(
    tmp_path: Path, database_url: str, bus_kind: str, request: pytest.FixtureRequest
) -> AsyncIterator[RoleProcesses]:
    broker: Kafka | None = request.getfixturevalue("broker") if bus_kind == "kafka" else None
    if broker is not None:
        broker.needs_real("makes no topics when it is asked to")
    async with housed(tmp_path, database_url, broker, None) as house:
        await house.start("command-api", "relay")
        yield house


async def freeze(house: RoleProcesses, orders: dict[str, str]) -> None:
    """Give them work until each has frozen at its point."""
    for name, point in orders.items():
        house.order(name, point, how=signal.SIGSTOP)

    async def are_frozen() -> bool:
        if all(house.is_frozen(name) for name in orders):
            return True
        await house.send(load())
        if "kafka-adapter" in house.running:
            await house.publish_foreign(8)
        return False

    await becomes(are_frozen, "they do not freeze")


async def test_a_frozen_applier_wakes_up_and_applies_nothing_twice(house: RoleProcesses) -> None:
    """R11: frozen after the take, inside the transaction, before its end and after it; others go on without them."""
    await house.start(*FROZEN, AWAKE)
    await freeze(house, FROZEN)
    await house.settled()
    await house.check()
    for name in FROZEN:
        house.wake(name)
    await house.send(load())
    await house.settled()
    await house.check()
    await house.stop(AWAKE)
    await house.send(load())
    await house.settled()
    await house.check()


async def test_a_frozen_relay_and_a_frozen_adapter_hold_up_nobody(house: RoleProcesses) -> None:
    """R10, R15: frozen between their two steps, others do both; when they wake up, nothing is applied twice."""
    frozen = {"relay.1": "announced", "kafka-adapter.1": "opened"}
    await house.start("apply", "kafka-adapter", *frozen)
    await freeze(house, frozen)
    await house.settled()
    await house.check()
    for name in frozen:
        house.wake(name)
    await house.stop("relay")
    await house.stop("kafka-adapter")
    await house.send(load())
    await house.publish_foreign(2)
    await house.settled()
    await house.check()


@pytest.mark.parametrize("bus_kind", ["postgres"])
async def test_an_applier_that_freezes_while_it_settles_holds_up_nobody(house: RoleProcesses) -> None:
    """R11: what it was about to settle is another's after the lease, though it froze in the bus's own transaction."""
    await house.start("apply.1", "apply.2")
    await freeze(house, {"apply.1": "freeing"})
    await house.settled(within=10)
    house.wake("apply.1")
    await house.stop("apply.2")
    await house.send(load())
    await house.settled()
    await house.check()
