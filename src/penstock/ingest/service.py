"""§16, Ingestion: the orchestrator. It lets one run at a time take one file to the published state, or say why not."""

from typing import Any

from penstock.ingest.contract import Status
from penstock.ingest.model import checked_supplier
from penstock.ingest.run import ledger, recover
from penstock.ingest.run.hooks import Hooks, Outcome
from penstock.ingest.run.publish import Step
from penstock.ingest.run.run import Run
from penstock.ingest.tree.port import Tree
from penstock.kernel.clock import Clock, SystemClock


class Ingestion:
    """Runs of the suppliers of one tree."""

    def __init__(self, tree: Tree, holder: str, hooks: Hooks | None = None, clock: Clock | None = None) -> None:
        self._tree = tree
        self._holder = holder
        self._hooks = hooks or Hooks()
        self._clock = clock or SystemClock()

    def run(self, supplier: str, *, waits: bool = True) -> Outcome:
        """I4: one run, alone for its supplier; Conflict LOCKED when another is under way."""
        checked_supplier(supplier)
        with self._tree.lock(supplier, self._holder):
            self._hooks.on_step(Step.LOCKED)
            self._tree.prepare(supplier)
            known = ledger.load(self._tree, supplier)
            if (ended := recover.recover(self._tree, supplier, known, self._clock)) is not None:
                known.note(ended)
                self._record(ended)
                known.running = None
            self._hooks.on_step(Step.RECOVERED)
            run = Run(self._tree, supplier, known, self._hooks, self._clock)
            try:
                return run.run(waits=waits)
            finally:
                ledger.save(self._tree, supplier, known)

    def _record(self, ended: dict[str, Any]) -> None:
        """Tell of a run that was killed what it could not tell itself."""
        recorder, supplier, name = self._hooks.recorder, ended["supplier"], ended["input_filename"]
        if ended["status"] == Status.PASS.value and ended["moved_to"] is not None:
            recorder.moved(supplier, ended["run_id"], name, ended["moved_to"], "published")
        recorder.ended(ended)
