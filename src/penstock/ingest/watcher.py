"""I23: the daemon that watches the inboxes of all suppliers; each run is a process of its own, so that it may die."""

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
from penstock.ingest.workspace import IngestWorkspace
from penstock.kernel.errors import Conflict, PenstockError
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.periodic import run_periodically

_SHOW = timedelta(seconds=10)
_DELIVER = timedelta(seconds=5)
_PATIENCE = 30.0


@dataclass(frozen=True)
class WatchCommand:
    """How a run is started as a process of its own: arguments of `penstock ingest run`, and its environment."""

    arguments: Sequence[str]
    environment: Mapping[str, str]


class InboxWatcher:
    """Looks into the inboxes now and then, and runs what is ready."""

    def __init__(
        self, section: IngestSection, place: IngestWorkspace, command: WatchCommand, metrics: IngestMetrics
    ) -> None:
        self._section = section
        self._place = place
        self._command = command
        self._metrics = metrics
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(section.runs_at_once)
        self._pauses: dict[str, tuple[Backoff, float]] = {}
        self._said: dict[str, str] = {}
        self._log = structlog.get_logger().bind(part="ingest")

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch until the end; runs under way are asked to stop, and give up what they were at."""
        section = self._section
        chores = [
            ("ingest inboxes", self.look, section.poll),
            ("ingest deliveries", self._deliver, _DELIVER),
            ("ingest metrics", self.show, _SHOW),
            ("ingest gc", self._sweep, section.gc),
        ]
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop)
            for name, chore, every in chores:
                await stack.enter_async_context(run_periodically(name, chore, every))
            yield

    async def look(self) -> None:
        """Run whatever is ready for suppliers that are not served already."""
        for supplier in await asyncio.to_thread(self._place.tree.list_suppliers):
            if supplier in self._runs:
                continue
            if supplier in self._pauses and monotonic() < self._pauses[supplier][1]:
                continue
            with self._alone(supplier, "inbox"):
                if await asyncio.to_thread(self._is_ready, supplier):
                    self._runs[supplier] = asyncio.create_task(self._run(supplier), name=f"ingest {supplier}")

    @contextlib.contextmanager
    def _alone(self, supplier: str, chore: str) -> Iterator[None]:
        """What is wrong with one supplier does not hold up the others."""
        try:
            yield
        except PenstockError as error:
            self._log.warning(
                "ingest_chore_failed", supplier=supplier, chore=chore, code=error.code, error=error.message
            )
        except Exception:  # noqa: BLE001 - an edge
            self._log.exception("ingest_chore_crashed", supplier=supplier, chore=chore)

    def _is_ready(self, supplier: str) -> bool:
        """Whether a file can be taken; what was seen is remembered, as a file is ready when it stays as it was."""
        tree = self._place.tree
        try:
            window = self._place.config(supplier).file_stability_window
        except RunFailed as failed:
            self._say(supplier, failed)
            return False
        self._said.pop(supplier, None)
        if not tree.list_arrivals(supplier):
            return False
        try:
            with tree.lock(supplier, "watch"):
                known = ledger.load(tree, supplier)
                before = dict(known.seen)
                ready = select.look(tree, supplier, known, window)
                # The run has to find it ready too: that it was a draft is known only until its new name is noted.
                if known.seen != before and not ready.arrivals:
                    ledger.save(tree, supplier, known)
        except Conflict:
            return False  # somebody runs it by hand
        return bool(ready.arrivals)

    def _say(self, supplier: str, failed: RunFailed) -> None:
        """Once, not at every look."""
        if self._said.get(supplier) != failed.message:
            self._said[supplier] = failed.message
            self._log.warning("ingest_not_configured", supplier=supplier, code=failed.code.value, error=failed.message)

    async def _run(self, supplier: str) -> None:
        try:
            async with self._room:
                code, told = await self._spawned(supplier)
            self._judge(supplier, code, told)
        finally:
            del self._runs[supplier]

    async def _spawned(self, supplier: str) -> tuple[int, bytes]:
        """One run as a command of its own; how it ended, and what it said."""
        command = [sys.executable, "-m", "penstock.cli.main", "ingest", "run", supplier, "--no-wait", "--json"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *self._command.arguments,
            stdout=asyncio.subprocess.PIPE,
            env=self._command.environment,
            start_new_session=True,
        )
        try:
            told, _ = await process.communicate()
        except asyncio.CancelledError:
            await _ended(process)
            raise
        return process.returncode or 0, told

    def _judge(self, supplier: str, code: int, told: bytes) -> None:
        log = self._log.bind(supplier=supplier, exit_code=code)
        if code not in (0, 1) or not told:  # also what is damaged ends with 1, and tells it on standard error
            backoff = self._pauses.get(supplier, (Backoff(limit=timedelta(minutes=5)), 0.0))[0]
            pause = backoff.next().total_seconds()
            self._pauses[supplier] = (backoff, monotonic() + pause)
            log.warning("ingest_run_broke", again_in=pause)
            return
        self._pauses.pop(supplier, None)
        outcome = orjson.loads(told)
        manifest = outcome["manifest"]
        if manifest is None:
            log.info("ingest_nothing_to_do", reason=outcome["reason"], moved=outcome["moved"])
            return
        self._metrics.count(supplier, IngestRunStatus(manifest["status"]), manifest["failure_code"])
        names = ("run_id", "status", "failure_code", "failure", "good_rows", "bad_rows", "moved_to")
        log.info("ingest_run_ended", **{name: manifest[name] for name in names})

    async def _deliver(self) -> None:
        for supplier in await asyncio.to_thread(self._place.tree.list_suppliers):
            if supplier in self._runs:
                continue
            with self._alone(supplier, "deliveries"):
                for target, how in (await asyncio.to_thread(self._place.deliver, supplier)).items():
                    self._log.info("ingest_delivery", supplier=supplier, target=target, outcome=how)

    async def show(self) -> None:
        """Set the gauges."""
        self._metrics.show(await asyncio.to_thread(self._place.standings))

    async def _sweep(self) -> None:
        swept = await asyncio.to_thread(lambda: self._place.sweep(is_dry=False))
        for one in swept.found:
            self._log.info(
                "ingest_removed" if one.is_gone else "ingest_kept", path=one.path, bytes=one.size, why=one.why
            )

    async def _stop(self) -> None:
        runs = list(self._runs.values())
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Asked to stop, and killed when it does not; the next run takes care of what it was at."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            async with asyncio.timeout(_PATIENCE):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
