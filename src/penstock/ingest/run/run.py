"""The execution of a run, from the selection of a file to its publication or its failure."""

import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.ingest.contract import FailureCode, IngestRunStatus
from penstock.ingest.model import (
    InboxFile,
    RunArtifact,
    RunFailed,
    RunFailure,
    RunManifest,
    RunStats,
    check_supplier_name,
    make_run_id,
)
from penstock.ingest.run import ledger, publish, recover, select
from penstock.ingest.run.hooks import RunHooks, RunOutcome
from penstock.ingest.run.ledger import Ledger
from penstock.ingest.run.publish import CurrentState, Publication, PublishStep, read_versions
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
from penstock.kernel.status import pluralize
from penstock.kernel.telemetry.build import find_code_commit
from penstock.kernel.text import format_time

# Not the fault of the file: it stays in the inbox for the next run.
RETRIED = (
    FailureCode.CONFIG_DQ_MISSING,
    FailureCode.CONFIG_INVALID,
    FailureCode.FILE_MISSING,
    FailureCode.SUPERSEDED,
    FailureCode.INTERRUPTED,
)
# A machine that restarts may kill a few runs; a file that kills every run must not do so without end.
_MAX_KILLS = 10


class RunExecution:
    """The execution of one run; the supplier is locked."""

    def __init__(self, tree: FileTree, supplier: str, memory: Ledger, hooks: RunHooks, clock: Clock) -> None:
        self._tree = tree
        self._supplier = supplier
        self._ledger = memory
        self._hooks = hooks
        self._clock = clock
        self._moved: dict[str, str] = {}

    def run(self, *, waits: bool) -> RunOutcome:
        """Process the newest file of the inbox; with *waits*, wait for a file that may still be written."""
        try:
            with self._tree.open_config(self._supplier) as file:
                config, digest = load_supplier(file, self._tree.make_uri(paths.make_config_path(self._supplier)))
        except RunFailed as failed:
            return self._fail_without_config(failed)
        readable = self._list_readable(config, waits=waits)
        if self._hooks.should_stop():
            return RunOutcome(self._supplier, reason="the run was stopped", was_stopped=True)
        if not readable.arrivals:
            return RunOutcome(self._supplier, reason=_describe_waiting(readable))
        run_id = make_run_id(self._supplier, self._clock)
        with self._tree.open_work_folder(self._supplier, run_id) as work:
            current = publish.read_current_state(self._tree, self._supplier)
            return self._select(RunContext(run_id, config, digest, current, work, self._clock), readable)

    def _list_readable(self, config: Supplier, *, waits: bool) -> ReadableFiles:
        window = config.file_stability_window
        readable = select.list_readable(self._tree, self._supplier, self._ledger, window)
        if readable.arrivals or not readable.waiting or not waits:
            return readable
        self._hooks.on_wait([arrival.name for arrival in readable.waiting], window)
        ledger.save(self._tree, self._supplier, self._ledger)
        return select.wait_readable(self._tree, self._supplier, self._ledger, window, self._hooks.should_stop)

    def _fail_without_config(self, failed: RunFailed) -> RunOutcome:
        """I7, I14: fail the run, because quality limits are required; the files stay in the inbox."""
        readable = select.list_readable(self._tree, self._supplier, self._ledger, 0)
        if not readable.arrivals:
            return RunOutcome(self._supplier, reason=f"the inbox is empty; {failed.message}")
        run_id = make_run_id(self._supplier, self._clock)
        newest = readable.arrivals[0]
        context = RunContext(run_id, None, None, None, Path(), self._clock)
        self._start(context, newest)
        return self._fail(context, newest, None, RunStats(), failed)

    def _select(self, context: "RunContext", readable: ReadableFiles) -> RunOutcome:
        inbox = select.sort_inbox(self._tree, readable.arrivals, self._make_duplicate_check(context), context.work)
        self._hooks.on_step(PublishStep.COPIED)
        for arrival, sha256 in inbox.duplicates:
            is_current = context.current is not None and context.current.manifest.get("input_sha256") == sha256
            self._ledger.unchanged_files += is_current
            self._move(arrival, paths.make_duplicates_path(self._supplier), "accepted before", None)
        if inbox.failed is not None:
            arrival, failed = inbox.failed
            self._start(context, arrival)
            return self._fail(context, arrival, None, RunStats(), failed)
        if inbox.selected is None:
            reason = "all files were accepted before" if inbox.duplicates else "the files are still being written"
            return RunOutcome(self._supplier, reason=reason, moved=self._moved)
        for arrival in inbox.obsolete:
            self._move(arrival, paths.make_obsolete_path(self._supplier), "a newer file is in the inbox", None)
        self._hooks.on_step(PublishStep.SORTED)
        return self._ingest_file(context, inbox.selected)

    def _make_duplicate_check(self, context: "RunContext") -> Callable[[str], bool]:
        """I22: return a function that tells whether a content was accepted before (with `dedup: current`, last)."""
        current = context.current.manifest.get("input_sha256") if context.current else None

        def is_duplicate(sha256: str) -> bool:
            if sha256 == current:
                return True
            is_accepted = self._tree.read(paths.make_accepted_path(self._supplier, sha256)) is not None
            return is_accepted and context.config is not None and context.config.dedup == "accepted"

        return is_duplicate

    def _ingest_file(self, context: "RunContext", selected: SelectedFile) -> RunOutcome:
        self._start(context, selected.arrival, selected.sha256)
        out = context.work / "run"
        out.mkdir()
        stats = RunStats()
        try:
            with closing(ProcessedFile(out)) as processed:
                stats = processed.stats
                manifest = self._publish(context, selected, processed, out)
            return self._pass_run(context, selected, manifest)
        except RunFailed as failed:
            if failed.code not in RETRIED:
                self._store_artifacts(context, out, stats)
            return self._fail(context, selected.arrival, selected.sha256, stats, failed)
        except (PenstockError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - otherwise every run would crash on this file, without a record
            return self._crash(context, selected, stats, error)

    def _crash(self, context: "RunContext", selected: SelectedFile, stats: RunStats, error: Exception) -> RunOutcome:
        pointer = self._tree.read_pointer(self._supplier)
        if pointer is not None and pointer.run_id == context.run_id:
            raise error  # the state is published: the next run completes this run
        trace = "".join(traceback.format_exception(error))
        path = paths.make_run_path(context.run_id, paths.ERROR)
        self._tree.write(path, trace.encode(errors="replace"))
        hint = f"this is a bug in Penstock; the traceback is in {self._tree.make_uri(path)}"
        failed = RunFailed(FailureCode.INTERNAL, f"{type(error).__name__}: {error}", hint)
        return self._fail(context, selected.arrival, selected.sha256, stats, failed)

    def _publish(
        self, context: "RunContext", selected: SelectedFile, processed: ProcessedFile, out: Path
    ) -> RunManifest:
        """Process the file, check its quality, and publish it."""
        config, names = context.supplier_config, RunNames(context.run_id, self._supplier)
        self._check_file(selected)
        process_file(selected.copy, config, names, processed, self._report_progress)
        self._hooks.on_step(PublishStep.PROCESSED)
        settle_repeated_keys(processed, config, names, out)
        self._hold_facts(context, processed, names)
        check_quality(processed.stats, config)
        changes = publish.compare_states(self._tree, processed, config, self._supplier, context.current, context.work)
        if context.current is not None:
            check_guards(processed.stats, changes, context.current.as_previous, config)
        processed.close()
        self._hooks.on_step(PublishStep.CHECKED)
        manifest = replace(
            context.make_manifest(self._supplier, selected.arrival, selected.sha256, processed.stats),
            artifacts=publish.describe_artifacts(processed),
            fence=publish.compute_fence(self._tree, self._supplier, context.current, self._ledger.fence),
            changes=changes,
        )
        publication = Publication(self._tree, manifest, processed.stats, context.current, self._hooks.on_step)
        keys = context.work / paths.CHANGED_KEYS
        return publication.publish(processed.facts.path, processed.bad.path, keys, context.work)

    def _check_file(self, selected: SelectedFile) -> None:
        check_size(selected.arrival.name, selected.arrival.size)
        if self._ledger.killed_by == selected.sha256 and self._ledger.kills >= _MAX_KILLS:
            message = f"{self._ledger.kills} runs in a row were killed while they processed {selected.arrival.name}"
            hint = "find the cause, e.g. too little memory; then move the file from quarantine into the inbox"
            raise RunFailed(FailureCode.FILE_CRASHES_RUNS, message, hint)

    def _hold_facts(self, context: "RunContext", processed: ProcessedFile, names: RunNames) -> None:
        if context.current is None or not processed.held.count:
            return
        run_id, config = context.current.pointer.run_id, context.supplier_config
        with self._tree.open(paths.make_state_path(self._supplier, run_id, paths.FACTS)) as facts:
            index = build_index(facts, config, context.work / "index-to-hold")
            facts.seek(0)
            hold_facts(processed, index, facts, config, names, run_id)

    def _report_progress(self, rows: int, part: float | None) -> None:
        if self._hooks.should_stop():
            raise RunFailed(FailureCode.INTERRUPTED, "the run was stopped", "the next run processes the file again")
        self._hooks.progress(rows, part)

    def _start(self, context: "RunContext", arrival: InboxFile, sha256: str | None = None) -> None:
        self._ledger.running = context.run_id
        ledger.save(self._tree, self._supplier, self._ledger)
        started = {
            "run_id": context.run_id,
            "input_filename": arrival.name,
            "input_sha256": sha256,
            "started_at": format_time(context.started_at),
        }
        self._tree.write(paths.make_run_path(context.run_id, paths.STARTED), encode_document(started))
        self._hooks.recorder.record_start(context.run_id, self._supplier)
        self._hooks.on_step(PublishStep.STARTED)

    def _pass_run(self, context: "RunContext", selected: SelectedFile, manifest: RunManifest) -> RunOutcome:
        moved_to = move_error = None
        try:
            moved_to = self._move(
                selected.arrival, paths.make_archive_path(self._supplier), "published", context.run_id
            )
        except Transient as error:
            move_error = error.message  # the state is published; the next run treats the file as a duplicate
        self._hooks.on_step(PublishStep.MOVED)
        return replace(self._end_run(replace(manifest, moved_to=moved_to)), move_error=move_error)

    def _fail(
        self, context: "RunContext", arrival: InboxFile, sha256: str | None, stats: RunStats, failed: RunFailed
    ) -> RunOutcome:
        manifest = replace(
            context.make_manifest(self._supplier, arrival, sha256, stats),
            status=IngestRunStatus.FAIL,
            failure=RunFailure(failed.code, failed.message, failed.hint),
            artifacts=self._read_artifacts(context.run_id),
        )
        publish.write_manifest(self._tree, manifest)
        self._hooks.on_step(PublishStep.RECORDED)
        moved_to = None
        if failed.code not in RETRIED:
            moved_to = self._move(
                arrival, paths.make_broken_path(self._supplier), failed.code.value, context.run_id, ".failed"
            )
        self._hooks.on_step(PublishStep.MOVED)
        return self._end_run(replace(manifest, moved_to=moved_to))

    def _store_artifacts(self, context: "RunContext", out: Path, stats: RunStats) -> None:
        """Store facts and bad rows of a failed run, so that the cause can be found."""
        facts, bad = out / paths.FACTS, out / paths.BAD
        if facts.exists() and bad.exists() and stats.good_rows + stats.bad_rows:
            publish.store_artifacts(self._tree, context.run_id, facts, bad, stats)

    def _read_artifacts(self, run_id: str) -> dict[str, RunArtifact]:
        artifacts = {}
        for name in (paths.FACTS, paths.BAD, paths.STATS):
            with suppress(NotFound), self._tree.open(paths.make_run_path(run_id, name)) as content:
                artifacts[name] = hash_content(content)
        return artifacts

    def _end_run(self, manifest: RunManifest) -> RunOutcome:
        publish.write_manifest(self._tree, manifest)
        self._ledger.record_end(manifest.as_dict())
        self._hooks.recorder.record_end(manifest.as_dict())
        # Last: until here the next run would recover this one, and record what is missing.
        self._ledger.running = None
        was_stopped = manifest.failure is not None and manifest.failure.code is FailureCode.INTERRUPTED
        return RunOutcome(self._supplier, manifest, moved=self._moved, was_stopped=was_stopped)

    def _move(self, arrival: InboxFile, folder: str, reason: str, run_id: str | None, suffix: str = "") -> str | None:
        moved_to = self._tree.move(arrival, folder, suffix)
        if moved_to is not None:
            self._moved[arrival.name] = moved_to
            self._hooks.recorder.record_move(self._supplier, run_id, arrival.name, moved_to, reason)
        return moved_to


def _describe_waiting(readable: ReadableFiles) -> str:
    if not readable.waiting:
        return "the inbox is empty"
    names = ", ".join(arrival.name for arrival in readable.waiting[:5])
    return f"{pluralize(len(readable.waiting), 'file')} may still be written: {names}"


class RunContext:
    """The circumstances of a run: its id, its configuration, the published state, and its work folder."""

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
    def supplier_config(self) -> Supplier:
        if self.config is None:
            raise RuntimeError("a run without a configuration fails before its file is processed")
        return self.config

    def make_manifest(self, supplier: str, arrival: InboxFile, sha256: str | None, stats: RunStats) -> RunManifest:
        """Return the manifest of a run that passes; a run that fails replaces some fields."""
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
            code_commit=find_code_commit(),
            versions=read_versions(),
        )


