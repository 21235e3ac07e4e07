"""I23: the deliveries of the published state: dictionaries and flows exactly once, webhooks at least once."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from penstock.ingest.deliver.targets import DeliveryRefused, call_webhook, fill_dictionary, start_flow
from penstock.ingest.model import DeliveryResult, DeliveryStatus
from penstock.ingest.run.publish import CurrentState, read_current_state
from penstock.ingest.state.reader import open_state
from penstock.ingest.supplier import DeliveryTarget, Supplier
from penstock.ingest.tree import paths
from penstock.ingest.tree.async_bridge import AsyncBridge
from penstock.ingest.tree.documents import encode_document, parse_document
from penstock.ingest.tree.port import FileTree
from penstock.kernel.clock import Clock
from penstock.kernel.errors import Invalid, PenstockError, Transient
from penstock.kernel.tasks.backoff import compute_delay
from penstock.kernel.text import format_time

_FIRST, _LONGEST = timedelta(seconds=5), timedelta(hours=1)


@dataclass
class TargetDelivery:
    """The progress of the delivery to one target; stored beside the run, so that it survives a crash."""

    target: str
    is_done: bool = False
    attempts: int = 0
    retry_at: str | None = None
    result: Any = None

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class TargetDeliveries:
    """The targets of one supplier's published state."""

    def __init__(self, tree: FileTree, name: str, supplier: Supplier, bridge: AsyncBridge, clock: Clock) -> None:
        self._tree = tree
        self._name = name
        self._supplier = supplier
        self._bridge = bridge
        self._clock = clock

    def deliver(self) -> dict[str, DeliveryResult]:
        """Deliver the published state to every target that is due; return the result by target."""
        current = read_current_state(self._tree, self._name) if self._supplier.targets else None
        if current is None:
            return {}
        results: dict[str, DeliveryResult] = {}
        for target in self._supplier.targets:
            path = paths.make_run_path(current.pointer.run_id, f"deliveries/{target.digest}.json")
            delivery = TargetDelivery(**{"target": target.name, **parse_document(self._tree.read(path))})
            if delivery.is_done:
                continue
            now = self._clock.now()
            if delivery.retry_at is None or datetime.fromisoformat(delivery.retry_at) <= now:
                results[delivery.target] = self._try_delivery(target, current, delivery)
                self._tree.write(path, encode_document(delivery.as_dict()))
        return results

    def _try_delivery(self, target: DeliveryTarget, current: CurrentState, delivery: TargetDelivery) -> DeliveryResult:
        """Deliver to one target. After a crash the delivery is repeated, under the same ids."""
        run_id = current.pointer.run_id
        delivery.attempts += 1
        try:
            delivery.result = self._send(target, current)
        except DeliveryRefused as error:
            delivery.is_done, delivery.result = True, error.as_dict()
            return DeliveryResult(DeliveryStatus.REFUSED, run_id, error.code, error.message)
        except PenstockError as error:
            # Includes errors that an operator has to fix, such as a missing secret or dictionary.
            pause = compute_delay(delivery.attempts, first=_FIRST, limit=_LONGEST)
            delivery.retry_at, delivery.result = format_time(self._clock.now() + pause), error.as_dict()
            return DeliveryResult(DeliveryStatus.PENDING, run_id, error.code, error.message, delivery.retry_at)
        delivery.is_done, delivery.retry_at = True, None
        return DeliveryResult(DeliveryStatus.DELIVERED, run_id)

    def _send(self, target: DeliveryTarget, current: CurrentState) -> Any:
        if target.webhook is not None:
            key = f"{current.pointer.run_id}:{target.digest}"
            return self._bridge.call(call_webhook(target.webhook, self._name, current, key))
        if target.flow is not None:
            return self._bridge.call(start_flow(target.flow, self._name, current))
        if target.dictionary is None:
            raise RuntimeError("a target is a dictionary, a flow or a webhook")
        with open_state(self._tree, self._name) as state:
            if state.pointer != current.pointer:
                hint = "no action is needed: the newer state is delivered next"
                raise Transient("SUPERSEDED", "another state was published during the delivery", hint=hint)
            if current.manifest["key"] != self._supplier.key:
                hint = "no action is needed: the next publication uses the configured key"
                raise Invalid("KEY_MISSING", "the published state has another key than the configuration", hint=hint)
            return self._bridge.call(fill_dictionary(target.dictionary, self._supplier.key[0], state))
