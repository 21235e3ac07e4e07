"""Connections to the node of one key, in a Redis Cluster or on a single Redis."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from random import sample
from typing import Any, Literal, TypeAlias, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, RedisError

from penstock.kernel.errors import BadConfig, Transient
from penstock.kernel.tasks.backoff import Backoff

Mode: TypeAlias = Literal["cluster", "single"]
Address: TypeAlias = tuple[str, int]
Answer = TypeVar("Answer")

ANSWER_WITHIN = 2.0
CONNECTION_ERRORS = (RedisError, OSError)
_QUERY_TIMEOUT = 10.0
_TRIES = 4


class NodeConnections:
    """Connections to the node of *key*, one of which is kept open for single queries.

    The cluster client of redis-py is not used: it reconnects silently, but a listener must know of that, and after an
    error it closes the connections of its other users. A key is on one node, which every node knows.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        mode: Mode,
        key: str,
        *,
        username: str | None = None,
        password: str | None = None,
        tls: bool = False,
        tls_ca_file: str | None = None,
    ) -> None:
        if not nodes or (mode == "single" and len(nodes) > 1):
            expected = "one node" if nodes else "at least one node"
            raise BadConfig("REDIS_NODES", f"mode {mode} requires {expected}, but there are {len(nodes)}")
        self._configured = [_parse_address(node) for node in nodes]
        self._discovered: list[Address] = []
        self._key = key
        self._slot = key_slot(key.encode()) if mode == "cluster" else None
        self._options: dict[str, Any] = {
            "username": username,
            "password": password,
            "ssl": tls,
            "ssl_ca_certs": tls_ca_file,
            "protocol": 2,
            "decode_responses": True,
            "encoding_errors": "replace",  # an invalid entry of another program must not stop a listener
            "single_connection_client": True,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": ANSWER_WITHIN,
            "socket_timeout": None,  # otherwise redis-py uses wait_for, which can swallow a cancellation in Python 3.11
        }
        self._shared: Redis | None = None
        self._in_use = asyncio.Lock()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator["Redis"]:
        """Yield a connection to the present node of the key; every use fails after it is lost or the key moves."""
        connection = await self._connect()
        try:
            yield connection
        finally:
            await _disconnect(connection)

    async def query(self, send: Callable[["Redis"], Awaitable[Answer]]) -> Answer:
        """Return the answer to *send*, with some retries; Transient SIGNALS_DOWN if all fail."""
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT), self._in_use:
                return await self._try(send)
        except CONNECTION_ERRORS as error:
            raise Transient(
                "SIGNALS_DOWN",
                f"Redis does not answer: {describe_error(error)}",
                hint="check that Redis runs, and the addresses, user, password and ACL of the Redis settings",
            ) from error

    async def close(self) -> None:
        """Close the shared connection."""
        connection, self._shared = self._shared, None
        if connection is not None:
            await _disconnect(connection)

    async def _try(self, send: Callable[["Redis"], Awaitable[Answer]]) -> Answer:
        backoff = Backoff(first=timedelta(milliseconds=50), limit=timedelta(seconds=1))
        for _ in range(_TRIES - 1):
            with suppress(*CONNECTION_ERRORS):
                return await self._query_once(send)
            await asyncio.sleep(backoff.compute_next().total_seconds())
        return await self._query_once(send)

    async def _query_once(self, send: Callable[["Redis"], Awaitable[Answer]]) -> Answer:
        if self._shared is None:
            self._shared = await self._connect()
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                return await send(self._shared)
        except BaseException:  # also when cancelled: a late answer must not be read as that of a later query
            await self.close()
            raise

    async def _connect(self) -> "Redis":
        if self._slot is None:
            return self._open(self._configured[0])
        connection = self._open(await self._find_node(self._slot))
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                await connection.exists(self._key)
        except BaseException as error:
            await _disconnect(connection)
            if type(error) is AskError:  # the slot is being moved, and the key has been moved already
                return _NodeConnection(host=error.host, port=error.port, **self._options)
            raise
        return connection

    def _open(self, address: Address) -> "Redis":
        host, port = address
        return Redis(host=host, port=port, **self._options)

    async def _find_node(self, slot: int) -> Address:
        last_error: Exception = RedisError("no node of the cluster serves the slot of the stream")
        # Configured and discovered nodes: all nodes may have new addresses by now, or the configured node may be dead.
        for address in [*_shuffle_addresses(self._configured), *_shuffle_addresses(self._discovered)]:
            try:
                shards = await self._read_shards(address)
            except CONNECTION_ERRORS as error:
                last_error = error
                continue
            self._discovered = [shard.master for shard in shards]
            for shard in shards:
                if shard.first <= slot <= shard.last:
                    return shard.master
        raise last_error

    async def _read_shards(self, address: Address) -> list["_ShardNode"]:
        connection = self._open(address)
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                slots: Any = await connection.cluster("SLOTS")
        finally:
            await _disconnect(connection)
        # A node that does not know its own address leaves it out.
        return [_ShardNode(first, last, (master[0] or address[0], master[1])) for first, last, master, *_ in slots]


def describe_error(error: Exception) -> str:
    """Return the type and the message of *error*: some errors of redis-py have no useful message."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class _NodeConnection(Redis):
    """A connection to a node that does not own the slot yet, to which every command must be announced."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        await super().execute_command("ASKING")  # type: ignore[no-untyped-call]
        return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _ShardNode:
    first: int
    last: int
    master: Address


async def _disconnect(connection: "Redis") -> None:
    closing = asyncio.create_task(_close(connection))
    try:
        await asyncio.shield(closing)
    finally:
        await closing  # a cancelled close would leave a socket open


async def _close(connection: "Redis") -> None:
    with suppress(*CONNECTION_ERRORS):  # an error of the close must not hide an earlier error
        await connection.aclose()


def _shuffle_addresses(addresses: Sequence[Address]) -> list[Address]:
    return sample(addresses, len(addresses))


def _parse_address(node: str) -> Address:
    host, _, port = node.rpartition(":")
    if not host or not port.isdecimal():
        raise BadConfig("REDIS_NODES", f"{node!r} is not host:port")
    return host.strip("[]"), int(port)
