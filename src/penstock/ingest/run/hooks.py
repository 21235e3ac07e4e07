"""The callbacks of a run, and its outcome."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.model import DeliveryResult, RunManifest
from penstock.ingest.run.publish import OnStep
from penstock.ingest.transform.pipeline import Progress


class RunRecorder(Protocol):
    """A record of runs and of moved files outside of the tree."""

    def record_start(self, run_id: str, supplier: str) -> None: ...

    def record_move(self, supplier: str, run_id: str | None, name: str, to: str, reason: str) -> None: ...

    def record_end(self, manifest: dict[str, Any]) -> None: ...


class NullRecorder:
    """A recorder that does nothing: the tree alone is enough."""

    def record_start(self, run_id: str, supplier: str) -> None:
        pass

    def record_move(self, supplier: str, run_id: str | None, name: str, to: str, reason: str) -> None:
        pass

    def record_end(self, manifest: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a call: a run with its manifest, or the reason why there was nothing to do.

    *recovered* is the manifest of an earlier run that was killed and has been completed or given up by this call.
    """

    supplier: str
    manifest: RunManifest | None = None
    reason: str | None = None
    moved: dict[str, str] = field(default_factory=dict)
    deliveries: Mapping[str, DeliveryResult] = field(default_factory=dict)
    was_stopped: bool = False
    move_error: str | None = None
    recovered: Mapping[str, Any] | None = None

    @property
    def is_pass(self) -> bool:
        return self.manifest is None or self.manifest.status is IngestRunStatus.PASS

    def as_dict(self) -> dict[str, Any]:
        """Return the document that `penstock ingest run --json` prints."""
        return {
            "supplier": self.supplier,
            "status": self.manifest.status.value if self.manifest else "NOTHING_TO_DO",
            "reason": self.reason,
            "moved": self.moved,
            "moveError": self.move_error,
            "deliveries": {target: result.as_dict() for target, result in self.deliveries.items()},
            "manifest": self.manifest.as_dict() if self.manifest else None,
            "recovered": self.recovered,
        }


@dataclass(frozen=True)
class RunHooks:
    """The callbacks of a run."""

    recorder: RunRecorder = field(default_factory=NullRecorder)
    progress: Progress = lambda _rows, _part: None
    on_wait: Callable[[list[str], float], None] = lambda _names, _seconds: None
    should_stop: Callable[[], bool] = lambda: False
    on_step: OnStep = lambda _step: None
