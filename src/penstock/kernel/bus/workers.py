"""The workers of a role on a topic of the bus."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from penstock.kernel.bus import Bus, BusDelivery, DeliveryPolicy, Subscription
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.kernel.work.worker import Handler, Worker


@asynccontextmanager
async def run_workers(
    bus: Bus,
    telemetry: Telemetry,
    topic: str,
    name: str,
    make_handler: Callable[[Subscription], Handler[BusDelivery]],
    policy: DeliveryPolicy,
    *,
    batch: int,
    count: int = 1,
) -> AsyncIterator[None]:
    """Run *count* workers on *topic* until the end of the block; they finish running items and release the rest."""
    policy = replace(policy, on_dead=telemetry.work.count_dead_letters(topic))
    async with AsyncExitStack() as stack:
        workers: list[Worker[BusDelivery]] = []
        for _ in range(count):
            queue = await stack.enter_async_context(bus.subscribe(topic, worker=name, policy=policy))
            workers.append(Worker(queue, make_handler(queue), telemetry, batch=batch))
        tasks = [asyncio.create_task(worker.run(), name=f"work {topic}") for worker in workers]
        try:
            yield
        finally:
            for worker in workers:
                worker.stop()
            await asyncio.gather(*tasks)
