"""One run, from the choice of a file to its end: published, or failed with a code."""

import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from penstock.ingest.contract import FailureCode, IngestRunStatus
from penstock.ingest.model import (
    InboxFile,
    RunArtifact,
    RunFailed,
    RunFailure,
    RunManifest,
    RunStats,
    checked_supplier,
    new_run_id,
)
from penstock.ingest.run import ledger, publish, recover, select
from penstock.ingest.run.hooks import RunHooks, RunOutcome
from penstock.ingest.run.ledger import Ledger
from penstock.ingest.run.publish import CurrentState, Publication, PublishStep, versions
from penstock.ingest.run.quality import check_guards, check_quality
from penstock.ingest.run.select import ReadableFiles, SelectedFile
from penstock.ingest.supplier import Supplier, load_supplier
from penstock.ingest.transform.gate import check_size
from penstock.ingest.transform.key_index import build_index
from penstock.ingest.transform.pipeline import ProcessedFile, RunNames, hold_facts, process_file, settle_repeated_keys
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import encode_document, hash_content
from penstock.ingest.tree.port import FileTree
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import NotFound, PenstockError, Transient
from penstock.kernel.telemetry.build import code_commit

# Not the file's fault: it stays in the inbox, and is looked at again.
_STAYS = (
    FailureCode.CONFIG_DQ_MISSING,
    FailureCode.CONFIG_INVALID,
    FailureCode.FILE_MISSING,
    FailureCode.SUPERSEDED,
    FailureCode.INTERRUPTED,
)


_MOST_KILLS = 10  # a machine that is restarted may kill some; a file that does it every time must not do so for ever


