"""The role of flows: it keeps runs going, and does the steps of the built-in kinds."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from penstock.app.bridges import TiedDictionaries, TiedFeeds, TiedFiles, TiedSuppliers
from penstock.app.platform import Platform, open_database, open_for_queues
from penstock.flows.config import FlowsSection
from penstock.flows.definition.catalogue import Catalogue
from penstock.flows.engine.operations import Management
from penstock.flows.kinds import http, python
from penstock.flows.kinds.market.ohlcv import read_only
from penstock.flows.kinds.market.workers import market_workers
from penstock.flows.kinds.platform import harvest, ingest, refdata, tracking
from penstock.flows.kinds.registry import check_inputs
from penstock.flows.maintenance import Keeper
from penstock.flows.metrics import FlowMetrics
from penstock.flows.model import RUN, STEP
from penstock.flows.service import MOVES, FlowEngine
from penstock.flows.step import Workers
from penstock.flows.worker.local import DirectCounter
from penstock.flows.worker.loop import StepWorker
from penstock.harvest.service import Harvest
from penstock.ingest.workspace import Workplace
from penstock.kernel.config.loader import resolve
from penstock.kernel.db.database import Database
from penstock.kernel.errors import BadConfig
from penstock.kernel.ids import worker_name
from penstock.kernel.states.event_stream import Live, Ringing, Tail
from penstock.kernel.storage import Storage
from penstock.kernel.tasks.periodic import repeating
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.commands.service import Refdata
from penstock.settings import Settings
from penstock.tracking.service import Tracking

# The statements of the engine are long: to plan each of them anew the first times costs more than to run it.
_PLANS = {"plan_cache_mode": "force_generic_plan"}
WAITING = frozenset({harvest.KIND, ingest.KIND, refdata.KIND, tracking.KIND})  # they wait for others, and do little


@dataclass(frozen=True)
class FlowsPlatform:
    """What the role of flows stands on."""

    settings: Settings
    telemetry: Telemetry
    db: Database
    storage: Storage
    catalogue: Catalogue
    engine: FlowEngine
    management: Management
    live: Live
    metrics: FlowMetrics


@dataclass(frozen=True)
class Ties:
    """F14: the other parts, as far as they are here."""

    harvest: Harvest | None = None
    refdata: Refdata | None = None
    tracking: Tracking | None = None
    place: Workplace | None = None


@asynccontextmanager
async def open_flows(settings: Settings, platform: Platform) -> AsyncIterator[FlowsPlatform]:
    """Flows on the *platform*'s database, in sessions of its own: what it asks, it asks by an index."""
    section, storage = settings.flows, platform.storage
    async with open_for_queues(settings, platform, section.lease, _PLANS) as db:
        catalogue = Catalogue(section, kind_checks=check_inputs)
        async with FlowEngine.open(db, storage, catalogue, check_inputs, section) as engine:
            yield FlowsPlatform(
                settings,
                platform.telemetry,
                db,
                storage,
                catalogue,
                engine,
                Management(engine, storage),
                Live([Tail(db, (RUN.name, STEP.name))], [Ringing(engine.bell, MOVES)]),
                FlowMetrics(platform.telemetry.registry),
            )


@asynccontextmanager
async def flowing(platform: FlowsPlatform, ties: Ties, kinds: Collection[str] = ()) -> AsyncIterator[None]:
    """Keep runs going and do their steps, until the end; only of some *kinds*, when they are named."""
    settings, name = platform.settings, worker_name("flows")
    tracer = platform.telemetry.tracer
    keeper = Keeper(platform.engine, platform.catalogue, platform.storage, platform.metrics, tracer)
    async with AsyncExitStack() as stack:
        for chore in keeper.chores():
            await stack.enter_async_context(repeating(*chore))
        known = await _workers(platform, ties, stack)
        counter = DirectCounter(platform.engine, platform.storage)
        for waits, concurrency in ((False, settings.flows.work.concurrency), (True, settings.flows.work.waiting)):
            some = _some(known, kinds, waits=waits)
            if some.handlers:
                worker = StepWorker(
                    counter,
                    some,
                    platform.telemetry,
                    platform.metrics,
                    name=f"{name}/waiting" if waits else name,
                    concurrency=concurrency,
                    lease_for=settings.flows.lease,
                )
                await stack.enter_async_context(worker.working(settings.server.drain_timeout))
        yield


async def _workers(platform: FlowsPlatform, ties: Ties, stack: AsyncExitStack) -> Workers:
    """Everybody who does steps in this process."""
    section, known = platform.settings.flows, Workers()
    query = None
    if section.database is not None:
        query = read_only(await stack.enter_async_context(open_database(platform.settings, section.database)))
    image_token, llm_token = _tokens(section)
    known.add(market_workers(section, query, image_token=image_token, llm_token=llm_token, clock=platform.db.clock))
    known.worker(http.KIND)(await stack.enter_async_context(http.http_worker(section.http)))
    known.worker(python.KIND)(python.python_worker(section.python))
    if ties.harvest is not None:
        known.worker(harvest.KIND)(harvest.harvest_worker(TiedFeeds(ties.harvest)))
    if ties.refdata is not None:
        known.worker(refdata.KIND)(refdata.refdata_worker(TiedDictionaries(ties.refdata)))
    if ties.tracking is not None:
        known.worker(tracking.KIND)(tracking.tracking_worker(TiedFiles(ties.tracking)))
    if ties.place is not None:
        at_once = platform.settings.ingest.runs_at_once
        known.worker(ingest.KIND)(ingest.ingest_worker(TiedSuppliers(ties.place), at_once))
    for workers in platform.catalogue.workers:
        known.add(workers)
    return known


def _some(known: Workers, kinds: Collection[str], *, waits: bool) -> Workers:
    """Those of the *kinds* that are wanted, all when none are named."""
    if unknown := sorted(set(kinds) - set(known.handlers)):
        hint = f"here are: {', '.join(sorted(known.handlers))}"
        raise BadConfig("UNKNOWN_KIND", f"nobody here does steps of the kind {unknown[0]}", hint=hint)
    some = Workers()
    for kind, handler in known.handlers.items():
        if (not kinds or kind in kinds) and (kind in WAITING) == waits:
            some.worker(kind)(handler)
    return some


def _tokens(section: FlowsSection) -> Sequence[str | None]:
    return [
        resolve(token, f"flows.{name}.token") if token else None
        for name, token in (("images", section.images.token), ("llm", section.llm.token))
    ]
