"""Signals over Redis: Pub/Sub for speed, a stream for certainty."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

import structlog

from penstock.kernel.db.listener import NotificationInbox
from penstock.kernel.errors import BadConfig, Transient
from penstock.kernel.signals import Resync, Signal, checked_body
from penstock.kernel.signals.feed import SignalStream
from penstock.kernel.signals.redis.group import BODY, destroy, lag
from penstock.kernel.signals.redis.link import ANSWER_WITHIN, Mode, NodeConnections, named
from penstock.kernel.signals.redis.listener import RedisListener, StreamRoute

STREAM_LENGTH = 10_000
LEFTOVER_AFTER = timedelta(hours=1)
POLL = timedelta(seconds=1)
_BATCH = 100
_SIGNS_OF_LIFE = 10  # that may fail to appear before a listener is taken for dead
# A script, so that stream and channel have one order, also among several announcers.
_ANNOUNCE = f"""
for i = 3, #ARGV do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', '{BODY}', ARGV[i])
  redis.call('PUBLISH', ARGV[2], ARGV[i])
end
"""


class RedisSignals:
    """One channel and its stream, in a Redis Cluster or on a single Redis; to be closed at the end.

    Every signal comes twice to a listener whose paths are both well. A read of the stream waits for news as long as
    *poll*. A listener that shows Redis no sign of life for *leftover_after* is taken for dead and loses its group;
    should it live, it notices and resyncs.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        mode: Mode = "cluster",
        pub_channel: str,
        stream_key: str,
        group_prefix: str,
        stream_length: int = STREAM_LENGTH,
        username: str | None = None,
        password: str | None = None,
        tls: bool = False,
        tls_ca_file: str | None = None,
        leftover_after: timedelta = LEFTOVER_AFTER,
        poll: timedelta = POLL,
    ) -> None:
        if leftover_after < _SIGNS_OF_LIFE * poll:
            raise BadConfig(
                "REDIS_IDLE_TOO_SHORT", f"{leftover_after} is too short for those who show life every {poll}"
            )
        self._link = NodeConnections(
            nodes, mode, stream_key, username=username, password=password, tls=tls, tls_ca_file=tls_ca_file
        )
        self._route = StreamRoute(pub_channel, stream_key, group_prefix)
        self._stream_length = stream_length
        self._leftover_after, self._poll = leftover_after, poll

    async def announce(self, bodies: Sequence[str]) -> None:
        """Add to the stream, then publish, each body in its turn; Transient SIGNALS_DOWN when some may not be out."""
        checked = [checked_body(body) for body in bodies]
        for start in range(0, len(checked), _BATCH):
            await self._announce(checked[start : start + _BATCH])

    @asynccontextmanager
    async def listen(self, listener: str) -> AsyncIterator[AsyncIterator[Signal | Resync]]:
        """Hear everything from now on, however often Redis goes away and comes back meanwhile."""
        inbox, group = NotificationInbox(), self._route.group(listener)
        paths = RedisListener(
            self._link, self._route, group, inbox, poll=self._poll, leftover_after=self._leftover_after
        ).paths()
        try:
            yield SignalStream(inbox, paths)
        finally:
            for path in paths:
                path.cancel()
            await asyncio.gather(*paths, return_exceptions=True)
            await self._leave(group)

    async def lag(self) -> int:
        """The entries the slowest listener has yet to be handed; one that died counts until it is reaped."""
        return await self._link.ask(lambda redis: lag(redis, self._route.stream_key, self._route.group_prefix))

    async def check(self) -> None:
        """Raise Transient SIGNALS_DOWN unless the node that holds the stream answers."""
        await self._link.ask(lambda redis: redis.xlen(self._route.stream_key))

    async def close(self) -> None:
        """Close every connection; those who still listen are to be closed before."""
        await self._link.close()

    async def _announce(self, bodies: Sequence[str]) -> None:
        arguments = [str(self._stream_length), self._route.pub_channel, *bodies]
        await self._link.ask(lambda redis: redis.eval(_ANNOUNCE, 1, self._route.stream_key, *arguments))

    async def _leave(self, group: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                await self._link.ask(lambda redis: destroy(redis, self._route.stream_key, group))
        except (Transient, TimeoutError) as error:  # the other listeners reap it in time
            structlog.get_logger().info("signals_group_left", group=group, error=named(error))
