"""The way to a key in a Redis Cluster or a single Redis, and what it means when there is none."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, TypeAlias, TypeVar

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from penstock.kernel.errors import BadConfig, Transient

Mode: TypeAlias = Literal["cluster", "single"]
Client: TypeAlias = "Redis | RedisCluster"
Address: TypeAlias = tuple[str, int]
Answer = TypeVar("Answer")

ANSWER_WITHIN = 2.0
TROUBLE = (RedisError, RedisClusterException, OSError)
_GIVE_UP_AFTER = 10.0
_RETRIES = 3


class Link:
    """One client for single commands, which tries again by itself, and lines that do not."""

    def __init__(
        self,
        nodes: Sequence[str],
        mode: Mode,
        *,
        username: str | None = None,
        password: str | None = None,
        tls: bool = False,
        tls_ca_file: str | None = None,
    ) -> None:
        self._addresses = _parsed(nodes, mode)
        self._options: dict[str, Any] = {
            "username": username,
            "password": password,
            "ssl": tls,
            "ssl_ca_certs": tls_ca_file,
            "protocol": 2,
            "decode_responses": True,
            "encoding_errors": "replace",  # a foreign entry may be nonsense, but must not stop a listener
            "socket_connect_timeout": ANSWER_WITHIN,
        }
        self._is_cluster = mode == "cluster"
        self._client: Client = self._cluster() if self._is_cluster else self._single()
        self._in_use = asyncio.Lock()  # a cluster's client that meets an error cuts the connections of its other users

    async def ask(self, question: Callable[[Client], Awaitable[Answer]]) -> Answer:
        """The answer, after a few tries if need be."""
        async with self._in_use:
            return await question(self._client)

    @asynccontextmanager
    async def line(self, key: str, answer_within: float) -> AsyncIterator["Redis"]:
        """A connection to the node that holds *key* now; once it is lost or the key moves, every use of it fails."""
        host, port = await self._home(key)
        line = Redis(
            host=host,
            port=port,
            single_connection_client=True,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=answer_within,
            **self._options,
        )
        try:
            yield line
        finally:
            with suppress(*TROUBLE):  # or it would hide a cancellation
                await line.aclose()

    async def close(self) -> None:
        """Close every connection of the client."""
        with suppress(*TROUBLE):
            await self._client.aclose()
            if isinstance(self._client, RedisCluster):
                # After an error its aclose does nothing, and would leave sockets open.
                await self._client.nodes_manager.aclose()
                await self._client.nodes_manager.aclose("startup_nodes")

    async def _home(self, key: str) -> Address:
        if not self._is_cluster:
            return self._addresses[0]
        async with self._cluster() as cluster:  # a new one knows how things are now
            node = cluster.get_node_from_key(key)
            if node is None:
                raise RedisError(f"no node holds {key}")
            return node.host, int(node.port)

    def _cluster(self) -> RedisCluster:
        nodes = [ClusterNode(host, port) for host, port in self._addresses]
        return RedisCluster(
            startup_nodes=nodes,
            dynamic_startup_nodes=False,  # they stay the way in, also when every node has moved to a new address
            retry=_patient(),
            socket_timeout=ANSWER_WITHIN,
            **self._options,
        )

    def _single(self) -> "Redis":
        host, port = self._addresses[0]
        return Redis(host=host, port=port, retry=_patient(), socket_timeout=ANSWER_WITHIN, **self._options)


@asynccontextmanager
async def asked() -> AsyncIterator[None]:
    """Wait so long and no longer; a Redis that is down, busy or refuses becomes Transient SIGNALS_DOWN."""
    cancellations = _cancellations()
    try:
        async with asyncio.timeout(_GIVE_UP_AFTER):
            yield
    except TROUBLE as error:
        raise Transient(
            "SIGNALS_DOWN",
            f"Redis does not do its part: {error or type(error).__name__}",
            hint="check that Redis runs, that the nodes are its addresses, and the user's password and rights",
        ) from error
    if _cancellations() > cancellations:  # redis-py waits with wait_for, which in Python 3.11 may swallow one
        raise asyncio.CancelledError


def _cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def _patient() -> Retry:
    return Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), _RETRIES)


def _parsed(nodes: Sequence[str], mode: Mode) -> list[Address]:
    if not nodes or (mode == "single" and len(nodes) > 1):
        raise BadConfig("REDIS_NODES", f"{mode} mode wants {'one node' if nodes else 'a node'}, there are {len(nodes)}")
    return [_address(node) for node in nodes]


def _address(node: str) -> Address:
    host, _, port = node.rpartition(":")
    if not host or not port.isdecimal():
        raise BadConfig("REDIS_NODES", f"{node!r} is not host:port")
    return host.strip("[]"), int(port)
