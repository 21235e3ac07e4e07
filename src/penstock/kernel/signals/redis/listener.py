"""Two paths into one inbox: Pub/Sub, which is fast but may lose signals, and a consumer group, which loses none."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from penstock.kernel.db.listener import MissedNotifications, Notification, NotificationInbox
from penstock.kernel.signals.redis.group import ConsumerGroup, reap
from penstock.kernel.signals.redis.link import ANSWER_WITHIN, CONNECTION_ERRORS, NodeConnections, describe_error
from penstock.kernel.tasks.backoff import Backoff

_MAX_RETRY_DELAY = timedelta(seconds=5)
_PING_AFTER = 5.0


@dataclass(frozen=True, slots=True)
class StreamRoute:
    """The names of one channel in Redis."""

    pub_channel: str
    stream_key: str
    group_prefix: str

    def name_group(self, listener: str) -> str:
        return f"{self.group_prefix}:{listener}"


class RedisListener:
    """The two paths that fill *inbox*; its first item is MissedNotifications."""

    def __init__(
        self,
        link: NodeConnections,
        route: StreamRoute,
        group: str,
        inbox: NotificationInbox,
        *,
        poll: timedelta,
        dead_after: timedelta,
    ) -> None:
        self._link, self._route, self._group, self._inbox = link, route, group, inbox
        self._poll, self._dead_after = poll, dead_after
        self._log = structlog.get_logger().bind(group=group)
        self._has_tried, self._has_joined = asyncio.Event(), asyncio.Event()
        self._was_lost = False
        self._reap_at = 0.0

    def start_paths(self) -> list["asyncio.Task[None]"]:
        """Start the two paths and return their tasks."""
        paths = {"pubsub": self._run_pubsub, "stream": self._run_stream}
        return [
            asyncio.create_task(self._run_path(name, path), name=f"{self._group} {name}")
            for name, path in paths.items()
        ]

    async def _run_path(self, name: str, path: Callable[[Backoff], Awaitable[None]]) -> None:
        backoff = Backoff(limit=_MAX_RETRY_DELAY)
        while True:
            try:
                await path(backoff)
            except CONNECTION_ERRORS as error:
                self._log.warning("signals_disconnected", path=name, error=describe_error(error))
            await asyncio.sleep(backoff.compute_next().total_seconds())

    async def _run_pubsub(self, backoff: Backoff) -> None:
        """Run the fast path until its connection is lost."""
        try:
            async with self._link.connection() as connection:
                pubsub = connection.pubsub()  # ends with its connection
                async with asyncio.timeout(ANSWER_WITHIN):
                    await pubsub.subscribe(self._route.pub_channel)
                    await pubsub.get_message(timeout=None)
                self._has_tried.set()
                await self._has_joined.wait()
                if self._was_lost:
                    self._inbox.put(MissedNotifications("Pub/Sub was lost"))
                backoff.reset()
                await self._forward(pubsub)
        finally:
            self._has_tried.set()
            self._was_lost = True

    async def _forward(self, pubsub: PubSub) -> None:
        while True:
            message = await pubsub.get_message(timeout=_PING_AFTER)
            if message is None:  # detects a connection that broke silently
                async with asyncio.timeout(ANSWER_WITHIN):
                    await pubsub.ping()
                    message = await pubsub.get_message(timeout=None)
            if message["type"] == "message":
                self._inbox.put(Notification(message["data"]))

    async def _run_stream(self, backoff: Backoff) -> None:
        """Run the reliable path until its connection is lost."""
        # After the subscription: otherwise a signal from before it could arrive after one from after it.
        await self._has_tried.wait()
        async with self._link.connection() as connection:
            group = ConsumerGroup(connection, self._route.stream_key, self._group)
            async with asyncio.timeout(ANSWER_WITHIN):
                is_created = await group.join(at_end=not self._has_joined.is_set())
            reason = "the stream was lost" if is_created else "the connection was lost"
            self._inbox.put(MissedNotifications(reason if self._has_joined.is_set() else "the listener has started"))
            self._has_joined.set()
            while True:
                async with asyncio.timeout(self._poll.total_seconds() + ANSWER_WITHIN):
                    await self._reap_when_due(connection)
                    await self._take_batch(group)
                backoff.reset()

    async def _take_batch(self, group: ConsumerGroup) -> None:
        batch = await group.read(self._poll)
        for body in batch.bodies:
            self._inbox.put(Notification(body))
        if batch.has_gap:
            self._inbox.put(MissedNotifications("the stream was trimmed before it was read"))
        await group.acknowledge(batch)

    async def _reap_when_due(self, connection: "Redis") -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._reap_at:
            self._reap_at = now + self._dead_after.total_seconds() / 4
            for name in await reap(connection, self._route.stream_key, self._route.group_prefix, self._dead_after):
                self._log.info("signals_group_reaped", reaped=name)
