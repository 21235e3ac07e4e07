"""The settlement of a batch per partition: finished messages, dead letters, and the message to retry. No I/O."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from penstock.kernel.bus import BusDelivery, DeliveryPolicy
from penstock.kernel.tasks.outcome import Done, Failed, Outcome, Retry, sanitize_reason


@dataclass(slots=True)
class PartitionSettlement:
    """The settlement of a partition. *attempts* and *due_at* belong to *head*, the first message to be redelivered."""

    partition: int
    fence: int
    finished: list[int] = field(default_factory=list)
    dead: list[tuple[BusDelivery, str]] = field(default_factory=list)
    head: int | None = None
    attempts: int = 0
    due_at: datetime | None = None


def settle(
    results: Sequence[tuple[BusDelivery, Outcome | None]], policy: DeliveryPolicy, now: datetime
) -> list[PartitionSettlement]:
    """Return the settlement of each partition: messages after the first one to be redelivered are redelivered too."""
    lanes: dict[int, list[tuple[BusDelivery, Outcome | None]]] = defaultdict(list)
    for delivery, outcome in results:
        lanes[delivery.partition].append((delivery, outcome))
    return [_settle_lane(lane, policy, now) for lane in lanes.values()]


def _settle_lane(
    lane: Sequence[tuple[BusDelivery, Outcome | None]], policy: DeliveryPolicy, now: datetime
) -> PartitionSettlement:
    settled = PartitionSettlement(lane[0][0].partition, lane[0][0].fence)
    for delivery, outcome in lane:
        match outcome:
            case Done():
                pass
            case Failed(reason):
                settled.dead.append((delivery, sanitize_reason(reason)))
            case Retry(reason, counts=True) if delivery.attempt >= policy.max_attempts:
                settled.dead.append((delivery, sanitize_reason(f"failed after {delivery.attempt} attempts: {reason}")))
            case Retry():
                settled.head, settled.attempts = delivery.position, delivery.attempt - (not outcome.counts)
                settled.due_at = now + outcome.wait(delivery.attempt, first=policy.first_delay, limit=policy.max_delay)
                return settled
            case None:
                settled.head, settled.attempts = delivery.position, delivery.attempt - 1
                return settled
        settled.finished.append(delivery.position)
    return settled