class RunExecution:
    """One run, from the lock to its end."""

    def __init__(self, tree: FileTree, supplier: str, known: Ledger, hooks: RunHooks, clock: Clock) -> None:
        self._tree = tree
        self._supplier = supplier
        self._ledger = known
        self._hooks = hooks
        self._clock = clock
        self._moved: dict[str, str] = {}

    def run(self, *, waits: bool) -> RunOutcome:
        try:
            with self._tree.open_config(self._supplier) as file:
                config, digest = load_supplier(file, self._tree.uri(paths.config(self._supplier)))
        except RunFailed as failed:
            return self._without_config(failed)
        ready = self._ready(config, waits=waits)
        if self._hooks.should_stop():
            return RunOutcome(self._supplier, nothing="it was asked to stop", was_stopped=True)
        if not ready.arrivals:
            names = ", ".join(one.name for one in ready.waiting[:5])
            why = f"{len(ready.waiting)} files may still be written: {names}" if ready.waiting else "the inbox is empty"
            return RunOutcome(self._supplier, nothing=why)
        run_id = new_run_id(self._supplier, self._clock)
        with self._tree.open_work_folder(self._supplier, run_id) as work:
            current = publish.current_state(self._tree, self._supplier)
            return self._choose(RunContext(run_id, config, digest, current, work, self._clock), ready)

    def _ready(self, config: Supplier, *, waits: bool) -> ReadableFiles:
        window = config.file_stability_window
        ready = select.look(self._tree, self._supplier, self._ledger, window)
        if ready.arrivals or not ready.waiting or not waits:
            return ready
        self._hooks.waiting([one.name for one in ready.waiting], window)
        ledger.save(self._tree, self._supplier, self._ledger)
        return select.wait(self._tree, self._supplier, self._ledger, window, self._hooks.should_stop)

    def _without_config(self, failed: RunFailed) -> RunOutcome:
        """I7, I14: no run without quality asked for; the files wait in the inbox until it is."""
        ready = select.look(self._tree, self._supplier, self._ledger, 0)
        if not ready.arrivals:
            return RunOutcome(self._supplier, nothing=f"the inbox is empty; {failed.message}")
        run_id = new_run_id(self._supplier, self._clock)
        newest = ready.arrivals[0]
        begun = RunContext(run_id, None, None, None, Path(), self._clock)
        self._start(begun, newest)
        return self._fail(begun, newest, None, RunStats(), failed)

    def _choose(self, begun: "RunContext", ready: ReadableFiles) -> RunOutcome:
        found = select.sort(self._tree, ready.arrivals, self._is_known(begun), begun.work)
        self._hooks.on_step(PublishStep.COPIED)
        for arrival, sha256 in found.duplicates:
            is_current = begun.current is not None and begun.current.manifest.get("input_sha256") == sha256
            self._ledger.equal_shas += is_current
            self._move(arrival, paths.duplicates(self._supplier), "known already", None)
        if found.failed is not None:
            arrival, failed = found.failed
            self._start(begun, arrival)
            return self._fail(begun, arrival, None, RunStats(), failed)
        if found.chosen is None:
            said = "only files that were accepted before" if found.duplicates else "the files are still being written"
            return RunOutcome(self._supplier, nothing=said, moved=self._moved)
        for arrival in found.obsolete:
            self._move(arrival, paths.obsolete(self._supplier), "a newer file is there", None)
        self._hooks.on_step(PublishStep.SORTED)
        return self._ingest(begun, found.chosen)

    def _is_known(self, begun: "RunContext") -> Callable[[str], bool]:
        """I22: accepted ever, or, where a supplier may go back to an older file, the one that is current."""
        current = begun.current.manifest.get("input_sha256") if begun.current else None

        def is_known(sha256: str) -> bool:
            if sha256 == current:
                return True
            is_accepted = self._tree.read(paths.accepted(self._supplier, sha256)) is not None
            return is_accepted and begun.config is not None and begun.config.dedup == "accepted"

        return is_known

    def _ingest(self, begun: "RunContext", chosen: SelectedFile) -> RunOutcome:
        self._start(begun, chosen.arrival, chosen.sha256)
        out = begun.work / "run"
        out.mkdir()
        stats = RunStats()
        try:
            with closing(ProcessedFile(out)) as made:
                stats = made.stats
                published = self._process(begun, chosen, made, out)
            return self._passed(begun, chosen, published)
        except RunFailed as failed:
            if failed.code not in _STAYS:
                self._keep_what_there_is(begun, out, stats)
            return self._fail(begun, chosen.arrival, chosen.sha256, stats, failed)
        except (PenstockError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - an edge: it would come again with every run, and nobody knew why
            return self._crashed(begun, chosen, stats, error)

    def _crashed(self, begun: "RunContext", chosen: SelectedFile, stats: RunStats, error: Exception) -> RunOutcome:
        pointer = self._tree.read_pointer(self._supplier)
        if pointer is not None and pointer.run_id == begun.run_id:
            raise error  # what is published has passed: the next run finishes it
        structlog.get_logger().error("ingest_run_crashed", run_id=begun.run_id, exc_info=error)
        told = "".join(traceback.format_exception(error))
        self._tree.write(paths.run(begun.run_id, paths.ERROR), told.encode(errors="replace"))
        hint = f"this is a mistake in Penstock; {paths.ERROR} of the run tells where"
        failed = RunFailed(FailureCode.INTERNAL, f"{type(error).__name__}: {error}", hint)
        return self._fail(begun, chosen.arrival, chosen.sha256, stats, failed)

    def _process(self, begun: "RunContext", chosen: SelectedFile, made: ProcessedFile, out: Path) -> RunManifest:
        config, names = begun.configured, RunNames(begun.run_id, self._supplier)
        check_size(chosen.arrival.name, chosen.arrival.size)
        if self._ledger.killed_by == chosen.sha256 and self._ledger.kills >= _MOST_KILLS:
            said = f"{self._ledger.kills} runs in a row died on {chosen.arrival.name}"
            raise RunFailed(
                FailureCode.FILE_CRASHES_RUNS, said, "see what killed them; then put it into the inbox again"
            )
        process_file(chosen.copy, config, names, made, self._told)
        self._hooks.on_step(PublishStep.PROCESSED)
        settle_repeated_keys(made, config, names, out)
        self._hold(begun, made, names)
        check_quality(made.stats, config)
        changes = publish.compare(self._tree, made, config, self._supplier, begun.current, begun.work)
        if begun.current is not None:
            check_guards(made.stats, changes, begun.current.before, config)
        made.close()
        self._hooks.on_step(PublishStep.JUDGED)
        manifest = replace(
            begun.manifest(self._supplier, chosen.arrival, chosen.sha256, made.stats),
            artifacts=publish.artifacts(made),
            fence=publish.next_fence(self._tree, self._supplier, begun.current, self._ledger.fence),
            changes=changes,
        )
        publication = Publication(self._tree, manifest, made.stats, begun.current, self._hooks.on_step)
        return publication.publish(made.facts.path, made.bad.path, begun.work / paths.CHANGED_KEYS, begun.work)

    def _hold(self, begun: "RunContext", made: ProcessedFile, names: RunNames) -> None:
        if begun.current is None or not made.held.count:
            return
        run_id = begun.current.pointer.run_id
        with self._tree.open(paths.state(self._supplier, run_id, paths.FACTS)) as facts:
            old = build_index(facts, begun.configured, begun.work / "index-to-hold")
            facts.seek(0)
            hold_facts(made, old, facts, begun.configured, names, run_id)

    def _told(self, rows: int, part: float | None) -> None:
        if self._hooks.should_stop():
            raise RunFailed(FailureCode.INTERRUPTED, "it was asked to stop", "the next run takes the file again")
        self._hooks.progress(rows, part)

    def _start(self, begun: "RunContext", arrival: InboxFile, sha256: str | None = None) -> None:
        self._ledger.running = begun.run_id
        ledger.save(self._tree, self._supplier, self._ledger)
        told = {"run_id": begun.run_id, "input_filename": arrival.name, "input_sha256": sha256}
        started = {**told, "started_at": begun.started_at.isoformat()}
        self._tree.write(paths.run(begun.run_id, paths.STARTED), encode_document(started))
        self._hooks.recorder.started(begun.run_id, self._supplier)
        self._hooks.on_step(PublishStep.STARTED)

    def _passed(self, begun: "RunContext", chosen: SelectedFile, manifest: RunManifest) -> RunOutcome:
        try:
            moved = self._move(chosen.arrival, paths.archive(self._supplier), "published", begun.run_id)
        except Transient as error:
            # It is published all the same; the next run finds the file, and knows its content.
            structlog.get_logger().warning("ingest_file_not_moved", file=chosen.arrival.name, error=error.message)
            moved = None
        self._hooks.on_step(PublishStep.MOVED)
        return self._end(replace(manifest, moved_to=moved))

    def _fail(
        self, begun: "RunContext", arrival: InboxFile, sha256: str | None, stats: RunStats, failed: RunFailed
    ) -> RunOutcome:
        manifest = begun.manifest(self._supplier, arrival, sha256, stats)
        failure = RunFailure(failed.code, failed.message, failed.hint)
        manifest = replace(
            manifest, status=IngestRunStatus.FAIL, failure=failure, artifacts=self._artifacts(begun.run_id)
        )
        publish.note(self._tree, manifest)
        self._hooks.on_step(PublishStep.NOTED)
        moved = None
        if failed.code not in _STAYS:
            moved = self._move(arrival, paths.broken(self._supplier), failed.code.value, begun.run_id, ".failed")
        self._hooks.on_step(PublishStep.MOVED)
        return self._end(replace(manifest, moved_to=moved))

    def _keep_what_there_is(self, begun: "RunContext", out: Path, stats: RunStats) -> None:
        """A run that failed leaves what it made, so that people see why."""
        facts, bad = out / paths.FACTS, out / paths.BAD
        if facts.exists() and bad.exists() and stats.good_rows + stats.bad_rows:
            publish.keep_artifacts(self._tree, begun.run_id, facts, bad, stats)

    def _artifacts(self, run_id: str) -> dict[str, RunArtifact]:
        found = {}
        for name in (paths.FACTS, paths.BAD, paths.STATS):
            with suppress(NotFound), self._tree.open(paths.run(run_id, name)) as content:
                found[name] = hash_content(content)
        return found

    def _end(self, manifest: RunManifest) -> RunOutcome:
        publish.note(self._tree, manifest)
        self._ledger.note(manifest.as_dict())
        self._hooks.recorder.ended(manifest.as_dict())
        # Last: what could not be recorded is found again by the next run.
        self._ledger.running = None
        was_stopped = manifest.failure is not None and manifest.failure.code is FailureCode.INTERRUPTED
        return RunOutcome(self._supplier, manifest, moved=self._moved, was_stopped=was_stopped)

    def _move(self, arrival: InboxFile, folder: str, why: str, run_id: str | None, suffix: str = "") -> str | None:
        to = self._tree.move(arrival, folder, suffix)
        if to is not None:
            self._moved[arrival.name] = to
            self._hooks.recorder.moved(self._supplier, run_id, arrival.name, to, why)
        return to


class RunContext:
    """What is known of a run before its file is read."""

    def __init__(
        self,
        run_id: str,
        config: Supplier | None,
        digest: str | None,
        current: CurrentState | None,
        work: Path,
        clock: Clock,
    ) -> None:
        self.run_id = run_id
        self.config = config
        self.current = current
        self.work = work
        self.started_at = clock.now()
        self._digest = digest
        self._clock = clock

    @property
    def configured(self) -> Supplier:
        if self.config is None:
            raise RuntimeError("a run without a configuration does not get here")
        return self.config

    def manifest(self, supplier: str, arrival: InboxFile, sha256: str | None, stats: RunStats) -> RunManifest:
        return RunManifest(
            run_id=self.run_id,
            supplier=supplier,
            input_filename=arrival.name,
            input_sha256=sha256,
            input_size=arrival.size,
            started_at=self.started_at,
            finished_at=max(self._clock.now(), self.started_at),
            status=IngestRunStatus.PASS,
            good_rows=stats.good_rows,
            bad_rows=stats.bad_rows,
            config_sha256=self._digest,
            key=self.config.key if self.config else (),
            previous_run=self.current.pointer.run_id if self.current else None,
            code_commit=code_commit(),
            versions=versions(),
        )


class Ingestion:
    """Runs of the suppliers of one tree."""

    def __init__(self, tree: FileTree, holder: str, hooks: RunHooks | None = None, clock: Clock | None = None) -> None:
        self._tree = tree
        self._holder = holder
        self._hooks = hooks or RunHooks()
        self._clock = clock or SystemClock()

    def run(self, supplier: str, *, waits: bool = True) -> RunOutcome:
        """I4: one run, alone for its supplier; Conflict LOCKED when another is under way."""
        checked_supplier(supplier)
        with self._tree.lock(supplier, self._holder):
            self._hooks.on_step(PublishStep.LOCKED)
            self._tree.prepare(supplier)
            known = ledger.load(self._tree, supplier)
            if (ended := recover.recover(self._tree, supplier, known, self._clock)) is not None:
                known.note(ended)
                self._record(ended)
                known.running = None
            self._hooks.on_step(PublishStep.RECOVERED)
            run = RunExecution(self._tree, supplier, known, self._hooks, self._clock)
            try:
                return run.run(waits=waits)
            finally:
                ledger.save(self._tree, supplier, known)

    def _record(self, ended: dict[str, Any]) -> None:
        """Tell of a run that was killed what it could not tell itself."""
        recorder, supplier, name = self._hooks.recorder, ended["supplier"], ended["input_filename"]
        if ended["status"] == IngestRunStatus.PASS.value and ended["moved_to"] is not None:
            recorder.moved(supplier, ended["run_id"], name, ended["moved_to"], "published")
        recorder.ended(ended)
