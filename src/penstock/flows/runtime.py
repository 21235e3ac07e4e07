"""The background of flows: periodic tasks for runs and schedules, and workers that execute steps."""

from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from penstock.flows.api.queries import FlowEvents
from penstock.flows.config import FlowsSection
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.engine.engine import MOVES, FlowEngine
from penstock.flows.engine.operations import RunOperations
from penstock.flows.kinds import http, python
from penstock.flows.kinds.query import make_query
from penstock.flows.kinds.registry import WAITING, open_catalogue
from penstock.flows.maintenance import FlowMaintenance
from penstock.flows.metrics import FlowMetrics
from penstock.flows.model import RUN, STEP
from penstock.flows.step import KindContext, Workers
from penstock.flows.worker.local import LocalWorkSource
from penstock.flows.worker.loop import StepWorker
from penstock.kernel.db.database import Database
from penstock.kernel.ids import make_worker_name
from penstock.kernel.states.event_stream import ChangeNotifications, JournalTail
from penstock.kernel.storage import Storage
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.telemetry.telemetry import Telemetry

# The statements of the engine are long: planning costs more than execution, so force generic plans.
SESSION = {"plan_cache_mode": "force_generic_plan"}


@dataclass(frozen=True)
class FlowsPlatform:
    """The section, the ports and the services that the workers of flows use."""

    section: FlowsSection
    telemetry: Telemetry
    db: Database
    storage: Storage
    catalogue: FlowCatalogue
    engine: FlowEngine
    operations: RunOperations
    live: FlowEvents
    metrics: FlowMetrics


@asynccontextmanager
async def open_engine(
    db: Database, storage: Storage, section: FlowsSection, telemetry: Telemetry
) -> AsyncIterator[FlowsPlatform]:
    """Open the engine and the catalogue of flows on *db*, without workers."""
    catalogue = open_catalogue(section, db.clock)
    checks = (catalogue.input_checks, catalogue.report_checks)
    async with FlowEngine.open(db, storage, catalogue, checks[0], section, checks[1]) as engine:
        live = FlowEvents([JournalTail(db, (RUN.name, STEP.name))], [ChangeNotifications(engine.notifier, MOVES)])
        operations, metrics = RunOperations(engine, storage), FlowMetrics(telemetry.registry)
        yield FlowsPlatform(section, telemetry, db, storage, catalogue, engine, operations, live, metrics)


@asynccontextmanager
async def run_flows(
    platform: FlowsPlatform,
    others: Workers,
    *,
    queries: Database | None,
    drain: timedelta,
    kinds: Collection[str] = (),
) -> AsyncIterator[None]:
    """Run the periodic tasks and the workers; with *kinds*, execute only steps of these kinds.

    *others* execute the steps that call other parts; *queries* is the database that steps may read.
    """
    section, name = platform.section, make_worker_name("flows")
    maintenance = FlowMaintenance(
        platform.engine, platform.catalogue, platform.storage, platform.metrics, platform.telemetry.tracer
    )
    async with AsyncExitStack() as stack:
        for task in maintenance.list_periodic_tasks():
            await stack.enter_async_context(run_periodically(*task))
        workers = (await _open_workers(platform, others, queries, stack)).select_kinds(kinds)
        work_source = LocalWorkSource(platform.engine, platform.storage)
        for waits, concurrency in ((False, section.work.concurrency), (True, section.work.waiting)):
            group = Workers()
            group.handlers = {kind: call for kind, call in workers.handlers.items() if (kind in WAITING) == waits}
            if group.handlers:
                worker = StepWorker(
                    work_source,
                    group,
                    platform.telemetry,
                    platform.metrics,
                    name=f"{name}/waiting" if waits else name,
                    concurrency=concurrency,
                    lease_for=section.lease,
                )
                await stack.enter_async_context(worker.run(drain))
        yield


async def _open_workers(
    platform: FlowsPlatform, others: Workers, queries: Database | None, stack: AsyncExitStack
) -> Workers:
    section, opened = platform.section, Workers()
    query = make_query(queries) if queries is not None else None
    from_modules = platform.catalogue.make_workers(KindContext(section, query, platform.db.clock))
    opened.worker(http.KIND)(await stack.enter_async_context(http.open_http_handler(section.http)))
    opened.worker(python.KIND)(python.make_python_handler(section.python))
    for workers in (others, *from_modules):
        opened.add(workers)
    return opened
