"""I23: the watcher of the inboxes of all suppliers. Each run is a process of its own, so that it may crash."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic

import orjson
import structlog

from penstock.ingest.config import IngestSection
from penstock.ingest.contract import IngestRunStatus
from penstock.ingest.metrics import IngestMetrics
from penstock.ingest.model import RunFailed
from penstock.ingest.run import ledger, select
from penstock.ingest.run.outcome_log import log_deliveries, log_outcome
from penstock.ingest.workspace import IngestWorkspace
from penstock.kernel.errors import Conflict, PenstockError
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.periodic import run_periodically

_METRICS_INTERVAL = timedelta(seconds=10)
_DELIVERY_INTERVAL = timedelta(seconds=5)
_MAX_PAUSE = timedelta(minutes=5)
_STOP_TIMEOUT = 30.0


@dataclass(frozen=True)
class WatchCommand:
    """The command line of a run in a process of its own: arguments of `penstock ingest run`, and its environment."""

    arguments: Sequence[str]
    environment: Mapping[str, str]


class InboxWatcher:
    """Checks the inboxes periodically, and runs the suppliers that have a readable file."""

    def __init__(
        self, section: IngestSection, workspace: IngestWorkspace, command: WatchCommand, metrics: IngestMetrics
    ) -> None:
        self._section = section
        self._workspace = workspace
        self._command = command
        self._metrics = metrics
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._capacity = asyncio.Semaphore(section.runs_at_once)
        self._pauses: dict[str, tuple[Backoff, float]] = {}
        self._logged_errors: dict[str, str] = {}
        self._log = structlog.get_logger()

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Watch until the end; active runs are then stopped, and process their file again in the next run."""
        section = self._section
        tasks = [
            ("ingest inboxes", self.check_inboxes, section.poll),
            ("ingest deliveries", self._deliver, _DELIVERY_INTERVAL),
            ("ingest metrics", self.update_metrics, _METRICS_INTERVAL),
            ("ingest gc", self._delete_expired, section.gc),
        ]
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop_runs)
            for name, task, every in tasks:
                await stack.enter_async_context(run_periodically(name, task, every))
            yield

    async def check_inboxes(self) -> None:
        """Start a run for every supplier that has a readable file and no active run."""
        for supplier in await asyncio.to_thread(self._workspace.tree.list_suppliers):
            if supplier in self._runs:
                continue
            if supplier in self._pauses and monotonic() < self._pauses[supplier][1]:
                continue
            with self._isolate_errors(supplier, "inbox"):
                if await asyncio.to_thread(self._has_readable_file, supplier):
                    self._runs[supplier] = asyncio.create_task(self._run(supplier), name=f"ingest {supplier}")

    @contextlib.contextmanager
    def _isolate_errors(self, supplier: str, task: str) -> Iterator[None]:
        """Log the errors of one supplier, so that the others are still served."""
        try:
            yield
        except PenstockError as error:
            self._log.warning(
                "supplier_check_failed", supplier=supplier, task=task, code=error.code, error=error.message
            )
        except Exception:  # noqa: BLE001 - an edge
            self._log.exception("supplier_check_crashed", supplier=supplier, task=task)

    def _has_readable_file(self, supplier: str) -> bool:
        """Return whether a run would find a file; the ledger remembers the files, because they must stay unchanged."""
        tree = self._workspace.tree
        try:
            window = self._workspace.load_config(supplier).file_stability_window
        except RunFailed as failed:
            self._log_config_error(supplier, failed)
            return False
        self._logged_errors.pop(supplier, None)
        if not tree.list_arrivals(supplier):
            return False
        try:
            with tree.lock(supplier, "watch"):
                memory = ledger.load(tree, supplier)
                before = dict(memory.seen)
                readable = select.list_readable(tree, supplier, memory, window)
                # Not saved if a file is readable: the run must come to the same result, and a rename from a
                # temporary name is visible only until the new name is in the ledger.
                if memory.seen != before and not readable.arrivals:
                    ledger.save(tree, supplier, memory)
        except Conflict:
            return False  # another process runs this supplier
        return bool(readable.arrivals)

    def _log_config_error(self, supplier: str, failed: RunFailed) -> None:
        """Log an error of a configuration once, not at every check."""
        if self._logged_errors.get(supplier) != failed.message:
            self._logged_errors[supplier] = failed.message
            self._log.warning(
                "supplier_config_invalid", supplier=supplier, code=failed.code.value, error=failed.message
            )

    async def _run(self, supplier: str) -> None:
        try:
            async with self._capacity:
                exit_code, output = await self._run_process(supplier)
            self._handle_result(supplier, exit_code, output)
        finally:
            del self._runs[supplier]

    async def _run_process(self, supplier: str) -> tuple[int, bytes]:
        """Execute one run as a process; return its exit code and its standard output."""
        command = [sys.executable, "-m", "penstock.cli.main", "ingest", "run", supplier, "--no-wait", "--json"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *self._command.arguments,
            stdout=asyncio.subprocess.PIPE,
            env=self._command.environment,
            start_new_session=True,
        )
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            await _stop_process(process)
            raise
        return process.returncode or 0, output

    def _handle_result(self, supplier: str, exit_code: int, output: bytes) -> None:
        # A failed run and a damaged state both exit with 1; only the failed run prints an outcome.
        if exit_code not in (0, 1) or not output:
            backoff = self._pauses.get(supplier, (Backoff(limit=_MAX_PAUSE), 0.0))[0]
            pause = backoff.compute_next().total_seconds()
            self._pauses[supplier] = (backoff, monotonic() + pause)
            self._log.warning("ingest_process_failed", supplier=supplier, exit_code=exit_code, retry_in_seconds=pause)
            return
        self._pauses.pop(supplier, None)
        outcome = orjson.loads(output)
        log_outcome(outcome)
        if (manifest := outcome["manifest"]) is not None:
            self._metrics.count_run(supplier, IngestRunStatus(manifest["status"]), manifest["failure_code"])

    async def _deliver(self) -> None:
        for supplier in await asyncio.to_thread(self._workspace.tree.list_suppliers):
            if supplier in self._runs:
                continue
            with self._isolate_errors(supplier, "deliveries"):
                results = await asyncio.to_thread(self._workspace.deliver, supplier)
                log_deliveries(supplier, {target: result.as_dict() for target, result in results.items()})

    async def update_metrics(self) -> None:
        """Set the gauges to the status of all suppliers."""
        self._metrics.update(await asyncio.to_thread(self._workspace.read_statuses))

    async def _delete_expired(self) -> None:
        result = await asyncio.to_thread(lambda: self._workspace.delete_expired(is_dry=False))
        for entry in result.expired:
            event = "expired_entry_deleted" if entry.is_deleted else "expired_entry_retained"
            self._log.info(event, path=entry.path, bytes=entry.size, reason=entry.reason)

    async def _stop_runs(self) -> None:
        runs = list(self._runs.values())
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def _stop_process(process: asyncio.subprocess.Process) -> None:
    """Stop a run, and kill it if it does not stop in time; the next run recovers it."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
