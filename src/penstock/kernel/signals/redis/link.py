"""The way to one key, in a Redis Cluster or on a single Redis, and what it means when there is none."""

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
TROUBLE = (RedisError, OSError)
_GIVE_UP_AFTER = 10.0
_TRIES = 4


class NodeConnections:
    """Opens lines to the node that holds *key*, and keeps one of them for single questions.

    redis-py's cluster client is not used: it reconnects in silence, where a listener has to know, and when it meets an
    error it cuts the connections of its other users. One key lives on one node, which any node can tell.
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
            wanted = "one node" if nodes else "a node"
            raise BadConfig("REDIS_NODES", f"{mode} mode wants {wanted}, there are {len(nodes)}")
        self._given = [_address(node) for node in nodes]
        self._learned: list[Address] = []
        self._key = key
        self._slot = key_slot(key.encode()) if mode == "cluster" else None
        self._options: dict[str, Any] = {
            "username": username,
            "password": password,
            "ssl": tls,
            "ssl_ca_certs": tls_ca_file,
            "protocol": 2,
            "decode_responses": True,
            "encoding_errors": "replace",  # a foreign entry may be nonsense, but must not stop a listener
            "single_connection_client": True,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": ANSWER_WITHIN,
            "socket_timeout": None,  # else redis-py uses wait_for, which in Python 3.11 can swallow a cancellation
        }
        self._kept: Redis | None = None
        self._in_use = asyncio.Lock()

    @asynccontextmanager
    async def line(self) -> AsyncIterator["Redis"]:
        """A connection to where the key is now; once it is lost or the key moves, every use of it fails."""
        line = await self._connect()
        try:
            yield line
        finally:
            await _hang_up(line)

    async def ask(self, question: Callable[["Redis"], Awaitable[Answer]]) -> Answer:
        """The answer, after a few tries if need be; else Transient SIGNALS_DOWN."""
        try:
            async with asyncio.timeout(_GIVE_UP_AFTER), self._in_use:
                return await self._try(question)
        except TROUBLE as error:
            raise Transient(
                "SIGNALS_DOWN",
                f"Redis does not do its part: {named(error)}",
                hint="check that Redis runs, that the nodes are its addresses, and the user's password and rights",
            ) from error

    async def close(self) -> None:
        """Close the kept line."""
        line, self._kept = self._kept, None
        if line is not None:
            await _hang_up(line)

    async def _try(self, question: Callable[["Redis"], Awaitable[Answer]]) -> Answer:
        backoff = Backoff(first=timedelta(milliseconds=50), limit=timedelta(seconds=1))
        for _ in range(_TRIES - 1):
            with suppress(*TROUBLE):
                return await self._ask_once(question)
            await asyncio.sleep(backoff.next().total_seconds())
        return await self._ask_once(question)

    async def _ask_once(self, question: Callable[["Redis"], Awaitable[Answer]]) -> Answer:
        if self._kept is None:
            self._kept = await self._connect()
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                return await question(self._kept)
        except BaseException:  # also when cancelled: an answer may be under way that belongs to no later question
            await self.close()
            raise

    async def _connect(self) -> "Redis":
        if self._slot is None:
            return self._line_to(self._given[0])
        line = self._line_to(await self._home(self._slot))
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                await line.exists(self._key)
        except BaseException as error:
            await _hang_up(line)
            if type(error) is AskError:  # the slot is about to move, and the key has gone ahead
                return _NodeConnection(host=error.host, port=error.port, **self._options)
            raise
        return line

    def _line_to(self, address: Address) -> "Redis":
        host, port = address
        return Redis(host=host, port=port, **self._options)

    async def _home(self, slot: int) -> Address:
        trouble: Exception = RedisError("no node of the cluster serves the stream's slot")
        # Those given as well as those learned: by now all nodes may have moved to new addresses, or the given one died.
        for address in [*_shuffled(self._given), *_shuffled(self._learned)]:
            try:
                shards = await self._shards(address)
            except TROUBLE as error:
                trouble = error
                continue
            self._learned = [shard.master for shard in shards]
            for shard in shards:
                if shard.first <= slot <= shard.last:
                    return shard.master
        raise trouble

    async def _shards(self, address: Address) -> list["_ShardNode"]:
        line = self._line_to(address)
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                told: Any = await line.cluster("SLOTS")
        finally:
            await _hang_up(line)
        # A node that does not know its own address leaves it out.
        return [_ShardNode(first, last, (master[0] or address[0], master[1])) for first, last, master, *_ in told]


def named(error: Exception) -> str:
    """What redis-py says, with its kind: a MOVED says nothing but an address, a time-out nothing at all."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class _NodeConnection(Redis):
    """A line to a node that does not own the slot yet, which every command has to acknowledge."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        await super().execute_command("ASKING")  # type: ignore[no-untyped-call]
        return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _ShardNode:
    first: int
    last: int
    master: Address


async def _hang_up(line: "Redis") -> None:
    closing = asyncio.create_task(_close(line))
    try:
        await asyncio.shield(closing)
    finally:
        await closing  # cancelled half way it would leave a socket open


async def _close(line: "Redis") -> None:
    with suppress(*TROUBLE):  # what goes wrong with a farewell must not hide what came before
        await line.aclose()


def _shuffled(addresses: Sequence[Address]) -> list[Address]:
    return sample(addresses, len(addresses))


def _address(node: str) -> Address:
    host, _, port = node.rpartition(":")
    if not host or not port.isdecimal():
        raise BadConfig("REDIS_NODES", f"{node!r} is not host:port")
    return host.strip("[]"), int(port)
