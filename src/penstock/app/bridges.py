"""Adapters between parts: other parts as steps of flows (F14), and dictionaries that read a feed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from penstock.flows.kinds.platform import harvest, ingest, refdata, tracking
from penstock.flows.kinds.platform.harvest import HarvestOutputs
from penstock.flows.kinds.platform.ingest import IngestOutputs
from penstock.flows.kinds.platform.refdata import RefdataOutputs
from penstock.flows.kinds.platform.tracking import ShardInput
from penstock.flows.step import Workers
from penstock.harvest.api.queries import find_run
from penstock.harvest.config import HarvestSection
from penstock.harvest.consolidate.worker import OnPublished
from penstock.harvest.service import Harvest
from penstock.ingest.contract import FailureCode, IngestRunStatus
from penstock.ingest.run import ledger
from penstock.ingest.run.hooks import RunHooks
from penstock.ingest.run.outcome_log import log_deliveries, log_outcome
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.tree import paths
from penstock.ingest.tree.documents import encode_document, parse_document
from penstock.ingest.workspace import IngestWorkspace
from penstock.kernel.clock import Clock
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Conflict, NotFound
from penstock.refdata.apply import version_bump
from penstock.refdata.commands.service import Refdata
from penstock.refdata.contract import Command
from penstock.refdata.model import DictionaryKey, UpdateRecord
from penstock.tracking.contract import Stage
from penstock.tracking.contract import StageStatus as ShardStatus
from penstock.tracking.model import ShardRow
from penstock.tracking.service import Tracking

_ORIGIN = "diag/requester.json"  # a file of an ingest run that names the step that started it
_SEARCH_LIMIT = 20  # latest runs of a supplier among which the run of a step is searched


@dataclass(frozen=True)
class PartServices:
    """F14: the other parts that are available in this process."""

    harvest: Harvest | None = None
    refdata: Refdata | None = None
    tracking: Tracking | None = None
    workspace: IngestWorkspace | None = None
    ingest_runs: int = 1  # concurrent runs of ingest


def make_part_workers(services: PartServices) -> Workers:
    """Return the workers of the step kinds that call other parts."""
    workers = Workers()
    if services.harvest is not None:
        workers.worker(harvest.KIND)(harvest.make_harvest_handler(HarvestAdapter(services.harvest)))
    if services.refdata is not None:
        workers.worker(refdata.KIND)(refdata.make_refdata_handler(RefdataAdapter(services.refdata)))
    if services.tracking is not None:
        workers.worker(tracking.KIND)(tracking.make_tracking_handler(TrackingAdapter(services.tracking)))
    if services.workspace is not None:
        workers.worker(ingest.KIND)(ingest.make_ingest_handler(IngestAdapter(services.workspace), services.ingest_runs))
    return workers


class HarvestAdapter:
    """Harvest, as the flow steps of kind `harvest` use it."""

    def __init__(self, harvest: Harvest) -> None:
        self._harvest = harvest

    async def start(self, feed: str, by: str, *, full: bool, run_id: UUID) -> UUID | None:
        try:
            await self._harvest.start(feed, by, full=full, run_id=run_id)
        except Conflict as error:
            if error.code != "RUN_ACTIVE":
                raise
            return UUID(error.details["runId"])
        return None

    async def run(self, run_id: UUID) -> HarvestOutputs | None:
        row = await find_run(self._harvest.db, run_id)
        if row is None:
            return None
        outputs = {name: row[name] for name in HarvestOutputs.__slots__}
        return HarvestOutputs(**{**outputs, "records": int(row["records"])})  # PostgreSQL returns a sum as a decimal


class RefdataAdapter:
    """Refdata, as the flow steps of kind `refdata` use it."""

    def __init__(self, refdata: Refdata) -> None:
        self._refdata = refdata

    async def submit(self, tenant: str, command: Command, wait: timedelta | None) -> RefdataOutputs:
        return _make_refdata_outputs(await self._refdata.submit(tenant, command, wait))

    async def update(self, tenant: str, event_id: UUID) -> RefdataOutputs | None:
        try:
            return _make_refdata_outputs(await self._refdata.get_update(tenant, event_id))
        except NotFound:
            return None


def _make_refdata_outputs(update: UpdateRecord) -> RefdataOutputs:
    return RefdataOutputs(update.status, update.committed_version, update.error_code, update.error_message)


class TrackingAdapter:
    """Tracking, as the flow steps of kind `tracking` use it."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    async def list_shards(self, filename: str, stage: Stage) -> Sequence[ShardInput]:
        try:
            rows = await self._tracking.find_file(filename)
            return [await self._make_shard(row, stage) for row in rows]
        except NotFound:  # not registered yet, or deleted
            return []

    async def _make_shard(self, row: ShardRow, stage: Stage) -> ShardInput:
        stages = list(Stage)
        upto = stages[: stages.index(stage) + 1]
        if any(row.status[earlier] is ShardStatus.FAILED for earlier in upto):
            return ShardInput(
                row.shard, is_done=False, failure=(await self._tracking.explain(row.filename, row.shard)).why
            )
        return ShardInput(row.shard, is_done=row.status[stage] is ShardStatus.DONE)


