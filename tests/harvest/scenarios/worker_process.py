"""The harvest role in a forked process that dies at a chosen step, or when a test kills it.

A step is a statement, a request to the source or a call of the storage, for one kind of work. The worker dies just
before the step. Steps are added by wrapping the functions that the product calls.
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
_topic: ContextVar[str] = ContextVar("topic", default="")
Act = Callable[..., Awaitable[Any]]


class HarvestWorkerProcess(CrashingProcess):
    """A process that works on all feeds until it is killed, or until the *nth* step of work on *topic*."""

    def __init__(self, settings: Settings, log: Path, topic: str = "", nth: int = NEVER) -> None:
        super().__init__(_run, settings, log, topic, nth)


def _run(settings: Settings, log: Path, topic: str, nth: int) -> None:
    redirect_output(log)
    if nth:
        _wrap_steps(topic, nth)
    asyncio.run(_run_role(settings))


async def _run_role(settings: Settings) -> None:
    async with (
        open_platform(settings, Telemetry()) as platform,
        open_harvest(settings, platform) as harvest,
        run_harvest(harvest),
    ):
        await asyncio.Event().wait()


def _wrap_steps(topic: str, nth: int) -> None:
    count = KillAtCall(nth)

    def step() -> None:
        if _topic.get() == topic:
            count()

    for name, role in ROLES.items():
        _wrap_method(role, "handle", functools.partial(_get_topic, name))
    for subscription in (PostgresSubscription, KafkaSubscription):
        _wrap_method(subscription, "settle", lambda queue: str(queue.name))
    for name in ("execute", "fetch", "fetchrow", "fetchval"):
        call_before(asyncpg.Connection, name, step)
    for name in ("get", "create", "replace"):
        call_before(FolderStorage, name, step)
    call_before(aiohttp.ClientSession, "_request", step)


def _get_topic(topic: str, _role: Any) -> str:
    return topic


def _wrap_method(owner: Any, name: str, topic_of: Callable[[Any], str]) -> None:
    """Mark all calls of this method, and the tasks that it starts, as work on a topic."""
    method: Act = getattr(owner, name)

    @functools.wraps(method)
    async def wrapped(self: Any, *args: Any) -> Any:
        before = _topic.set(topic_of(self))
        try:
            return await method(self, *args)
        finally:
            _topic.reset(before)

    setattr(owner, name, wrapped)
