"""Who is told of a run while it goes on, and who may stop it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.model import RunManifest
from penstock.ingest.run.publish import OnStep
from penstock.ingest.transform.pipeline import Progress


class RunRecorder(Protocol):
    """Told of what happens, so that others can see it."""

    def started(self, run_id: str, supplier: str) -> None: ...

    def moved(self, supplier: str, run_id: str | None, name: str, to: str, why: str) -> None: ...

    def ended(self, manifest: dict[str, Any]) -> None: ...


class NullRecorder:
    """A folder is enough."""

    def started(self, run_id: str, supplier: str) -> None:
        pass

    def moved(self, supplier: str, run_id: str | None, name: str, to: str, why: str) -> None:
        pass

    def ended(self, manifest: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class RunOutcome:
    """What a call came to: a run with its manifest, or nothing to do and why."""

    supplier: str
    manifest: RunManifest | None = None
    nothing: str | None = None
    moved: dict[str, str] = field(default_factory=dict)
    deliveries: dict[str, str] = field(default_factory=dict)
    was_stopped: bool = False

    @property
    def is_pass(self) -> bool:
        return self.manifest is None or self.manifest.status is IngestRunStatus.PASS


@dataclass(frozen=True)
class RunHooks:
    """Who is told on the way, and who may stop it."""

    recorder: RunRecorder = field(default_factory=NullRecorder)
    progress: Progress = lambda _rows, _part: None
    waiting: Callable[[list[str], float], None] = lambda _names, _seconds: None
    should_stop: Callable[[], bool] = lambda: False
    on_step: OnStep = lambda _step: None