class IngestAdapter:
    """Ingest, as the flow steps of kind `ingest` use it.

    A run is marked with the step that started it before it can publish anything, so that a repeated step finds it.
    """

    def __init__(self, workspace: IngestWorkspace) -> None:
        self._workspace = workspace
        self._tree = workspace.tree

    def find_last_run(self, supplier: str) -> str | None:
        return (ledger.load(self._tree, supplier).last_run or {}).get("run_id")

    def run(
        self, supplier: str, requester: str, after: str | None, should_stop: Callable[[], bool]
    ) -> IngestOutputs | None:
        if published := self._find_published(supplier, requester):
            results = self._workspace.deliver(supplier)  # the earlier run may have been killed before it delivered
            log_deliveries(supplier, {target: result.as_dict() for target, result in results.items()})
            return published
        hooks = RunHooks(should_stop=should_stop, on_step=self._make_marker(supplier, requester))
        outcome = self._workspace.run(supplier, hooks, waits=True)
        log_outcome(outcome.as_dict())
        if outcome.manifest is not None:
            return _make_outputs(outcome.manifest.as_dict())
        # The run of a killed attempt may have been completed now, or it failed and removed the file from the inbox.
        for outputs in self._find_runs(supplier, requester):
            if outputs.failure_code != FailureCode.INTERRUPTED:
                return outputs
        last = self.find_last_run(supplier)
        return self._read_outputs(last) if last is not None and last != after else None

    def _find_published(self, supplier: str, requester: str) -> IngestOutputs | None:
        return next((run for run in self._find_runs(supplier, requester) if run.status == IngestRunStatus.PASS), None)

    def _find_runs(self, supplier: str, requester: str) -> Iterator[IngestOutputs]:
        """Yield the ended runs that the step *requester* started, the latest first."""
        for run_id in sorted(self._tree.list_runs(supplier), reverse=True)[:_SEARCH_LIMIT]:
            if parse_document(self._tree.read(paths.make_run_path(run_id, _ORIGIN))).get("requester") == requester and (
                run := self._read_outputs(run_id)
            ):
                yield run

    def _read_outputs(self, run_id: str) -> IngestOutputs | None:
        manifest = parse_document(self._tree.read(paths.make_run_path(run_id, paths.MANIFEST)))
        return _make_outputs(manifest) if manifest else None

    def _make_marker(self, supplier: str, requester: str) -> Callable[[PublishStep], None]:
        def on_step(step: PublishStep) -> None:
            run_id = ledger.load(self._tree, supplier).running if step is PublishStep.STARTED else None
            if run_id is not None:
                self._tree.write(paths.make_run_path(run_id, _ORIGIN), encode_document({"requester": requester}))

        return on_step


def _make_outputs(manifest: dict[str, object]) -> IngestOutputs:
    return IngestOutputs(**{name: manifest[name] for name in IngestOutputs.__slots__})  # type: ignore[arg-type]


def renew_dictionaries(section: HarvestSection, clock: Clock) -> OnPublished:
    """Return a callback that gives the dictionaries of a feed a new version in the transaction that completes a run."""

    async def on_published(tx: Connection, feed: str, records: int) -> None:
        targets = [DictionaryKey(dictionary.tenant, dictionary.code) for dictionary in section.feeds[feed].dictionaries]
        await version_bump.bump_versions(tx, targets, source=f"harvest {feed}", items=records, now=clock.now())

    return on_published
