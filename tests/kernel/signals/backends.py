"""The implementations of the signals port, with operations for tests."""

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from penstock.kernel.db.database import Database
from penstock.kernel.signals import Signals
from penstock.kernel.signals.postgres import PostgresSignals
from penstock.kernel.signals.redis import RedisSignals
from tests.services.redis import RedisCluster, RedisServer

_numbers = itertools.count()


class SignalsBackend(Protocol):
    """A channel that no other test uses."""

    @property
    def signals(self) -> Signals: ...

    @property
    def child(self) -> list[str]:
        """Return the arguments with which `listener` listens to the same channel."""

    async def cut(self) -> None:
        """Break the fast connection of the listeners."""


class PostgresSignalsBackend:
    def __init__(self, db: Database) -> None:
        self._db = db
        self.signals = PostgresSignals(db, "changes")
        self.child = ["postgres", db.dsn, "changes"]

    async def cut(self) -> None:
        terminated = await self._db.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'penstock-listen'"
        )
        assert terminated


@dataclass
class RedisSignalsBackend:
    """A channel in a shared Redis that no other test uses."""

    redis: RedisCluster | RedisServer
    signals: RedisSignals
    name: str
    child: list[str] = field(default_factory=list)

    @property
    def stream(self) -> str:
        return f"{self.name}:stream"

    @property
    def server(self) -> Any:
        """Return a client of the node of the stream."""
        return self.redis.holder(self.stream)

    @property
    def groups(self) -> set[str]:
        return {group["name"] for group in self.server.xinfo_groups(self.stream)}

    async def cut(self) -> None:
        assert self.redis.client_kill_pubsub()

    def add(self, body: str) -> None:
        """Add to the stream only, like a signal that Pub/Sub has lost."""
        self.server.xadd(self.stream, {"body": body})

    def publish(self, body: str) -> None:
        self.server.publish(f"{self.name}:pub", body)


@asynccontextmanager
async def redis_backend(redis: RedisCluster | RedisServer, **options: Any) -> AsyncIterator[RedisSignalsBackend]:
    """Open a channel with a fresh name, and close it."""
    name = f"t{os.getpid()}-{next(_numbers)}"
    mode: Literal["cluster", "single"] = "cluster" if isinstance(redis, RedisCluster) else "single"
    signals = RedisSignals(
        redis.addresses,
        mode=mode,
        pub_channel=f"{name}:pub",
        stream_key=f"{name}:stream",
        group_prefix=name,
        **options,
    )
    try:
        yield RedisSignalsBackend(redis, signals, name, ["redis", ",".join(redis.addresses), mode, name])
    finally:
        await signals.close()
