"""Signals on Redis: Pub/Sub for speed, and a stream so that none is lost."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

import structlog

from penstock.kernel.db.listener import NotificationInbox
from penstock.kernel.errors import BadConfig, Transient
from penstock.kernel.signals import Resync, Signal, validate_body
from penstock.kernel.signals.redis.group import BODY, destroy, measure_lag
from penstock.kernel.signals.redis.link import ANSWER_WITHIN, Mode, NodeConnections, describe_error
from penstock.kernel.signals.redis.listener import RedisListener, StreamRoute
from penstock.kernel.signals.stream import SignalStream

STREAM_LENGTH = 10_000
DEAD_AFTER = timedelta(hours=1)
POLL = timedelta(seconds=1)
_BATCH = 100
_MISSED_POLLS = 10  # polls that a listener must miss before it is considered dead
# A script, so that stream and channel have one order, also among several announcers.
_ANNOUNCE = f"""
for i = 3, #ARGV do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', '{BODY}', ARGV[i])
  redis.call('PUBLISH', ARGV[2], ARGV[i])
end
"""


class RedisSignals:
    """A channel and its stream, in a Redis Cluster or on a single Redis; close it at the end.

    A listener receives every signal twice while both of its paths work. A read of the stream waits for *poll*. A
    listener that does not read for *dead_after* is considered dead and loses its consumer group; if it is alive, it
    notices that and resyncs.
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
        dead_after: timedelta = DEAD_AFTER,
        poll: timedelta = POLL,
    ) -> None:
        if dead_after < _MISSED_POLLS * poll:
            problem = f"dead_after ({dead_after}) must be at least {_MISSED_POLLS} times poll ({poll})"
            raise BadConfig("REDIS_IDLE_TOO_SHORT", problem)
        self._link = NodeConnections(
            nodes, mode, stream_key, username=username, password=password, tls=tls, tls_ca_file=tls_ca_file
        )
        self._route = StreamRoute(pub_channel, stream_key, group_prefix)
        self._stream_length = stream_length
        self._dead_after, self._poll = dead_after, poll

    async def announce(self, bodies: Sequence[str]) -> None:
        """Add each body to the stream and publish it; Transient SIGNALS_DOWN if some may not have been sent."""
        valid = [validate_body(body) for body in bodies]
        for start in range(0, len(valid), _BATCH):
            await self._announce(valid[start : start + _BATCH])

    @asynccontextmanager
    async def listen(self, listener: str) -> AsyncIterator[AsyncIterator[Signal | Resync]]:
        """Receive all signals from now on, also after outages of Redis."""
        inbox, group = NotificationInbox(), self._route.name_group(listener)
        paths = RedisListener(
            self._link, self._route, group, inbox, poll=self._poll, dead_after=self._dead_after
        ).start_paths()
        try:
            yield SignalStream(inbox, paths)
        finally:
            for path in paths:
                path.cancel()
            await asyncio.gather(*paths, return_exceptions=True)
            await self._leave(group)

    async def measure_lag(self) -> int:
        """Return the number of entries that the slowest listener has not received; a dead one counts until reaped."""
        return await self._link.query(
            lambda redis: measure_lag(redis, self._route.stream_key, self._route.group_prefix)
        )

    async def check(self) -> None:
        """Raise Transient SIGNALS_DOWN unless the node of the stream answers."""
        await self._link.query(lambda redis: redis.xlen(self._route.stream_key))

    async def close(self) -> None:
        """Close all connections; close the listeners first."""
        await self._link.close()

    async def _announce(self, bodies: Sequence[str]) -> None:
        arguments = [str(self._stream_length), self._route.pub_channel, *bodies]
        await self._link.query(lambda redis: redis.eval(_ANNOUNCE, 1, self._route.stream_key, *arguments))

    async def _leave(self, group: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                await self._link.query(lambda redis: destroy(redis, self._route.stream_key, group))
        except (Transient, TimeoutError) as error:  # another listener reaps the group later
            structlog.get_logger().info("signals_group_not_deleted", group=group, error=describe_error(error))
