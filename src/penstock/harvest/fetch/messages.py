"""The messages of harvest on the bus, and their immediate delivery."""

from contextlib import suppress
from uuid import UUID

import msgspec

from penstock.harvest.contract import CONSOLIDATIONS, WORK_ITEMS, Consolidate, WorkItem
from penstock.kernel.bus import Bus, Message
from penstock.kernel.errors import Transient


async def hurry(bus: Bus) -> None:
    """Send what was just committed; what cannot be sent now is sent by the relay, and is no failure of the caller's."""
    with suppress(Transient):
        await bus.relay()


def work_item(run_id: UUID, partition_id: str, offset: int, scan: int, trace_id: str) -> Message:
    item = WorkItem(run_id, partition_id, offset, trace_id, scan)
    return Message(WORK_ITEMS, f"{run_id}/{partition_id}", msgspec.json.encode(item))


def consolidation(run_id: UUID, trace_id: str, *, force: bool = False) -> Message:
    return Message(CONSOLIDATIONS, str(run_id), msgspec.json.encode(Consolidate(run_id, trace_id, force)))
