"""What the serving processes of a pod ask its loader, and what they are answered, over a socket between the two."""

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
_ANSWER_LIMIT = 32_000_000  # bytes of several items
_LARGEST = 256 * 1024 * 1024


class ReachRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """R21: let *version* or a later one be read; of *keys*, if it has to be from the primary."""

    tenant_id: str
    dict_code: str
    version: int
    what: Literal["items", "all", "version"]
    keys: list[str] = []


class FindRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Have a dictionary in memory that is not there yet."""

    tenant_id: str
    dict_code: str


class AuditRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """R32: compare a dictionary with the primary's."""

    tenant_id: str
    dict_code: str


class ShowRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A page about the pod itself."""

    path: str


class LoadedReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It is in memory now."""


class ItemsReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the primary says, under the version it says it for; only the items that there are."""

    mark: VersionStamp
    items: dict[str, str]


def check_size(size: int) -> None:
    """Invalid when several items together are more than one answer carries."""
    if size > _ANSWER_LIMIT:
        hint = "ask for fewer at once, or page through `all`"
        raise Invalid("ANSWER_TOO_LARGE", f"these items have {size} bytes together", hint=hint)


class RefusedReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Why not. The version is the primary's, where it is known."""

    status: int
    code: str
    message: str
    hint: str | None = None
    version: int | None = None


class DocumentReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A page, as it is sent."""

    status: int
    media_type: str
    body: bytes


Question = ReachRequest | FindRequest | AuditRequest | ShowRequest
Answer = LoadedReply | ItemsReply | RefusedReply | DocumentReply
_QUESTIONS = msgspec.msgpack.Decoder(tuple[int, Question])
_ANSWERS = msgspec.msgpack.Decoder(tuple[int, Answer])


class LoaderConnection:
    """The serving process's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = count(1)
        self._is_cut = False

    @classmethod
    async def over(cls, sock: socket.socket) -> "LoaderConnection":
        return cls(*await asyncio.open_connection(sock=sock))

    async def ask(self, question: Question, within: float) -> Answer:
        """The answer, or Transient when there is none in time."""
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            if self._is_cut:
                raise ConnectionResetError
            self._writer.write(_frame((number, question)))
            async with asyncio.timeout(within):
                return await answer
        except (TimeoutError, OSError, RuntimeError) as error:  # the last is uvloop's word for a line that is closed
            raise Transient("LOADER_UNRESPONSIVE", "the pod's loader does not answer", hint="try again") from error
        finally:
            del self._waiting[number]

    async def run(self) -> None:
        """Take answers in until the other end is gone."""
        while (data := await _read(self._reader)) is not None:
            number, answer = _ANSWERS.decode(data)
            waiting = self._waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        self._is_cut = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError())

    async def close(self) -> None:
        await _close(self._writer)


async def answering(sock: socket.socket, answer: Callable[[Question], Awaitable[Answer]]) -> None:
    """The loader's end: answer every question, each as soon as it can be, until the other end is gone."""
    reader, writer = await asyncio.open_connection(sock=sock)
    under_way: set[asyncio.Task[None]] = set()

    async def respond(number: int, question: Question) -> None:
        writer.write(_frame((number, await answer(question))))

    try:
        while (data := await _read(reader)) is not None:
            task = asyncio.create_task(respond(*_QUESTIONS.decode(data)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    finally:
        for task in under_way:
            task.cancel()
        await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _frame(message: tuple[int, Question | Answer]) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _SIZE.pack(len(data)) + data


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        return await reader.readexactly(min(size, _LARGEST))
    except (asyncio.IncompleteReadError, OSError):
        return None
