"""A worker of the bus in a process of its own, to be killed or frozen. Says line by line what it did.

    python -m tests.kernel.bus.worker ADDRESS TOPIC LEASE_SECONDS MAX_ATTEMPTS hold|work

`hold` takes what is there and keeps it until a line comes in, then settles it. `work` handles everything and ends when
nothing is left; a message that says `poison` kills it.
"""

import asyncio
import os
import signal
import sys
from datetime import timedelta

from penstock.kernel.bus import Bus, BusDelivery, DeliveryPolicy, Subscription
from penstock.kernel.tasks.outcome import Done, Outcome
from penstock.kernel.telemetry.telemetry import Telemetry, configure_logging
from penstock.kernel.work.worker import Worker, handle_each
from tests.kernel.bus.backends import Address


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - how it talks to the test


async def hold(subscription: Subscription) -> None:
    while not (held := await subscription.take(100)):
        await subscription.wait(1)
    for delivery in held:
        say("took", delivery.message.value.decode())
    say("holding")
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    while not told.done():
        await asyncio.wait([told], timeout=subscription.lease_for.total_seconds() / 3)
        await subscription.extend(held)
    say("lost", await subscription.settle([(delivery, Done()) for delivery in held]), len(held))


async def work(bus: Bus, subscription: Subscription) -> None:
    async def handle(delivery: BusDelivery) -> Outcome:
        say("handling", delivery.message.value.decode())
        if delivery.message.value == b"poison":
            os.kill(os.getpid(), signal.SIGKILL)
        return Done()

    worker = Worker(subscription, handle_each(handle, subscription), Telemetry(), batch=100)
    while await worker.step() or await bus.backlog(subscription.name):
        await subscription.wait(0.5)


async def main(address: str, topic: str, lease: str, max_attempts: str, mode: str) -> None:
    policy = DeliveryPolicy(max_attempts=int(max_attempts), lease_for=timedelta(seconds=float(lease)))
    async with (
        Address.load(address).open() as bus,
        bus.subscribe(topic, worker=f"child {os.getpid()}", policy=policy) as subscription,
    ):
        await (hold(subscription) if mode == "hold" else work(bus, subscription))


if __name__ == "__main__":
    configure_logging("ERROR")
    asyncio.run(main(*sys.argv[1:]))
