"""Requests of the serving processes of a pod to its loader, and the replies, over a socket pair."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from itertools import count
from struct import Struct
from typing import Literal

import msgspec

from penstock.kernel.errors import Invalid, Transient
from penstock.refdata.model import VersionStamp

_SIZE = Struct(">I")
_ITEMS_SIZE_LIMIT = 32_000_000  # bytes of several items in one response
_MESSAGE_SIZE_LIMIT = 256 * 1024 * 1024


class BarrierRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """R21: make *version* or a later one readable; *keys* are read from the primary if memory is behind."""

    tenant_id: str
    dict_code: str
    version: int
    resource: Literal["items", "all", "version"]
    keys: list[str] = []


class LoadRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load a dictionary that is not in memory."""

    tenant_id: str
    dict_code: str


class AuditRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """R32: compare a dictionary with the primary."""

    tenant_id: str
    dict_code: str


class DocumentRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Return a document about the pod itself, such as its health or its metrics."""

    path: str


class LoadedReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The requested version is in memory."""


class ItemsReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Items that were read from the primary, and their version; missing keys are left out."""

    mark: VersionStamp
    items: dict[str, str]


def check_size(size: int) -> None:
    """Raise Invalid if several items together exceed the limit of one response."""
    if size > _ITEMS_SIZE_LIMIT:
        problem = f"the requested items have {size} bytes together, more than {_ITEMS_SIZE_LIMIT}"
        raise Invalid("ANSWER_TOO_LARGE", problem, hint="request fewer keys, or page through `all`")


class RefusedReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The error of a request; *version* is that of the primary if it is known."""

    status: int
    code: str
    message: str
    hint: str | None = None
    version: int | None = None


class DocumentReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A document with its status and media type."""

    status: int
    media_type: str
    body: bytes


LoaderRequest = BarrierRequest | LoadRequest | AuditRequest | DocumentRequest
LoaderReply = LoadedReply | ItemsReply | RefusedReply | DocumentReply
_REQUEST_DECODER = msgspec.msgpack.Decoder(tuple[int, LoaderRequest])
_REPLY_DECODER = msgspec.msgpack.Decoder(tuple[int, LoaderReply])


class LoaderConnection:
    """The end of a serving process: sends requests, and matches replies by number."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, asyncio.Future[LoaderReply]] = {}
        self._numbers = count(1)
        self._is_closed = False

    @classmethod
    async def open(cls, sock: socket.socket) -> "LoaderConnection":
        return cls(*await asyncio.open_connection(sock=sock))

    async def request(self, request: LoaderRequest, timeout: float) -> LoaderReply:
        """Return the reply to *request*; Transient if there is none within *timeout* seconds."""
        number = next(self._numbers)
        reply: asyncio.Future[LoaderReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            if self._is_closed:
                raise ConnectionResetError
            self._writer.write(_encode_frame((number, request)))
            async with asyncio.timeout(timeout):
                return await reply
        except (TimeoutError, OSError, RuntimeError) as error:  # uvloop raises RuntimeError if the socket is closed
            problem = "the loader process of the pod does not answer"
            raise Transient("LOADER_UNRESPONSIVE", problem, hint="try again") from error
        finally:
            del self._waiting[number]

    async def receive_replies(self) -> None:
        """Receive replies until the loader closes the connection."""
        while (data := await _read_frame(self._reader)) is not None:
            number, reply = _REPLY_DECODER.decode(data)
            waiting = self._waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(reply)
        self._is_closed = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError())

    async def close(self) -> None:
        await _close(self._writer)


async def serve_requests(sock: socket.socket, handle: Callable[[LoaderRequest], Awaitable[LoaderReply]]) -> None:
    """Handle the requests of a serving process concurrently until it closes the connection."""
    reader, writer = await asyncio.open_connection(sock=sock)
    tasks: set[asyncio.Task[None]] = set()

    async def respond(number: int, request: LoaderRequest) -> None:
        writer.write(_encode_frame((number, await handle(request))))

    try:
        while (data := await _read_frame(reader)) is not None:
            task = asyncio.create_task(respond(*_REQUEST_DECODER.decode(data)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _encode_frame(message: tuple[int, LoaderRequest | LoaderReply]) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _SIZE.pack(len(data)) + data


async def _read_frame(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        return await reader.readexactly(min(size, _MESSAGE_SIZE_LIMIT))
    except (asyncio.IncompleteReadError, OSError):
        return None
