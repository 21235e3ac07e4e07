"""Two paths into one inbox: Pub/Sub, which is instant and may lose, and a consumer group, which catches up."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from penstock.kernel.db.listener import MissedNotifications, Notification, NotificationInbox
from penstock.kernel.signals.redis.group import ConsumerGroup, reap
from penstock.kernel.signals.redis.link import ANSWER_WITHIN, TROUBLE, NodeConnections, named
from penstock.kernel.tasks.backoff import Backoff

_RETRY_AT_MOST = timedelta(seconds=5)
_PING_AFTER = 5.0


@dataclass(frozen=True, slots=True)
class StreamRoute:
    """The names in Redis that make one channel."""

    pub_channel: str
    stream_key: str
    group_prefix: str

    def group(self, listener: str) -> str:
        return f"{self.group_prefix}:{listener}"


class RedisListener:
    """Fills *inbox* for as long as its two paths run; first in it is Missed."""

    def __init__(
        self,
        link: NodeConnections,
        route: StreamRoute,
        group: str,
        inbox: NotificationInbox,
        *,
        poll: timedelta,
        leftover_after: timedelta,
    ) -> None:
        self._link, self._route, self._group, self._inbox = link, route, group, inbox
        self._poll, self._leftover_after = poll, leftover_after
        self._log = structlog.get_logger().bind(group=group)
        self._tried, self._begun = asyncio.Event(), asyncio.Event()
        self._was_lost = False
        self._reap_at = 0.0

    def paths(self) -> list["asyncio.Task[None]"]:
        """The two paths, running."""
        ways = {"pubsub": self._hear, "stream": self._follow}
        return [asyncio.create_task(self._keep(name, way), name=f"{self._group} {name}") for name, way in ways.items()]

    async def _keep(self, name: str, path: Callable[[Backoff], Awaitable[None]]) -> None:
        backoff = Backoff(limit=_RETRY_AT_MOST)
        while True:
            try:
                await path(backoff)
            except TROUBLE as error:
                self._log.warning("signals_lost", path=name, error=named(error))
            await asyncio.sleep(backoff.next().total_seconds())

    async def _hear(self, backoff: Backoff) -> None:
        """The instant path, until it is lost."""
        try:
            async with self._link.line() as line:
                pubsub = line.pubsub()  # it ends with its line
                async with asyncio.timeout(ANSWER_WITHIN):
                    await pubsub.subscribe(self._route.pub_channel)
                    await pubsub.get_message(timeout=None)
                self._tried.set()
                await self._begun.wait()
                if self._was_lost:
                    self._inbox.put(MissedNotifications("Pub/Sub was lost"))
                backoff.reset()
                await self._pass_on(pubsub)
        finally:
            self._tried.set()
            self._was_lost = True

    async def _pass_on(self, pubsub: PubSub) -> None:
        while True:
            message = await pubsub.get_message(timeout=_PING_AFTER)
            if message is None:  # finds out when nobody said goodbye
                async with asyncio.timeout(ANSWER_WITHIN):
                    await pubsub.ping()
                    message = await pubsub.get_message(timeout=None)
            if message["type"] == "message":
                self._inbox.put(Notification(message["data"]))

    async def _follow(self, backoff: Backoff) -> None:
        """The path that catches up, until it is lost."""
        # Subscribed first: else a signal of before the subscription could be overtaken by one of after it.
        await self._tried.wait()
        async with self._link.line() as line:
            group = ConsumerGroup(line, self._route.stream_key, self._group)
            async with asyncio.timeout(ANSWER_WITHIN):
                made = await group.enter(afresh=not self._begun.is_set())
            lost = "the stream was lost" if made else "the connection was lost"
            self._inbox.put(MissedNotifications(lost if self._begun.is_set() else "the listener began"))
            self._begun.set()
            while True:
                async with asyncio.timeout(self._poll.total_seconds() + ANSWER_WITHIN):
                    await self._reap_when_due(line)
                    await self._take_batch(group)
                backoff.reset()

    async def _take_batch(self, group: ConsumerGroup) -> None:
        batch = await group.read(self._poll)
        for body in batch.bodies:
            self._inbox.put(Notification(body))
        if batch.has_gap:
            self._inbox.put(MissedNotifications("the stream was trimmed before it was read"))
        await group.acknowledge(batch)

    async def _reap_when_due(self, line: "Redis") -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._reap_at:
            self._reap_at = now + self._leftover_after.total_seconds() / 4
            for name in await reap(line, self._route.stream_key, self._route.group_prefix, self._leftover_after):
                self._log.info("signals_leftover_reaped", leftover=name)
