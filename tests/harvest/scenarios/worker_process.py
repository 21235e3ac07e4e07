"""The harvest role in a forked process that dies at a chosen step, or when a test kills it.

A step is a statement, a request to the source or a call of the storage, made for one kind of work; a worker dies just
before it. The product knows nothing of steps: they are put around what it calls from here.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg

from penstock.app.parts import open_harvest
from penstock.app.platform import open_platform
from penstock.harvest.consolidate.worker import Consolidator
from penstock.harvest.contract import CONSOLIDATIONS, PLANS, WORK_ITEMS
from penstock.harvest.fetch.worker import Fetcher
from penstock.harvest.plan.planner import Planner
from penstock.harvest.runtime import run_harvest
from penstock.kernel.bus.kafka.subscription import KafkaSubscription
from penstock.kernel.bus.postgres import PostgresSubscription
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings
from tests.support.crash import CrashingProcess, KillAtCall, call_before, redirect_output

ROLES = {PLANS: Planner, WORK_ITEMS: Fetcher, CONSOLIDATIONS: Consolidator}
NEVER = 0
_working_on: ContextVar[str] = ContextVar("working on", default="")
Act = Callable[..., Awaitable[Any]]


class HarvestWorkerProcess(CrashingProcess):
    """A process that works on all feeds until it dies; at the *nth* step of work on *topic*, if it gets that far."""

    def __init__(self, settings: Settings, log: Path, topic: str = "", nth: int = NEVER) -> None:
        super().__init__(_run, settings, log, topic, nth)


def _run(settings: Settings, log: Path, topic: str, nth: int) -> None:
    redirect_output(log)
    if nth:
        _put_steps(topic, nth)
    asyncio.run(_work(settings))


async def _work(settings: Settings) -> None:
    async with (
        open_platform(settings, Telemetry()) as platform,
        open_harvest(settings, platform) as harvest,
        run_harvest(harvest),
    ):
        await asyncio.Event().wait()


def _put_steps(topic: str, nth: int) -> None:
    count = KillAtCall(nth)

    def step() -> None:
        if _working_on.get() == topic:
            count()

    for name, role in ROLES.items():
        _during(role, "handle", functools.partial(_always, name))
    for subscription in (PostgresSubscription, KafkaSubscription):
        _during(subscription, "settle", lambda queue: str(queue.name))
    for name in ("execute", "fetch", "fetchrow", "fetchval"):
        call_before(asyncpg.Connection, name, step)
    for name in ("get", "create", "replace"):
        call_before(FolderStorage, name, step)
    call_before(aiohttp.ClientSession, "_request", step)


def _always(topic: str, _role: Any) -> str:
    return topic


def _during(owner: Any, name: str, topic_of: Callable[[Any], str]) -> None:
    """All that *owner* does in this method, and what it starts, is work on a topic."""
    act: Act = getattr(owner, name)

    @functools.wraps(act)
    async def acting(self: Any, *args: Any) -> Any:
        before = _working_on.set(topic_of(self))
        try:
            return await act(self, *args)
        finally:
            _working_on.reset(before)

    setattr(owner, name, acting)
