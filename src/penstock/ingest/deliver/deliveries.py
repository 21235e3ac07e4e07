"""I23: who is told of the current state: dictionaries and flows exactly once, webhooks at least once."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from penstock.ingest.deliver.targets import DeliveryRefused, call_webhook, fill_dictionary, start_flow
from penstock.ingest.run.publish import CurrentState, current_state
from penstock.ingest.state.reader import open_state
from penstock.ingest.supplier import DeliveryTarget, Supplier
from penstock.ingest.tree import paths
from penstock.ingest.tree.async_bridge import AsyncBridge
from penstock.ingest.tree.documents import encode_document, parse_document
from penstock.ingest.tree.port import FileTree
from penstock.kernel.clock import Clock
from penstock.kernel.errors import Invalid, PenstockError, Transient
from penstock.kernel.tasks.backoff import compute_delay

_FIRST, _LONGEST = timedelta(seconds=5), timedelta(hours=1)


@dataclass
class TargetDelivery:
    """How far telling one target has come; kept beside the run, so that it survives us."""

    target: str
    is_done: bool = False
    attempts: int = 0
    again_at: str | None = None
    told: Any = None

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class TargetDeliveries:
    """The targets of one supplier's current state."""

    def __init__(self, tree: FileTree, name: str, supplier: Supplier, bridge: AsyncBridge, clock: Clock) -> None:
        self._tree = tree
        self._name = name
        self._supplier = supplier
        self._bridge = bridge
        self._clock = clock

    def deliver(self) -> dict[str, str]:
        """Tell every target that was not told yet, and that is due; what came of it, by target."""
        current = current_state(self._tree, self._name) if self._supplier.targets else None
        if current is None:
            return {}
        came: dict[str, str] = {}
        for target in self._supplier.targets:
            path = paths.run(current.pointer.run_id, f"deliveries/{target.digest}.json")
            known = TargetDelivery(**{"target": target.name, **parse_document(self._tree.read(path))})
            if known.is_done:
                continue
            now = self._clock.now()
            if known.again_at is None or datetime.fromisoformat(known.again_at) <= now:
                came[known.target] = self._try(target, current, known)
                self._tree.write(path, encode_document(known.as_dict()))
        return came

    def _try(self, target: DeliveryTarget, current: CurrentState, known: TargetDelivery) -> str:
        """Tell one target; what it answers may be lost with us, and then it is told again, under the same ids."""
        known.attempts += 1
        try:
            known.told = self._tell(target, current)
        except DeliveryRefused as error:
            known.is_done, known.told = True, error.as_dict()
            return f"refused: {error.code}: {error.message}"
        except PenstockError as error:
            # Also what somebody has to mend first: a secret, a dictionary that is not there yet.
            pause = compute_delay(known.attempts, first=_FIRST, limit=_LONGEST)
            known.again_at, known.told = (self._clock.now() + pause).isoformat(), error.as_dict()
            return f"not yet: {error.message}"
        known.is_done, known.again_at = True, None
        return "done"

    def _tell(self, target: DeliveryTarget, current: CurrentState) -> Any:
        if target.webhook is not None:
            key = f"{current.pointer.run_id}:{target.digest}"
            return self._bridge.call(call_webhook(target.webhook, self._name, current, key))
        if target.flow is not None:
            return self._bridge.call(start_flow(target.flow, self._name, current))
        if target.dictionary is None:
            raise RuntimeError("a target is one of the three")
        with open_state(self._tree, self._name) as state:
            if state.pointer != current.pointer:
                hint = "that one is delivered next"
                raise Transient("SUPERSEDED", "another state was published meanwhile", hint=hint)
            if current.manifest["key"] != self._supplier.key:
                hint = "the next publication has the key that is configured now"
                raise Invalid("KEY_MISSING", "the current state was published under another key", hint=hint)
            return self._bridge.call(fill_dictionary(target.dictionary, self._supplier.key[0], state))
