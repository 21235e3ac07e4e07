"""A worker of the bus in its own process, to be killed or frozen. It prints what it does, line by line.

    python -m tests.kernel.bus.worker ADDRESS TOPIC LEASE_SECONDS MAX_ATTEMPTS claim|work

`claim` claims messages until it reads a line, then settles them. `work` handles everything and ends when
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


def print_line(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - how it talks to the test


async def claim(subscription: Subscription) -> None:
    while not (claimed := await subscription.take(100)):
        await subscription.wait(1)
    for delivery in claimed:
        print_line("took", delivery.message.value.decode())
    print_line("holding")
    stopping = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    while not stopping.done():
        await asyncio.wait([stopping], timeout=subscription.lease_for.total_seconds() / 3)
        await subscription.extend(claimed)
    print_line("lost", await subscription.settle([(delivery, Done()) for delivery in claimed]), len(claimed))


async def work(bus: Bus, subscription: Subscription) -> None:
    async def handle(delivery: BusDelivery) -> Outcome:
        print_line("handling", delivery.message.value.decode())
        if delivery.message.value == b"poison":
            os.kill(os.getpid(), signal.SIGKILL)
        return Done()

    worker = Worker(subscription, handle_each(handle, subscription), Telemetry(), batch=100)
    while await worker.step() or await bus.count_backlog(subscription.name):
        await subscription.wait(0.5)


async def main(address: str, topic: str, lease: str, max_attempts: str, mode: str) -> None:
    policy = DeliveryPolicy(max_attempts=int(max_attempts), lease_for=timedelta(seconds=float(lease)))
    async with (
        Address.load(address).open() as bus,
        bus.subscribe(topic, worker=f"child {os.getpid()}", policy=policy) as subscription,
    ):
        await (claim(subscription) if mode == "claim" else work(bus, subscription))


if __name__ == "__main__":
    configure_logging("ERROR")
    asyncio.run(main(*sys.argv[1:]))