class Ingestion:
    """The runs of the suppliers of one tree."""

    def __init__(self, tree: FileTree, holder: str, hooks: RunHooks | None = None, clock: Clock | None = None) -> None:
        self._tree = tree
        self._holder = holder
        self._hooks = hooks or RunHooks()
        self._clock = clock or SystemClock()

    def run(self, supplier: str, *, waits: bool = True) -> RunOutcome:
        """I4: lock *supplier*, recover a killed run, and execute one run; Conflict LOCKED if another run is active."""
        check_supplier_name(supplier)
        with self._tree.lock(supplier, self._holder):
            self._hooks.on_step(PublishStep.LOCKED)
            self._tree.prepare(supplier)
            memory = ledger.load(self._tree, supplier)
            recovered = recover.recover_run(self._tree, supplier, memory, self._clock)
            if recovered is not None:
                memory.record_end(recovered)
                self._record_recovered(recovered)
                memory.running = None
            self._hooks.on_step(PublishStep.RECOVERED)
            execution = RunExecution(self._tree, supplier, memory, self._hooks, self._clock)
            try:
                return replace(execution.run(waits=waits), recovered=recovered)
            finally:
                ledger.save(self._tree, supplier, memory)

    def _record_recovered(self, manifest: dict[str, Any]) -> None:
        """Record the end of a killed run, which could not record it itself."""
        recorder, supplier, name = self._hooks.recorder, manifest["supplier"], manifest["input_filename"]
        if manifest["status"] == IngestRunStatus.PASS.value and manifest["moved_to"] is not None:
            recorder.record_move(supplier, manifest["run_id"], name, manifest["moved_to"], "published")
        recorder.record_end(manifest)
